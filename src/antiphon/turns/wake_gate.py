"""Holds back the audio of a paused conversation until it may have speech. Pure.

The loudness of frames of 20 ms is compared with that of the background. This costs a few microseconds for 100 ms of
audio, where voice activity detection costs a hundred times as much. The audio before a sound is passed on with it, so
that speech does not lose its beginning. What is passed on is then judged by voice activity detection.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

FRAME = SAMPLE_RATE_HZ // 50
# Audio that is kept from before a sound, and the time for which the gate stays open after the last sound, in seconds.
KEPT_S, OPEN_S = 1.0, 1.5
# A sound is this many times as powerful as the background, and has at least this power: -50 dB of full scale.
RATIO, MIN_POWER = 4.0, 1e-5
# How fast the measured background follows the power of frames: a fall at once, a rise by this part for each frame.
RISE = 0.05


class WakeGate:
    """The gate of one paused conversation. With `opens` false, it stays closed."""

    def __init__(self, *, opens: bool = True) -> None:
        self._opens = opens
        # The newest audio that was held back, and its number of samples.
        self._kept: deque[Pcm] = deque()
        self._num_kept = 0
        self._background = 0.0
        # Samples for which the gate stays open.
        self._left = 0

    def feed(self, pcm: Pcm) -> Pcm:
        """Return the audio to be listened to: none while it is quiet. float32 [num_samples] at SAMPLE_RATE_HZ."""
        if self._opens and self._is_sound(pcm):
            self._left = int(OPEN_S * SAMPLE_RATE_HZ)
        if self._left <= 0:
            self._keep(pcm)
            return np.zeros(0, np.float32)
        self._left -= len(pcm)
        held, self._num_kept = [*self._kept, pcm], 0
        self._kept.clear()
        return np.concatenate(held) if len(held) > 1 else pcm

    def _is_sound(self, pcm: Pcm) -> bool:
        frames = pcm[: len(pcm) // FRAME * FRAME].reshape(-1, FRAME)
        powers = np.square(frames).mean(axis=1)
        found = False
        for power in map(float, powers):
            found = found or power > max(RATIO * self._background, MIN_POWER)
            rises = power > self._background
            self._background += (power - self._background) * (RISE if rises else 1.0)
        return found

    def _keep(self, pcm: Pcm) -> None:
        self._kept.append(pcm)
        self._num_kept += len(pcm)
        while self._num_kept - len(self._kept[0]) >= KEPT_S * SAMPLE_RATE_HZ:
            self._num_kept -= len(self._kept.popleft())
