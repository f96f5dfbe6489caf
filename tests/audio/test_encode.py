"""Speech formats: chunks form a file that other programs read. Changes of tempo keep the pitch."""

from __future__ import annotations

import io
import struct
from typing import get_args

import numpy as np
import pytest

from antiphon.audio import Pcm, SpeechFormat
from antiphon.audio.containers import decode_all
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.stretch import Stretch
from antiphon.audio.wav import UNKNOWN_SIZE, wav_header

RATE_HZ = 24_000
FORMATS: tuple[SpeechFormat, ...] = get_args(SpeechFormat)


def tone(seconds: float, hz: float = 220.0) -> Pcm:
    at = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    return (0.4 * np.sin(2 * np.pi * hz * at) * np.minimum(1, 20 * at)).astype(np.float32)


def encoded(pcm: Pcm, format: SpeechFormat, chunk: int, *, whole: bool = False) -> bytes:
    encoder = Encoder(format, RATE_HZ, whole=whole)
    return b"".join(encoder.feed(pcm[at : at + chunk]) for at in range(0, len(pcm), chunk)) + encoder.finish()


def pitch_hz(pcm: Pcm) -> float:
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm))))
    return float(np.argmax(spectrum) * RATE_HZ / len(pcm))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk", [577, 36_000, 1_000_000])
def test_when_audio_is_encoded_in_chunks_then_the_file_can_be_decoded(format: SpeechFormat, chunk: int) -> None:
    pcm = tone(1.5)
    data = encoded(pcm, format, chunk)
    if format == "pcm":
        assert data == to_pcm16(pcm)
        return
    heard = decode_all(io.BytesIO(data), RATE_HZ)
    assert len(heard) / RATE_HZ == pytest.approx(1.5, abs=0.08)
    assert pitch_hz(heard[3000:-3000]) == pytest.approx(220, abs=2)
    assert np.abs(heard).max() == pytest.approx(0.4, abs=0.06)


@pytest.mark.parametrize("format", FORMATS)
def test_when_the_audio_is_cut_otherwise_then_the_file_is_the_same(format: SpeechFormat) -> None:
    pcm = tone(1.0)
    # Each Ogg stream has a random serial number.
    one, other = encoded(pcm, format, 24_000), encoded(pcm, format, 1000)
    if format != "opus":
        assert one == other
    assert len(one) == len(other)


@pytest.mark.parametrize("format", FORMATS)
def test_when_there_is_no_audio_then_finish_still_returns_a_file(format: SpeechFormat) -> None:
    encoder = Encoder(format, RATE_HZ)
    data = encoder.finish()
    assert data == b"" if format == "pcm" else isinstance(data, bytes)


def test_when_a_wav_is_encoded_whole_then_its_header_has_sizes_and_a_growing_one_has_none() -> None:
    pcm = tone(0.5)
    whole, growing = encoded(pcm, "wav", 1000, whole=True), encoded(pcm, "wav", 1000)
    assert whole[44:] == growing[44:] == to_pcm16(pcm)
    assert struct.unpack_from("<I", whole, 4)[0] == len(whole) - 8
    assert struct.unpack_from("<I", whole, 40)[0] == len(whole) - 44
    assert struct.unpack_from("<I", growing, 4)[0] == struct.unpack_from("<I", growing, 40)[0] == UNKNOWN_SIZE
    assert len(wav_header(RATE_HZ)) == 44


def test_when_audio_is_too_loud_then_it_is_clipped_and_not_wrapped() -> None:
    pcm = 3 * tone(0.5)
    for format in ("wav", "flac"):
        heard = decode_all(io.BytesIO(encoded(pcm, format, 4000)), RATE_HZ)
        assert np.corrcoef(heard, np.clip(pcm, -1, 1))[0, 1] > 0.999


@pytest.mark.parametrize("tempo", [0.5, 0.8, 1.6, 2.0])
def test_when_audio_is_stretched_then_its_tempo_changes_and_its_pitch_stays(tempo: float) -> None:
    stretch, pcm = Stretch(RATE_HZ, tempo), tone(3.0)
    out = [stretch.feed(pcm[at : at + 5000]) for at in range(0, len(pcm), 5000)]
    heard = np.concatenate([*out, stretch.flush()])
    assert len(heard) / RATE_HZ == pytest.approx(3.0 / tempo, rel=0.03)
    assert pitch_hz(heard[6000:-6000]) == pytest.approx(220, abs=3)
