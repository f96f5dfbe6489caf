"""The sound of a video while it comes: cut into the windows that a model encodes, each once."""

from __future__ import annotations

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import SoundTrack, SoundWindow

# Samples around a window that its first and last spectra reach into: two hops before it, and one behind it.
NUM_BEFORE, NUM_AFTER = 320, 160
# What is left behind the last whole window is not heard if it is shorter: no row is left of it.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10
# Sound that begins within so many seconds of where the last ended goes on from it.
TOLERANCE_S = 0.02
# Bound: past so many seconds of sound, the oldest windows leave until half of them are left.
MAX_S = 60.0


class VideoSound:
    """The sound since the last question. `at_s`: when it begins, on the session's clock; None: there is none.

    `windows`: those that are complete, each `window_s` long. `num_samples`: how many were added.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._size = round(window_s * SAMPLE_RATE_HZ)
        self.clear()

    def clear(self) -> None:
        """Forget all of it."""
        self.at_s: float | None = None
        self.windows: list[SoundWindow] = []
        self._track = SoundTrack()
        # What no complete window has, with the samples before it.
        self._rest: Pcm = np.zeros(0, np.float32)
        self._num_before = 0
        # All that was added, with what left since.
        self.num_samples = 0

    @property
    def end_s(self) -> float:
        """When it ends so far; 0 where there is none."""
        if self.at_s is None:
            return 0.0
        return self.complete_s + (len(self._rest) - self._num_before) / SAMPLE_RATE_HZ

    @property
    def complete_s(self) -> float:
        """When its complete windows end."""
        return (self.at_s or 0.0) + len(self.windows) * self._window_s

    def append(self, pcm: Pcm, at_s: float) -> bool:
        """Add sound that begins at `at_s`; return whether a window is complete now. Where it does not begin at the end,
        all before it is forgotten.
        """
        if self.at_s is None or abs(at_s - self.end_s) > TOLERANCE_S:
            self.clear()
            self.at_s = at_s
        self._rest = np.concatenate((self._rest, pcm))
        self.num_samples += len(pcm)
        before = len(self.windows)
        while len(self._rest) >= self._num_before + self._size + NUM_AFTER:
            whole = self._rest[: self._num_before + self._size + NUM_AFTER].copy()
            self.windows.append(SoundWindow(whole, self._track, self._num_before, NUM_AFTER))
            self._rest = self._rest[self._num_before + self._size - NUM_BEFORE :]
            self._num_before = NUM_BEFORE
        is_complete = len(self.windows) > before
        if len(self.windows) * self._window_s > MAX_S:
            num_dropped = len(self.windows) - int(MAX_S / 2 / self._window_s)
            del self.windows[:num_dropped]
            self.at_s += num_dropped * self._window_s
        return is_complete

    def cut(self, num_samples: int) -> Pcm:
        """Cut what came behind so many samples off, as far as it is in no complete window, and return it."""
        excess = min(self.num_samples - num_samples, len(self._rest) - self._num_before)
        if excess <= 0:
            return np.zeros(0, np.float32)
        self._rest, later = self._rest[:-excess], self._rest[-excess:]
        self.num_samples -= excess
        return later

    def all(self) -> tuple[SoundWindow, ...]:
        """Return the complete windows and what is left behind them."""
        if len(self._rest) - self._num_before < MIN_SAMPLES:
            return tuple(self.windows)
        return (*self.windows, SoundWindow(self._rest, self._track, self._num_before))
