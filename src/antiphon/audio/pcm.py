"""Converts PCM bytes to float32 and back, and resamples streams."""

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


def from_frames(data: bytes, width: int, channels: int) -> Pcm:
    """Convert interleaved signed little-endian PCM to mono float32 in [-1, 1): the mean of the channels.

    `width` is 1 to 4 bytes a sample. Raises ValueError if `data` is not a whole number of frames, and for other values
    of `width` and `channels`.
    """
    if not (1 <= width <= 4 and 1 <= channels <= MAX_CHANNELS):
        raise ValueError(f"PCM of {channels} channels and {width} bytes a sample is not supported")
    if len(data) % (width * channels):
        raise ValueError(f"{len(data)} bytes are no whole number of frames of {width * channels} bytes")
    # Each sample becomes the high bytes of a 32-bit number.
    wide = np.zeros((len(data) // width, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    samples = wide.view("<i4").reshape(-1, channels).astype(np.float32) / np.float32(2**31)
    return np.asarray(samples[:, 0] if channels == 1 else samples.mean(1, dtype=np.float32))


# The most channels of interleaved PCM.
MAX_CHANNELS = 8
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


# Samples of the output by which `Doubler` is late; odd.
_LATE = 63


def _halfway() -> Pcm:
    """Return the taps that give the value halfway between two samples: every second one of a half-band filter with
    Kaiser's window. The others are 0, except the one in the middle.
    """
    at = np.arange(-_LATE, _LATE + 1)
    taps = (np.sinc(at / 2) * np.kaiser(len(at), 8.0))[::2]
    return np.asarray(taps / taps.sum(), np.float32)


_HALFWAY = _halfway()


class Doubler:
    """Doubles the rate of one mono float32 stream, in chunks of any size. The output is late by 4 ms at 16 kHz.

    From 8 to 16 kHz, a `Resampler` gives its output in blocks of up to 116 ms, which is too late for a call. This
    filter is flat to 0.1 dB up to 3.7 kHz of these 4, and 60 dB down from 4.3 kHz on.
    """

    def __init__(self) -> None:
        # The newest samples of the input, which the next output still needs.
        self._kept = np.zeros(_LATE, np.float32)

    def feed(self, pcm: Pcm) -> Pcm:
        """Return the next output: float32, twice as many samples as `pcm`."""
        joined = np.concatenate((self._kept, pcm))
        self._kept = joined[len(pcm) :]
        out = np.empty(2 * len(pcm), np.float32)
        # An odd sample is one of the input. An even one lies halfway between two of them.
        middle = _LATE // 2 + 1
        out[1::2] = joined[middle : middle + len(pcm)]
        out[0::2] = np.convolve(joined, _HALFWAY, "valid") if len(pcm) else 0.0
        return out
