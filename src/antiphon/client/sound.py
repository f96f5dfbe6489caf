"""Sound between what users of the client have and what the wires carry: mono PCM of 16 bits, little-endian."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16

# Mono sound: PCM of 16 bits as bytes, or float32 [num_samples] in [-1, 1].
Sound = bytes | Pcm


def pcm16(sound: Sound) -> bytes:
    """Return sound as PCM of 16 bits. Raises ValueError for half a sample."""
    if isinstance(sound, bytes | bytearray | memoryview):
        if len(sound) % 2:
            raise ValueError("PCM of 16 bits has two bytes a sample; this ends in the middle of one")
        return bytes(sound)
    return to_pcm16(np.asarray(sound, np.float32))


def encoded(sound: Sound) -> str:
    """Return sound as base64 of PCM of 16 bits."""
    return b64encode(pcm16(sound)).decode()


class WireSound:
    """Sound of one stream at a rate of its own, for a wire that has another."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._resampler = Resampler(from_hz, to_hz) if from_hz != to_hz else None

    def feed(self, sound: Sound) -> bytes:
        """Return what of the stream is known at the wire's rate."""
        if not self._resampler:
            return pcm16(sound)
        return to_pcm16(self._resampler.feed(from_pcm16(sound) if isinstance(sound, bytes) else sound))

    def flush(self) -> bytes:
        """Return the rest; the stream is over."""
        return to_pcm16(self._resampler.flush()) if self._resampler else b""
