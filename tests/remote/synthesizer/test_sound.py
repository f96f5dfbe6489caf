"""The audio of answers: WAV files of all forms in pieces of all sizes, samples, and what is refused by name."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteError
from antiphon.remote.synthesizer.sound import MAX_HEADER_BYTES, SampleFormat, SoundReader

RATE_HZ = 24_000
TONE = np.sin(np.arange(2_400) / 20).astype(np.float32) / 2
RAW = SampleFormat(RATE_HZ)
# A chunk with a text, which some servers put before the samples. Its odd size is padded.
LIST = b"LIST" + struct.pack("<I", 5) + b"INFO?" + b"\0"


def read(data: bytes, size: int = 1 << 20, to_hz: int = RATE_HZ, raw: SampleFormat = RAW) -> Pcm:
    reader = SoundReader(to_hz, raw)
    found = [reader.feed(data[at : at + size]) for at in range(0, len(data), size)]
    return np.concatenate([*found, reader.finish()])


def written(width: int, channels: int = 1, rate_hz: int = RATE_HZ) -> bytes:
    """Return the tone as a WAV file of integer samples, by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate_hz, 0, "NONE", ""))
        whole = np.round(np.repeat(TONE, channels).astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8")
        out.writeframes(whole.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()


def floats(tag: int = 3, extension: bytes = b"") -> bytes:
    fmt = struct.pack("<HHIIHH", tag, 1, RATE_HZ, 4 * RATE_HZ, 4, 32) + extension
    data = TONE.astype("<f4").tobytes()
    return (
        b"RIFF" + struct.pack("<I", 0) + b"WAVE" + b"fmt " + struct.pack("<I", len(fmt)) + fmt
        + LIST + b"data" + struct.pack("<I", len(data)) + data
    )  # fmt: skip


STREAMED = wav_header(RATE_HZ) + to_pcm16(TONE)
FILES = {
    "16 bits": written(2),
    "24 bits": written(3),
    "32 bits": written(4),
    "stereo": written(2, 2),
    "floats": floats(),
    "extensible": floats(0xFFFE, struct.pack("<HHIH", 22, 32, 4, 3) + bytes(14)),
    "of unknown length": STREAMED,
    "of length 0": wav_header(RATE_HZ, 0) + to_pcm16(TONE),
    "followed by a text": written(2) + LIST,
    "samples": to_pcm16(TONE),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [1, 7, 997, 1 << 20])
def test_audio_is_the_same_in_pieces_of_any_size(name: str, size: int) -> None:
    np.testing.assert_allclose(read(FILES[name], size), TONE, atol=1e-4)


@pytest.mark.parametrize("size", [5, 44 + 4800, 1 << 20])
def test_wav_files_in_a_row_are_one_audio(size: int) -> None:
    np.testing.assert_allclose(read(written(2) * 3, size), np.tile(TONE, 3), atol=1e-4)


def test_a_server_that_sends_a_header_with_each_chunk_is_understood() -> None:
    reader = SoundReader(RATE_HZ, RAW)
    found = [reader.feed(STREAMED) for _ in range(3)]
    np.testing.assert_allclose(np.concatenate([*found, reader.finish()]), np.tile(TONE, 3), atol=1e-4)


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 44_100, 48_000])
def test_audio_of_another_rate_is_resampled(rate_hz: int) -> None:
    seconds = len(TONE) / rate_hz
    assert len(read(written(2, rate_hz=rate_hz))) == pytest.approx(seconds * RATE_HZ, abs=2)
    assert len(read(to_pcm16(TONE), raw=SampleFormat(rate_hz))) == pytest.approx(seconds * RATE_HZ, abs=2)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (written(2)[:-100], "100 bytes before the end"),
        (written(2)[:30], "within the header"),
        (to_pcm16(TONE)[:-1], "within a sample"),
        (STREAMED[:-1], "within a sample"),
        (wav_header(7_999) + bytes(100), "7999 Hz"),
        (wav_header(400_000) + bytes(100), "400000 Hz"),
        (written(1), "integer samples of 8 bits"),
        (written(2, 9), "9 channels"),
        (floats(2), "compressed samples"),
        (STREAMED[:12] + b"data" + bytes(4), "without a format"),
        (STREAMED[:12] + b"fmt " + struct.pack("<I", 4) + bytes(4) + STREAMED[36:], "format is cut off"),
        (STREAMED[:12] + b"LIST" + struct.pack("<I", MAX_HEADER_BYTES) + bytes(100), "header is too long"),
        (b"ID3\x04" + bytes(100), "MP3"),
        (b"OggS" + bytes(100), "Ogg"),
        (b"fLaC" + bytes(100), "FLAC"),
        (bytes(4) + b"ftypM4A " + bytes(100), "MP4"),
        (b'{"error": "no such voice"}', "JSON"),
        (b"\n<!doctype html><p>Welcome", "HTML"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_cannot_be_read_is_refused_by_name(data: bytes, why: str, size: int) -> None:
    with pytest.raises(RemoteError, match=why):
        read(data, size)


def test_floats_that_are_no_numbers_are_silence() -> None:
    data = floats()[: -len(TONE) * 4] + np.full(len(TONE), np.nan, "<f4").tobytes()
    assert not read(data).any()
