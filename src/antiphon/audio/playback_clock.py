"""How much of the audio that was sent is still to be heard, by a clock that stands still while playback is on hold."""

from __future__ import annotations

from collections.abc import Callable


class PlaybackClock:
    """The estimate of one listener, who plays audio from the moment it is added on, without gaps.

    `clock` returns monotonic seconds. `ends_s`: when the last audio will have been played, in `now_s`; None where
    nothing was added.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.ends_s: float | None = None
        # The seconds of all holds that are over, and when the present one began; None: playback is not on hold.
        self._held_s = 0.0
        self._held_since_s: float | None = None

    @property
    def now_s(self) -> float:
        """Monotonic seconds without those on hold."""
        return (self._clock() if self._held_since_s is None else self._held_since_s) - self._held_s

    @property
    def left_s(self) -> float:
        """Seconds of audio that are still to be played; 0 where there is none."""
        return 0.0 if self.ends_s is None else max(0.0, self.ends_s - self.now_s)

    def add(self, seconds: float) -> None:
        """Add audio that is sent now. It is played after all that was added before."""
        now_s = self.now_s
        self.ends_s = now_s + seconds if self.ends_s is None else max(now_s, self.ends_s) + seconds

    def hold(self, held: bool) -> None:
        """Pause playback (`held`), or let it go on where it paused. Repeating the present state does nothing."""
        if held and self._held_since_s is None:
            self._held_since_s = self._clock()
        elif not held and self._held_since_s is not None:
            self._held_s += self._clock() - self._held_since_s
            self._held_since_s = None

    def stop(self) -> None:
        """End playback and a hold: nothing is left to be heard."""
        self.hold(False)
        self.ends_s = None
