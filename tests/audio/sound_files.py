"""Writes audio files as other programs do, and finds out which parts of a recording are in decoded audio."""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# Kind -> container, codec, rate, options.
KINDS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "mp3": ("mp3", "libmp3lame", 44_100, {}),
    "adts": ("adts", "aac", 44_100, {}),
    "m4a": ("ipod", "aac", 44_100, {}),
    "faststart": ("ipod", "aac", 44_100, {"movflags": "+faststart"}),
    "fragmented": (
        "mp4", "aac", 48_000,
        {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "500000"},
    ),
    "flac": ("flac", "flac", 16_000, {}),
    "opus": ("ogg", "libopus", 48_000, {"page_duration": "200000"}),
    "vorbis": ("ogg", "vorbis", 44_100, {"page_duration": "200000"}),
    "webm": ("webm", "libopus", 48_000, {"cluster_time_limit": "500"}),
    "wav": ("wav", "pcm_s16le", 16_000, {}),
}  # fmt: skip
WINDOW = SAMPLE_RATE_HZ // 5


def written(
    channels: Pcm, container: str, codec: str, rate_hz: int, options: dict[str, str] | None = None, layout: str = "mono"
) -> bytes:
    """Return a file with samples at 16 kHz: [num_samples], or [channels, num_samples]."""
    samples = np.ascontiguousarray(np.atleast_2d(channels), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with av.open(str(path), "w", format=container, options=options or {}) as file:
            stream: Any = file.add_stream(codec, rate=rate_hz, layout=layout)
            stream.codec_context.options = {"strict": "experimental"}
            resampler = av.AudioResampler(stream.format.name, layout, rate_hz, stream.frame_size or 0)
            frame = av.AudioFrame.from_ndarray(samples, "fltp", layout)
            frame.sample_rate = SAMPLE_RATE_HZ
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                file.mux(stream.encode(part))
            file.mux(stream.encode(None))
        return path.read_bytes()


def of_kind(pcm: Pcm, kind: str) -> bytes:
    container, codec, rate_hz, options = KINDS[kind]
    if codec == "vorbis":
        # FFmpeg's own encoder only writes stereo.
        return written(np.stack([pcm, pcm]), container, codec, rate_hz, options, "stereo")
    return written(pcm, container, codec, rate_hz, options)


def wav(
    data: bytes,
    *,
    code: int = 1,
    channels: int = 1,
    rate_hz: int = SAMPLE_RATE_HZ,
    bits: int = 16,
    sizes: int | None = None,
    fmt: bytes = b"",
    before: bytes = b"",
    behind: bytes = b"",
    order: str = "<",
    block: int | None = None,
) -> bytes:
    """Return a hand-made WAV file. `sizes` replaces both of its lengths. `before`, `behind`: chunks around `fmt `."""
    block = channels * bits // 8 if block is None else block
    head = struct.pack(f"{order}HHIIHH", code, channels, rate_hz, rate_hz * block, block, bits) + fmt
    length = len(data) if sizes is None else sizes
    body = b"WAVE" + before + b"fmt " + struct.pack(f"{order}I", len(head)) + head + behind
    body += b"data" + struct.pack(f"{order}I", length) + data
    name = b"RIFF" if order == "<" else b"RIFX"
    return name + struct.pack(f"{order}I", len(body) if sizes is None else sizes) + body


def pcm16(pcm: NDArray[np.float32], order: str = "<") -> bytes:
    return (np.clip(pcm, -1, 1) * 32767).astype(f"{order}i2").tobytes()


def heard(recording: Pcm, found: Pcm) -> list[bool]:
    """Return for each window of a recording with sound whether it is in `found`, at most 0.1 s from its place."""
    result = []
    for start in range(0, len(recording) - WINDOW, WINDOW):
        window = recording[start : start + WINDOW].astype(np.float64)
        if np.sqrt(np.mean(window**2)) < 0.02:
            continue
        near = np.zeros(WINDOW + 3200)
        given = found[max(0, start - 1600) : start + WINDOW + 1600]
        near[: len(given)] = given
        products = np.correlate(near, window, "valid")
        powers = np.convolve(near**2, np.ones(WINDOW), "valid") * (window**2).sum()
        result.append(bool((np.abs(products) / np.sqrt(np.maximum(powers, 1e-9))).max() > 0.7))
    return result


def played_s(data: bytes) -> float:
    """Return the seconds of audio that a plain player finds, which decodes frame by frame and ignores errors."""
    seconds = 0.0
    try:
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            for _ in range(20):
                try:
                    for packet in container.demux(container.streams.audio[0]):
                        try:
                            seconds += sum(frame.samples / frame.sample_rate for frame in packet.decode())
                        except av.error.FFmpegError:
                            continue
                    break
                except av.error.FFmpegError:
                    continue
    except (av.error.FFmpegError, IndexError, ValueError):
        pass
    return seconds
