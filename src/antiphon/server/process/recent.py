"""What was measured in the last seconds, as live headroom looks at it; histograms only ever add up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Of each name, the newest that are kept.
MOST = 2048


@dataclass(frozen=True, slots=True)
class Evidence:
    """When measurements are evidence, in seconds: `enough` of them within `long_s`, or two within `short_s`."""

    long_s: float
    short_s: float
    enough: int = 20


class Recent:
    """Measurements by name, each with its time. Values are added from any thread. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one measurement, of now."""
        self._values.setdefault(name, deque(maxlen=MOST)).append((self._clock(), value))

    def p95(self, name: str, within_s: float) -> float:
        """Return the 95th percentile of the values of the last `within_s` seconds; 0 where there are none."""
        found = sorted(value for _, value in self._within(name, within_s))
        return found[int(0.95 * (len(found) - 1))] if found else 0.0

    def sustained(self, name: str, evidence: Evidence) -> float:
        """Return a value that enough measurements reach to blame the load, not chance.

        It is the larger of two: the 95th percentile of `long_s`, where that has `enough` values, and the
        second largest value of `short_s`.
        """
        late = sorted(value for _, value in self._within(name, evidence.short_s))[-2:]
        second = late[0] if len(late) == 2 else 0.0
        enough = len(self._within(name, evidence.long_s)) >= evidence.enough
        return max(second, self.p95(name, evidence.long_s) if enough else 0.0)

    def falls_s(self, name: str, evidence: Evidence, limit: float) -> float:
        """Return the seconds until `sustained` is below `limit`, if no more measurements come."""
        now_s, values = self._clock(), self._within(name, evidence.long_s)
        late = [at_s for at_s, value in values if value >= limit]
        spared = int(0.05 * len(values)) if len(values) >= evidence.enough else len(late)
        # The second newest late value leaves the short window, and the newest that is not spared the long one.
        ends = [at_s + evidence.short_s for at_s in late[-2:-1]]
        ends += [at_s + evidence.long_s for at_s in late[: len(late) - spared]]
        return max(0.0, max(ends, default=now_s) - now_s)

    def _within(self, name: str, within_s: float) -> list[tuple[float, float]]:
        since_s = self._clock() - within_s
        return [pair for pair in tuple(self._values.get(name, ())) if pair[0] >= since_s]
