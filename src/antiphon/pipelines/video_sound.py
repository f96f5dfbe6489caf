"""The live sound of a video, cut into windows. A model encodes each window once."""

from __future__ import annotations

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import SoundTrack, SoundWindow

# Samples before and after a window that its first and last spectra include: two hops before it, and one hop after it.
NUM_BEFORE, NUM_AFTER = 320, 160
# Minimum samples of the rest after the last whole window. A shorter rest is dropped, because it would not fill a row.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10
# Sound that begins within this distance, in seconds, of the end of the last sound continues it.
TOLERANCE_S = 0.02
# Maximum seconds of sound. If there is more, the oldest windows are dropped until half of the maximum is left.
MAX_S = 60.0


class VideoSound:
    """The sound since the last question.

    - `at_s`: the time at which the sound begins, on the session's clock. None if there is no sound.
    - `windows`: the complete windows, each `window_s` long.
    - `num_samples`: the number of samples that were added.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._size = round(window_s * SAMPLE_RATE_HZ)
        self.clear()

    def clear(self) -> None:
        """Forget all sound. The next sound may begin at any time."""
        self.at_s: float | None = None
        self.windows: list[SoundWindow] = []
        self._track = SoundTrack()
        # The samples after the last complete window, together with the NUM_BEFORE samples before them.
        self._rest: Pcm = np.zeros(0, np.float32)
        self._num_before = 0
        # The number of samples that were added, including samples that were dropped since.
        self.num_samples = 0

    @property
    def end_s(self) -> float:
        """The time at which the sound so far ends. 0 if there is no sound."""
        if self.at_s is None:
            return 0.0
        return self.complete_s + (len(self._rest) - self._num_before) / SAMPLE_RATE_HZ

    @property
    def complete_s(self) -> float:
        """The time at which the complete windows end, on the session's clock."""
        return (self.at_s or 0.0) + len(self.windows) * self._window_s

    def append(self, pcm: Pcm, at_s: float) -> bool:
        """Add sound that begins at `at_s`. Returns whether this completes a window.

        If the sound does not begin where the earlier sound ends, the earlier sound is forgotten.
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
        """Cut the sound to its first `num_samples`, and return the rest. Complete windows are not cut."""
        excess = min(self.num_samples - num_samples, len(self._rest) - self._num_before)
        if excess <= 0:
            return np.zeros(0, np.float32)
        self._rest, later = self._rest[:-excess], self._rest[-excess:]
        self.num_samples -= excess
        return later

    def all(self) -> tuple[SoundWindow, ...]:
        """Return the complete windows and the rest after them."""
        if len(self._rest) - self._num_before < MIN_SAMPLES:
            return tuple(self.windows)
        return (*self.windows, SoundWindow(self._rest, self._track, self._num_before))
