"""Circuit breakers of model servers. Pure: callers pass the times."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from antiphon.errors import Refused

# After FAILURES_TO_OPEN consecutive failures, no request is sent for a pause. Each pause is twice as long as the last.
FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S = 3, 1.0, 30.0
# If the requests of OWNERS_TO_OPEN owners fail, the server is taken to be at fault, not these owners' requests.
OWNERS_TO_OPEN = 2
# The maximum number of owners whose failures are remembered. The owner with the oldest failure is forgotten first.
MAX_OWNERS = 1024
# The maximum number of characters of a header that are read. A date is shorter.
_MAX_HEADER_CHARS = 64
# The owner of the process's own requests, which check which model a server serves.
PROBE = object()


class Breaker:
    """Counts consecutive failures. Pure. Times are monotonic seconds.

    While the breaker is open, no request is sent. After that, one request is sent as a trial.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def check(self, now_s: float) -> None:
        """Raise Refused while the breaker is open, then for all callers except the first, until its result is known."""
        self.check_open(now_s)
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._pause_s

    def check_open(self, now_s: float) -> None:
        """Raise Refused while the breaker is open. Unlike `check`, it does not count as a try."""
        if now_s < self._open_until_s:
            raise Refused("The model's server does not answer.", self._open_until_s - now_s)

    def failed(self, now_s: float) -> None:
        """Count a failure, and open after FAILURES_TO_OPEN failures in a row."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self.open(now_s)

    def open(self, now_s: float) -> float:
        """Open for a pause and double the next pause. Return the seconds of this pause."""
        pause_s = self._pause_s
        self._open_until_s = now_s + pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return pause_s

    def wait(self, until_s: float) -> None:
        """Stay open until a time that the server specified."""
        self._open_until_s = max(self._open_until_s, until_s)

    def end_pause(self) -> None:
        """End the pause, so that one request is sent as a trial. The next pause stays as long as it would have been."""
        self._open_until_s = 0.0


@dataclass(slots=True)
class _Owner:
    """The failures of one owner since its last success. `paused_until_s`: end of the server's pause."""

    breaker: Breaker = field(default_factory=Breaker)
    paused_until_s: float = 0.0


class ServerBreaker:
    """The circuit breaker of one server, for each owner and for all owners. Pure. Times are monotonic seconds.

    An owner waits after its own failures, and for the pauses for which the server asked it. All owners wait only if
    OWNERS_TO_OPEN owners have to wait, so one owner's requests cannot block the server for the others. After a pause of
    all owners, OWNERS_TO_OPEN owners may try one request each. The breaker opens again only if the requests of that
    number of owners fail.
    """

    def __init__(self) -> None:
        self._all = Breaker()
        self._owners: dict[Hashable, _Owner] = {}
        # The owners with a failure since the last success or pause of all owners, and the number of failed requests
        # since the last success.
        self._failed: set[Hashable] = set()
        self._num_failures = 0
        # State after a pause of all owners, until a request succeeds: the owners that try, and until when the others
        # wait.
        self._is_tried, self._pause_s = False, FIRST_PAUSE_S
        self._trying: set[Hashable] = set()
        self._trying_until_s = 0.0

    def check(self, owner: Hashable, now_s: float) -> None:
        """Raise Refused while the breaker is open for all owners or for this one. Otherwise the owner tries."""
        met = self._owners.get(owner) or _Owner()
        self._all.check_open(now_s)
        met.breaker.check_open(now_s)
        if now_s < met.paused_until_s:
            raise Refused("The model's server has no room.", met.paused_until_s - now_s)
        if self._is_tried:
            if now_s >= self._trying_until_s:
                self._trying, self._trying_until_s = set(), now_s + self._pause_s
            if owner in self._trying or len(self._trying) == OWNERS_TO_OPEN:
                raise Refused("The model's server does not answer.", self._trying_until_s - now_s)
            self._trying.add(owner)
        met.breaker.check(now_s)

    def failed(self, owner: Hashable, now_s: float) -> None:
        """Count a failure of an owner's request."""
        self._met(owner).breaker.failed(now_s)
        self._failed.add(owner)
        self._num_failures += owner is not PROBE
        if len(self._failed) >= OWNERS_TO_OPEN and self._num_failures >= FAILURES_TO_OPEN:
            self._pause_s = self._all.open(now_s)
            self._failed, self._is_tried, self._trying_until_s = set(), True, 0.0

    def refused(self, owner: Hashable, now_s: float, pause_s: float) -> None:
        """Note that the server has no room for this owner and asked for a pause, which `retry_after_s` has bounded."""
        met = self._met(owner)
        met.paused_until_s = max(met.paused_until_s, now_s + pause_s)
        if sum(now_s < one.paused_until_s for one in self._owners.values()) >= OWNERS_TO_OPEN:
            self._all.wait(now_s + pause_s)

    def succeeded(self, owner: Hashable) -> None:
        """Close the breaker for all owners. Other owners keep their own failures.

        A successful probe proves nothing about the model itself: it only clears the probe's own failures.
        """
        self._owners.pop(owner, None)
        if owner is PROBE:
            self._failed.discard(owner)
            return
        self._all = Breaker()
        self._failed, self._num_failures, self._is_tried = set(), 0, False

    def end_pauses(self) -> None:
        """End the pauses after failures: the server was seen to work. One request of each owner is sent as a trial.

        The pauses that the server asked of single owners stay.
        """
        self._all.end_pause()
        for met in self._owners.values():
            met.breaker.end_pause()

    def _met(self, owner: Hashable) -> _Owner:
        found = self._owners[owner] = self._owners.pop(owner, _Owner())
        if len(self._owners) > MAX_OWNERS:
            del self._owners[next(iter(self._owners))]
        return found


def retry_after_s(value: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date, between 0 and MAX_PAUSE_S; 1 if it is neither."""
    value, found_s = value[:_MAX_HEADER_CHARS], math.nan
    with suppress(ValueError):
        found_s = float(value)
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        found_s = parsedate_to_datetime(value).timestamp() - time.time()
    return 1.0 if math.isnan(found_s) else min(max(0.0, found_s), MAX_PAUSE_S)
