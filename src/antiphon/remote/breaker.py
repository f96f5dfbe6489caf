"""When to leave a server alone, and when to try it again. Pure: times are given."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from antiphon.errors import Refused

# After so many failures in a row a server is left alone, for twice as long each time.
FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S = 3, 1.0, 30.0
# What so many owners meet is taken for the server's, and not for their own.
OWNERS_TO_OPEN = 2
# Bound: owners whose failures are remembered. The one that failed longest ago is forgotten first.
MAX_OWNERS = 1024
# A date is shorter; so much of a header is read.
_MAX_HEADER_CHARS = 64
# The owner of the process's own requests, which ask a server what it serves.
PROBE = object()


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
        self.check_open(now_s)
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._pause_s

    def check_open(self, now_s: float) -> None:
        """Raise Refused while it is open. Who asks does not try."""
        if now_s < self._open_until_s:
            raise Refused("The model's server does not answer.", self._open_until_s - now_s)

    def failed(self, now_s: float) -> None:
        """Count a failure."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self.open(now_s)

    def open(self, now_s: float) -> float:
        """Let nothing through for a pause, which is twice as long the next time. Return its seconds."""
        pause_s = self._pause_s
        self._open_until_s = now_s + pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return pause_s

    def wait(self, until_s: float) -> None:
        """Stay open until a time that the server named."""
        self._open_until_s = max(self._open_until_s, until_s)


@dataclass(slots=True)
class _Owner:
    """What one owner has met since its last success. `paused_until_s`: the server had no room for it until then."""

    breaker: Breaker = field(default_factory=Breaker)
    paused_until_s: float = 0.0


class ServerBreaker:
    """When to leave one server alone: for one owner of requests, and for all. Pure. Times are monotonic seconds.

    An owner waits after its own failures, and for the pauses that the server named to it. All wait where OWNERS_TO_OPEN
    owners met the same, so that the requests of one cannot take the server from the others. After the pause of all, one
    request of each of so many owners tries, and again it takes the failures of all of these to open it.
    """

    def __init__(self) -> None:
        self._all = Breaker()
        self._owners: dict[Hashable, _Owner] = {}
        # The owners that have failed since anything succeeded, or since all were left waiting; and how many of their
        # requests have failed since anything succeeded.
        self._failed: set[Hashable] = set()
        self._num_failures = 0
        # After a pause of all, until anything succeeds: the owners that try, and until when the others wait for them.
        self._is_tried, self._pause_s = False, FIRST_PAUSE_S
        self._trying: set[Hashable] = set()
        self._trying_until_s = 0.0

    def check(self, owner: Hashable, now_s: float) -> None:
        """Raise Refused while the server is left alone, by all or by this owner. Otherwise the owner tries."""
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
        """The server has no room for this owner, and named a pause, which `retry_after_s` has bounded."""
        met = self._met(owner)
        met.paused_until_s = max(met.paused_until_s, now_s + pause_s)
        if sum(now_s < one.paused_until_s for one in self._owners.values()) >= OWNERS_TO_OPEN:
            self._all.wait(now_s + pause_s)

    def succeeded(self, owner: Hashable) -> None:
        """Begin anew, closed for all; other owners keep what they have met. A probe says nothing of the model itself:
        where it succeeds, only its own failures are forgotten.
        """
        self._owners.pop(owner, None)
        if owner is PROBE:
            self._failed.discard(owner)
            return
        self._all = Breaker()
        self._failed, self._num_failures, self._is_tried = set(), 0, False

    def _met(self, owner: Hashable) -> _Owner:
        found = self._owners[owner] = self._owners.pop(owner, _Owner())
        if len(self._owners) > MAX_OWNERS:
            del self._owners[next(iter(self._owners))]
        return found


def retry_after_s(value: str) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date, between 0 and MAX_PAUSE_S; 1 where it is
    neither.
    """
    value, found_s = value[:_MAX_HEADER_CHARS], math.nan
    with suppress(ValueError):
        found_s = float(value)
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        found_s = parsedate_to_datetime(value).timestamp() - time.time()
    return 1.0 if math.isnan(found_s) else min(max(0.0, found_s), MAX_PAUSE_S)
