"""Converts PCM16 bytes to float32 and back, and resamples streams."""

from __future__ import annotations

import numpy as np
import soxr

from antiphon.audio import Pcm


def from_pcm16(data: bytes) -> Pcm:
    """Convert little-endian 16-bit mono bytes to float32 in [-1, 1). Raises ValueError if the byte count is odd."""
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def to_pcm16(pcm: Pcm) -> bytes:
    """Convert float32 to little-endian 16-bit bytes, rounded to the nearest value.

    Samples outside [-1, 1] are clipped. `to_pcm16(from_pcm16(data))` returns the same bytes.
    """
    return np.clip(np.round(pcm * np.float32(32768)), -32768, 32767).astype("<i2").tobytes()


# The lowest and the highest rate for resampling.
RATES_HZ = 1_000, 1_000_000


class Resampler:
    """Resamples one mono float32 stream from `from_hz` to `to_hz` (soxr's default quality), in chunks of any size.

    The joined output does not depend on the chunk sizes. If both rates are equal, the input is returned unchanged,
    without a copy. Raises ValueError for a rate outside RATES_HZ, because the library could take hours to compute the
    filters.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        for rate_hz in (from_hz, to_hz):
            if not RATES_HZ[0] <= rate_hz <= RATES_HZ[1]:
                raise ValueError(f"a sample rate of {rate_hz} Hz is not supported")
        self._stream = None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")

    def feed(self, pcm: Pcm) -> Pcm:
        """Return the output that `pcm` completes: float32 [num_samples], at the new rate. It may be empty.

        The output lags behind the input by the length of the filter until `flush` is called.
        """
        return pcm if self._stream is None else np.asarray(self._stream.resample_chunk(pcm), np.float32)

    def flush(self) -> Pcm:
        """Return the rest of the output, float32 at the new rate, and reset the resampler for another stream."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        tail = np.asarray(self._stream.resample_chunk(np.zeros(0, np.float32), last=True), np.float32)
        self._stream.clear()
        return tail
