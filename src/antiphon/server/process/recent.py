"""What was measured in the last seconds, as live headroom looks at it; histograms only ever add up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Of each name, the newest that are kept.
MOST = 2048


class Recent:
    """Measurements by name, each with its time. Values are added from any thread. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one measurement, of now."""
        self._values.setdefault(name, deque(maxlen=MOST)).append((self._clock(), value))

    def p95(self, name: str, within_s: float, at_least: int = 1) -> float:
        """Return the 95th percentile of those of the last seconds; 0 where there are fewer than `at_least`."""
        since_s = self._clock() - within_s
        found = sorted(value for at_s, value in tuple(self._values.get(name, ())) if at_s >= since_s)
        return found[int(0.95 * (len(found) - 1))] if len(found) >= at_least else 0.0
