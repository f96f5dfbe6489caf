"""When to leave a server alone, and when to try it again. Pure: times are given."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime

from antiphon.errors import Refused

# After so many failures in a row a server is left alone, for twice as long each time.
FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S = 3, 1.0, 30.0


class Breaker:
    """Counts failures in a row. While it is open, nothing is sent; then one request tries again. Pure.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def check(self, now_s: float) -> None:
        """Raise Refused while it is open. The first caller afterwards may try, and others wait for what comes of it."""
        if now_s < self._open_until_s:
            raise Refused("The model's server does not answer.", self._open_until_s - now_s)
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._pause_s

    def failed(self, now_s: float) -> None:
        """Count a failure."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def succeeded(self) -> None:
        """Begin anew, closed."""
        self._failures, self._open_until_s, self._pause_s = 0, 0.0, FIRST_PAUSE_S

    def wait(self, until_s: float) -> None:
        """Stay open until a time that the server named."""
        self._open_until_s = max(self._open_until_s, until_s)


def retry_after_s(value: str) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date; 1 where it is neither."""
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 1.0
