"""Holds back the audio of a paused conversation until it may have speech. Pure.

The loudness of frames of 20 ms is compared with that of the background. This costs a few microseconds for 100 ms of
audio, where voice activity detection costs a hundred times as much. The audio before a sound is passed on with it, so
that speech does not lose its beginning. What is passed on is then judged by voice activity detection.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm

FRAMES_PER_S = 50
# Audio that is kept from before a sound, and the time for which the gate stays open after the last sound, in seconds.
KEPT_S, OPEN_S = 1.0, 1.5
# A sound is this many times as powerful as the background, and has at least this power: -70 dB of full scale. Speech
# into a microphone that is set too low was transcribed down to -72 dB.
RATIO, MIN_POWER = 4.0, 1e-7
# How fast the measured background follows the power of frames: a fall at once, a rise by this part for each frame.
RISE = 0.05
_FULL_SCALE = np.float32(32768)


class WakeGate:
    """The gate of one paused conversation, for audio at `rate_hz`. Audio is float32 [num_samples] in [-1, 1)."""

    def __init__(self, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._frame = rate_hz // FRAMES_PER_S
        # The newest audio that was held back, as 16-bit samples, and its number of samples.
        self._kept: deque[npt.NDArray[np.int16]] = deque()
        self._num_kept = 0
        # The audio after the last whole frame.
        self._rest: Pcm = np.zeros(0, np.float32)
        # The power of the background, None before the first frame, and the constant part of its samples.
        self._background: float | None = None
        self._offset = 0.0
        # Samples for which the gate stays open.
        self._left = 0.0

    def open(self) -> None:
        """Hold back nothing more. What was kept so far is passed on with the next audio."""
        self._left = math.inf

    def feed(self, pcm: Pcm) -> Pcm:
        """Return the audio to be listened to: none while it is quiet. The result does not depend on how long the parts
        are, except that a part is passed on or held back as a whole.
        """
        if self._left < math.inf and self._is_sound(pcm):
            self._left = OPEN_S * self._rate_hz
        if self._left <= 0:
            self._keep(pcm)
            return pcm[:0]
        self._left -= len(pcm)
        if not self._kept:
            return pcm
        kept = np.concatenate(self._kept).astype(np.float32) / _FULL_SCALE
        self._kept.clear()
        self._num_kept = 0
        return np.concatenate((kept, pcm))

    def _is_sound(self, pcm: Pcm) -> bool:
        size = self._frame
        audio = np.concatenate((self._rest, pcm)) if len(self._rest) else pcm
        whole = len(audio) // size * size
        self._rest = audio[whole:].copy()
        frames = audio[:whole].reshape(-1, size)
        means, squares = frames.sum(axis=1) / size, np.einsum("ij,ij->i", frames, frames) / size
        found = False
        for mean, square in zip(means.tolist(), squares.tolist(), strict=True):
            if self._background is None:
                self._offset, self._background = mean, square - mean * mean
            # The offset that some microphones add to all samples is no sound.
            power = square - 2 * self._offset * mean + self._offset**2
            found = found or power > max(RATIO * self._background, MIN_POWER)
            self._background += (power - self._background) * (RISE if power > self._background else 1.0)
            self._offset += (mean - self._offset) * RISE
        return found

    def _keep(self, pcm: Pcm) -> None:
        self._kept.append((pcm * _FULL_SCALE).astype(np.int16))
        self._num_kept += len(pcm)
        while self._num_kept - len(self._kept[0]) >= KEPT_S * self._rate_hz:
            self._num_kept -= len(self._kept.popleft())
