"""Which number of sessions to try next: doubled until it is too many, then halfway. Pure."""

from __future__ import annotations

import math


class SessionSearch:
    """Finds the largest number that is held, by trials. `first`: of them; `most`: none is larger."""

    def __init__(self, first: int, most: int) -> None:
        self._first, self._most = max(1, min(first, most)), most
        self.held, self.failed = 0, most + 1

    def next(self) -> int | None:
        """Return the number to try next; None where the largest is known."""
        if self.failed - self.held <= 1:
            return None
        if self.failed > self._most:
            return min(2 * self.held, self._most) if self.held else self._first
        return (self.held + self.failed) // 2

    def tell(self, number: int, *, met: bool) -> None:
        """Say how a trial went. One that fails below what was held before is believed: it was the longer one."""
        if met:
            self.held = max(self.held, number)
        else:
            self.failed = min(self.failed, number)
            self.held = min(self.held, number - 1)


def percentile(values: list[float], q: float) -> float | None:
    """The value that `q` percent of all are not above (nearest rank); None of none. Infinities are the largest."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)] if values else None


def is_lost(delays: list[float], limit_s: float, turns: int) -> bool:
    """Whether so many delays are over the limit already that the 95th percentile of `turns` of them must be, too."""
    count = max(turns, len(delays))
    return sum(d > limit_s for d in delays) > count - math.ceil(0.95 * count)
