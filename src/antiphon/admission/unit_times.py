"""The measured time of a native model's unit over the number of sessions. Pure: the time is an argument.

All sessions of a native model have the same deadline: a unit's result may take as long as the unit. The time of a unit
grows with the number of sessions, but not faster than that number, because sessions share the model's passes. So the
time that was measured with n sessions gives a limit for m sessions: the same time for m up to n, and m / n times as
much for more. The lowest limit of all measured numbers is the estimate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

# Units are kept for KEPT_S, and at most MOST_KEPT of each number of sessions.
KEPT_S, MOST_KEPT = 30.0, 512
# A session counts as active for ACTIVE_S after a unit.
ACTIVE_S = 2.5


class UnitTimes:
    """The times of recent units, by the number of sessions that were active at the time."""

    def __init__(self) -> None:
        # For each number of active sessions, recent units: the time of the result, and the unit's delay.
        self._delays: dict[int, deque[tuple[float, float]]] = {}
        # The time of each active session's last unit.
        self._active_s: dict[Hashable, float] = {}

    def add(self, session: Hashable, delay: float, now_s: float) -> None:
        """Record a unit's delay, as a fraction of the unit. `now_s` must not decrease between calls."""
        self._active_s.pop(session, None)
        self._active_s[session] = now_s
        while now_s - next(iter(self._active_s.values())) > ACTIVE_S:
            del self._active_s[next(iter(self._active_s))]
        self._delays.setdefault(len(self._active_s), deque(maxlen=MOST_KEPT)).append((now_s, delay))

    def expected(self, sessions: int, now_s: float) -> float | None:
        """Return the expected 95th percentile of the delay with `sessions` sessions, as a fraction of a unit.

        A number of sessions counts if each had a unit within KEPT_S. Returns None if none does.
        """
        limits = list[float]()
        for number, units in list(self._delays.items()):
            while units and now_s - units[0][0] > KEPT_S:
                units.popleft()
            if not units:
                del self._delays[number]
            elif len(units) >= number:
                delays = sorted(delay for _, delay in units)
                limits.append(delays[math.ceil(0.95 * len(delays)) - 1] * max(1.0, sessions / number))
        return min(limits, default=None)
