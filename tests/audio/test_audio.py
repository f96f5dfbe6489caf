from __future__ import annotations

import io
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio.containers import decode_all
from antiphon.audio.line.g711 import from_alaw, from_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.errors import MediaError
from tests.conftest import Recording


@given(st.binary(max_size=400).filter(lambda b: len(b) % 2 == 0))
def test_when_pcm16_is_converted_there_and_back_then_the_bytes_are_the_same(data: bytes) -> None:
    assert to_pcm16(from_pcm16(data)) == data


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([8000, 24000, 44100, 48000]), st.lists(st.integers(1, 4000), min_size=1, max_size=30))
def test_when_audio_is_resampled_in_chunks_then_the_result_does_not_depend_on_the_cuts(
    rate: int, sizes: list[int]
) -> None:
    pcm = np.sin(np.arange(sum(sizes)) * 0.05).astype(np.float32)
    whole = Resampler(rate, 16000)
    expected = np.concatenate((whole.feed(pcm), whole.flush()))
    cut, out, at = Resampler(rate, 16000), [], 0
    for size in sizes:
        out.append(cut.feed(pcm[at : at + size]))
        at += size
    out.append(cut.flush())
    np.testing.assert_allclose(np.concatenate(out), expected, atol=1e-6)
    assert abs(len(expected) - len(pcm) * 16000 / rate) <= 2


@pytest.mark.parametrize(("codec", "decode"), [("pcm_mulaw", from_ulaw), ("pcm_alaw", from_alaw)])
def test_when_g711_is_decoded_then_it_equals_the_reference_decoder(codec: str, decode: object) -> None:
    """Compare every code with FFmpeg's decoder."""
    context = av.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = 8000, "mono"
    codes = bytes(range(256))
    frames = context.decode(av.Packet(codes))
    reference = np.concatenate([f.to_ndarray()[0] for f in frames]).astype(np.float32) / 32768
    np.testing.assert_array_equal(decode(codes), reference)  # type: ignore[operator]


def encoded(pcm: np.ndarray, container: str, codec: str, rate: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        resampler = av.AudioResampler(
            format=stream.format.name, layout="mono", rate=rate, frame_size=stream.frame_size or 0
        )
        frame = av.AudioFrame.from_ndarray(pcm[None], format="flt", layout="mono")
        frame.sample_rate = 16000
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("wav", "pcm_s16le", 16000),
        ("mp3", "libmp3lame", 44100),
        ("ogg", "libopus", 48000),
        ("webm", "libopus", 48000),
        ("mp4", "aac", 48000),
        ("flac", "flac", 16000),
    ],
)
def test_when_audio_is_in_any_container_then_it_is_decoded(
    container: str, codec: str, rate: int, recordings: dict[str, Recording]
) -> None:
    pcm = recordings["lj-LJ001-0008"].pcm
    back = decode_all(io.BytesIO(encoded(pcm, container, codec, rate)))
    assert abs(len(back) - len(pcm)) < 0.15 * 16000
    level = np.sqrt(np.mean(np.square(back)))
    assert level == pytest.approx(np.sqrt(np.mean(np.square(pcm))), rel=0.1)


@pytest.mark.parametrize("data", [b"", b"not a file at all", b"RIFF\x24\x00\x00\x00WAVEfmt ", bytes(1000)])
def test_when_bytes_cannot_be_decoded_then_a_media_error_is_raised(data: bytes) -> None:
    with pytest.raises(MediaError):
        decode_all(io.BytesIO(data))


def test_when_a_file_has_no_samples_then_a_media_error_is_raised() -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
    with pytest.raises(MediaError, match="no sound"):
        decode_all(io.BytesIO(out.getvalue()))


def test_when_a_file_is_no_sound_then_the_error_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").touch()
    (tmp_path / "page.md").write_text("# A page\n" * 100)
    reasons = {"missing": "no such file", "": "this is a folder"}
    reasons |= {"empty.wav": "the file is empty", "page.md": "the file is text, not sound"}
    for name, why in reasons.items():
        with pytest.raises(MediaError) as error:
            decode_all(str(tmp_path / name))
        assert str(error.value) == f"{tmp_path / name}: {why}"
