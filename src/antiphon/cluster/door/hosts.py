"""The hosts behind a door: which of them live, by the store that they share, and which of them comes next."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from antiphon.errors import SettingsError, StoreError
from antiphon.settings import ResumeSettings, Settings
from antiphon.store.sessions import Host, SessionStore, open_store

log = logging.getLogger(__name__)
# How often it is looked up which hosts live.
WATCH_S = 1.0
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

    @contextlib.contextmanager
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


def host_urls(settings: Settings) -> tuple[str, ...]:
    """Return the URLs that the door was given of hosts; there may be none where it finds them in a store.

    Raises SettingsError for none without a store, and for one that is no `http://HOST:PORT`.
    """
    urls = settings.cluster.hosts
    if not urls and not settings.resume.state:
        raise SettingsError(
            "--role door needs its hosts: --behind http://HOST:PORT, once for each, or the --state that they share"
        )
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise SettingsError(f"--behind {url}: a host is named as http://HOST:PORT")
    return tuple(url.rstrip("/") for url in urls)


@contextlib.asynccontextmanager
async def watching(resume: ResumeSettings, hosts: Hosts) -> AsyncIterator[None]:
    """Have the door know which hosts live while the block runs, where it was given a store. Raises StoreError."""
    if not resume.state:
        yield
        return
    with contextlib.closing(open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)) as store:
        hosts.found(await anyio.to_thread.run_sync(store.hosts))
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, store, hosts)
            yield
            group.cancel_scope.cancel()


async def _watch(store: SessionStore, hosts: Hosts) -> None:
    """Look up who lives, until cancelled. While the store cannot be had, those of before do."""
    failing = False
    while True:
        await anyio.sleep(WATCH_S)
        try:
            # A thread that hangs is left alone: the store bounds its calls.
            hosts.found(await anyio.to_thread.run_sync(store.hosts, abandon_on_cancel=True))
            failing = False
        except StoreError as error:
            if not failing:
                log.error("the hosts cannot be read from the store: %s", error)
            failing = True
