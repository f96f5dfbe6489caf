"""How often a conversation may begin a response before it is asked for. Pure."""

from __future__ import annotations

from collections import deque

from antiphon.audio import SAMPLE_RATE_HZ

MINUTE = 60 * SAMPLE_RATE_HZ


class PreemptiveBudget:
    """How many responses a conversation may begin in a minute before they are asked for; None: any number. Pure."""

    def __init__(self, max_per_minute: int | None) -> None:
        self._max = max_per_minute
        # When the last ones were begun, in samples of the microphone.
        self._begun: deque[int] = deque(maxlen=max_per_minute)

    def take(self, now: int) -> bool:
        """Return whether one may be begun at `now`, a number of samples at 16 kHz, and count it if so."""
        if self._max is None:
            return True
        if self._max == 0 or (len(self._begun) == self._max and now - self._begun[0] < MINUTE):
            return False
        self._begun.append(now)
        return True
