"""The hosts behind a door, and which of them comes next."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from antiphon.store.sessions import Host

# For so long a host that could not be reached is tried after all others.
SHUNNED_S = 5.0


class Hosts:
    """The hosts of a door, by their URLs (`http://host:port`), and how many sessions each has through this door.

    `urls`: those that are always tried. `clock` gives monotonic seconds.
    """

    def __init__(self, urls: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._given = self._urls = urls
        self._draining: frozenset[str] = frozenset()
        self._clock = clock
        self._sessions: Counter[str] = Counter()
        self._failed_s: dict[str, float] = {}
        # Of hosts that are alike, each is first in turn.
        self._turn = itertools.count()

    def in_order(self, first: str = "") -> list[str]:
        """All hosts in the order in which they are to be tried: `first`, those with the fewest sessions, those that
        drain, and last those that could not be reached lately. There may be none.
        """
        turn = next(self._turn) % max(len(self._urls), 1)
        urls = self._urls[turn:] + self._urls[:turn]

        def rank(url: str) -> tuple[bool, bool, bool, int]:
            return self._is_shunned(url), url in self._draining, url != first, self._sessions[url]

        return sorted(urls, key=rank)

    def found(self, alive: Collection[Host]) -> None:
        """Take over which hosts live, as a store knows them. Those without an address are not reached."""
        urls = dict.fromkeys([*self._given, *(host.address for host in alive if host.address)])
        self._urls = tuple(urls)
        self._draining = frozenset(host.address for host in alive if host.draining)

    def failed(self, url: str) -> None:
        """Note that a host could not be reached, or has broken a connection."""
        self._failed_s[url] = self._clock()

    @contextmanager
    def session_at(self, url: str) -> Iterator[None]:
        """Count a session at this host while the block runs."""
        self._failed_s.pop(url, None)
        self._sessions[url] += 1
        try:
            yield
        finally:
            self._sessions[url] -= 1

    def _is_shunned(self, url: str) -> bool:
        failed_s = self._failed_s.get(url)
        return failed_s is not None and self._clock() - failed_s < SHUNNED_S
