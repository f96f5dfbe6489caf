"""Estimates how much of the sent audio is still to be played, with a clock that stops while playback is on hold."""

from __future__ import annotations

from collections.abc import Callable


class PlaybackClock:
    """The estimate for one client. It is assumed to play audio without gaps, from the moment at which it is added.

    `clock` returns monotonic seconds. `ends_s`: the time at which the last audio ends, in the time of `now_s`; None: no
    audio was added.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.ends_s: float | None = None
        # Seconds of all past holds.
        self._held_s = 0.0
        # When the current hold began. None: playback is not on hold.
        self._held_since_s: float | None = None

    @property
    def now_s(self) -> float:
        """Monotonic seconds, without the time for which playback was on hold."""
        return (self._clock() if self._held_since_s is None else self._held_since_s) - self._held_s

    @property
    def left_s(self) -> float:
        """Seconds of audio that are still to be played."""
        return 0.0 if self.ends_s is None else max(0.0, self.ends_s - self.now_s)

    def add(self, seconds: float) -> None:
        """Add audio that is sent now. It is played after all audio that was added before."""
        now_s = self.now_s
        self.ends_s = now_s + seconds if self.ends_s is None else max(now_s, self.ends_s) + seconds

    def hold(self, held: bool) -> None:
        """Pause playback (`held`), or continue it where it paused. Repeating the current state is a no-op."""
        if held and self._held_since_s is None:
            self._held_since_s = self._clock()
        elif not held and self._held_since_s is not None:
            self._held_s += self._clock() - self._held_since_s
            self._held_since_s = None

    def stop(self) -> None:
        """End playback and any hold: no audio is left to be played."""
        self.hold(False)
        self.ends_s = None
