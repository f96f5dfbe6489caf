"""PCM16 bytes to float32 and back, and a resampler that keeps its state between chunks."""

from __future__ import annotations

import numpy as np
import soxr

from antiphon.audio import Pcm


def from_pcm16(data: bytes) -> Pcm:
    """Little-endian 16-bit mono bytes to float32 in [-1, 1). The length must be even."""
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def to_pcm16(pcm: Pcm) -> bytes:
    """float32 in [-1, 1] to little-endian 16-bit bytes; what lies outside is clipped."""
    return np.clip(np.round(pcm * np.float32(32768)), -32768, 32767).astype("<i2").tobytes()


class Resampler:
    """Mono float32 from one rate to another, in chunks of any size: the joined output does not depend on the cuts."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._stream = None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")

    def feed(self, pcm: Pcm) -> Pcm:
        """The output that `pcm` completes: float32 [num_samples at the new rate], may be empty."""
        return pcm if self._stream is None else np.asarray(self._stream.resample_chunk(pcm), np.float32)

    def flush(self) -> Pcm:
        """What the filter still holds. The resampler starts anew after it."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        tail = np.asarray(self._stream.resample_chunk(np.zeros(0, np.float32), last=True), np.float32)
        self._stream.clear()
        return tail
