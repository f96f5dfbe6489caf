"""Converts the audio of an application to that of the protocols: mono 16-bit PCM, little-endian."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16

# Mono audio: 16-bit PCM as bytes or int16 [num_samples], or float32 [num_samples] in [-1, 1].
Audio = bytes | Pcm | npt.NDArray[np.int16]


def pcm16(audio: Audio) -> bytes:
    """Return audio as 16-bit PCM.

    Args:
        audio: Mono audio in any of the forms of `Audio`.

    Raises:
        ValueError: Bytes end in the middle of a sample.
        TypeError: An array of integers is not int16.
    """
    if isinstance(audio, bytes | bytearray | memoryview):
        if len(audio) % 2:
            raise ValueError("16-bit PCM has two bytes per sample; this audio ends in the middle of one")
        return bytes(audio)
    array = np.asarray(audio)
    if array.dtype == np.int16:
        return array.astype("<i2").tobytes()
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"audio must be int16, or floats in [-1, 1], not {array.dtype}")
    return to_pcm16(array.astype(np.float32))


def encoded(audio: Audio) -> str:
    """Return audio as base64 of 16-bit PCM. Raises what `pcm16` raises."""
    return b64encode(pcm16(audio)).decode()


class WireAudio:
    """Resamples one stream of audio to the sample rate of a protocol."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._resampler = Resampler(from_hz, to_hz) if from_hz != to_hz else None

    def feed(self, audio: Audio) -> bytes:
        """Return the samples at the new rate that this piece of audio completes, as 16-bit PCM."""
        pcm = pcm16(audio)
        return to_pcm16(self._resampler.feed(from_pcm16(pcm))) if self._resampler else pcm

    def flush(self) -> bytes:
        """End the stream and return its remaining samples."""
        return to_pcm16(self._resampler.flush()) if self._resampler else b""
