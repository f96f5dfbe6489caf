"""Audio that arrives in pieces: raw samples, containers that are found out, and Opus packets."""

from __future__ import annotations

import gc
import io
import threading
import time

import av
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.incoming import MAX_PIECE_S, Encoding, IncomingAudio
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import ALAW, FLOAT, PCM, ULAW, wav_header
from antiphon.errors import MediaError

SECONDS = 1.5
TONE = (0.4 * np.sin(np.arange(int(SECONDS * SAMPLE_RATE_HZ)) * 2 * np.pi * 220 / SAMPLE_RATE_HZ)).astype(np.float32)


def heard(encoding: Encoding, data: bytes, piece: int, **options: int) -> Pcm:
    incoming = IncomingAudio(encoding, **options)
    parts = [incoming.feed(data[at : at + piece]) for at in range(0, len(data), piece)]
    return np.concatenate([*parts, incoming.flush()])


def pitch_hz(pcm: Pcm) -> float:
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm))))
    return float(np.argmax(spectrum) * SAMPLE_RATE_HZ / len(pcm))


def contained(format: str, codec: str, rate_hz: int) -> bytes:
    """Return the tone as a file of this format."""
    out = io.BytesIO()
    samples = to_pcm16(np.repeat(TONE, rate_hz // SAMPLE_RATE_HZ))
    with av.open(out, "w", format=format) as container:
        track = container.add_stream(codec, rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate = rate_hz
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("piece", [1, 333, 4096])
@pytest.mark.parametrize(
    ("encoding", "data", "tolerance"),
    [
        ("s16", to_pcm16(TONE), 1e-4),
        ("f32", TONE.astype("<f4").tobytes(), 1e-6),
        ("ulaw", to_ulaw(TONE), 0.02),
        ("alaw", to_alaw(TONE), 0.02),
        ("container", wav_header(SAMPLE_RATE_HZ) + to_pcm16(TONE), 1e-4),
        ("container", wav_header(SAMPLE_RATE_HZ, tag=FLOAT) + TONE.astype("<f4").tobytes(), 1e-6),
        ("container", wav_header(SAMPLE_RATE_HZ, tag=ULAW) + to_ulaw(TONE), 0.02),
        ("container", wav_header(SAMPLE_RATE_HZ, tag=ALAW) + to_alaw(TONE), 0.02),
        ("container", wav_header(SAMPLE_RATE_HZ, tag=PCM, channels=2) + to_pcm16(np.repeat(TONE, 2)), 1e-4),
    ],
)
def test_samples_are_the_same_in_pieces_of_any_size(
    encoding: Encoding, data: bytes, tolerance: float, piece: int
) -> None:
    assert heard(encoding, data, piece) == pytest.approx(TONE, abs=tolerance)


@pytest.mark.parametrize("piece", [777, 1 << 20])
@pytest.mark.parametrize(
    ("format", "codec", "rate_hz"),
    [
        ("ogg", "libopus", 48_000),
        ("webm", "libopus", 48_000),
        ("mp3", "libmp3lame", 16_000),
        ("flac", "flac", 16_000),
        ("adts", "aac", 16_000),
        ("wav", "pcm_s24le", 16_000),
    ],
)
def test_a_container_is_found_out(format: str, codec: str, rate_hz: int, piece: int) -> None:
    pcm = heard("container", contained(format, codec, rate_hz), piece)
    assert len(pcm) / SAMPLE_RATE_HZ == pytest.approx(SECONDS, abs=0.15)
    assert pitch_hz(pcm[2000:-2000]) == pytest.approx(220, abs=2)


def test_other_rates_and_channels_are_converted() -> None:
    left_only = np.zeros((len(TONE), 2), np.float32)
    left_only[:, 0] = TONE
    mixed = heard("s16", to_pcm16(left_only.reshape(-1)), 1000, channels=2)
    assert mixed == pytest.approx(TONE / 2, abs=1e-4)
    slow = heard("s16", to_pcm16(TONE[::2]), 1000, rate_hz=8_000)
    assert len(slow) == pytest.approx(len(TONE), abs=16)
    for wrong in ({"rate_hz": 1}, {"channels": 0}, {"channels": 9}):
        with pytest.raises(ValueError, match="not supported"):
            IncomingAudio("s16", **wrong)


def test_opus_may_be_packets_or_a_container() -> None:
    encoder = av.CodecContext.create("libopus", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 48_000, "mono", av.AudioFormat("s16")
    encoder.open()
    frames = np.frombuffer(to_pcm16(np.repeat(TONE, 3)), "<i2")
    packets = []
    for at in range(0, len(frames) - 960, 960):
        frame = av.AudioFrame.from_ndarray(frames[None, at : at + 960], format="s16", layout="mono")
        frame.sample_rate = 48_000
        packets += [bytes(packet) for packet in encoder.encode(frame)]
    incoming = IncomingAudio("opus")
    pcm = np.concatenate([incoming.feed(packet) for packet in packets])
    assert pitch_hz(pcm[4000:]) == pytest.approx(220, abs=3)
    assert pitch_hz(heard("opus", contained("ogg", "libopus", 48_000), 500)[2000:]) == pytest.approx(220, abs=3)
    with pytest.raises(MediaError):
        IncomingAudio("opus").feed(b"\xff" * 3000)


def test_what_is_no_audio_is_refused_after_a_few_bytes() -> None:
    incoming = IncomingAudio("container")
    with pytest.raises(MediaError):
        for _ in range(20):
            incoming.feed(b"\x07" * 4000)
    with pytest.raises(MediaError, match="header"):
        endless = IncomingAudio("container")
        endless.feed(b"RIFF")
        for _ in range(100):
            endless.feed(b"\0" * 1000)
    with pytest.raises(MediaError):
        heard("container", b"hello, this is no audio", 5)


def test_a_few_bytes_that_stand_for_hours_are_refused() -> None:
    silence = np.zeros(int(1.2 * MAX_PIECE_S * 48_000), np.float32)
    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        track = container.add_stream("flac", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(silence.astype("<i2")[None], format="s16", layout="mono")
        frame.sample_rate = 48_000
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    with pytest.raises(MediaError):
        incoming = IncomingAudio("container")
        incoming.feed(out.getvalue())
        incoming.flush()


def test_the_thread_of_a_container_ends_with_its_stream() -> None:
    before = threading.active_count()
    abandoned = IncomingAudio("container")
    abandoned.feed(contained("ogg", "libopus", 48_000)[:3000])
    assert threading.active_count() == before + 1
    del abandoned
    gc.collect()
    until_s = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() == before
