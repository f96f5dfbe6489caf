"""Audio between what users of the client have and what the wires carry: mono PCM of 16 bits, little-endian."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16

# Mono audio: PCM of 16 bits as bytes or int16 [num_samples], or float32 [num_samples] in [-1, 1].
Audio = bytes | Pcm | npt.NDArray[np.int16]


def pcm16(audio: Audio) -> bytes:
    """Return audio as PCM of 16 bits. Raises ValueError for half a sample, TypeError for integers of other sizes."""
    if isinstance(audio, bytes | bytearray | memoryview):
        if len(audio) % 2:
            raise ValueError("PCM of 16 bits has two bytes a sample; this ends in the middle of one")
        return bytes(audio)
    array = np.asarray(audio)
    if array.dtype == np.int16:
        return array.astype("<i2").tobytes()
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"audio is of int16 or of floats in [-1, 1], not of {array.dtype}")
    return to_pcm16(array.astype(np.float32))


def encoded(audio: Audio) -> str:
    """Return audio as base64 of PCM of 16 bits."""
    return b64encode(pcm16(audio)).decode()


class WireAudio:
    """Audio of one stream at a rate of its own, for a wire that has another."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._resampler = Resampler(from_hz, to_hz) if from_hz != to_hz else None

    def feed(self, audio: Audio) -> bytes:
        """Return what of the stream is known at the wire's rate."""
        pcm = pcm16(audio)
        return to_pcm16(self._resampler.feed(from_pcm16(pcm))) if self._resampler else pcm

    def flush(self) -> bytes:
        """Return the rest; the stream is over."""
        return to_pcm16(self._resampler.flush()) if self._resampler else b""
