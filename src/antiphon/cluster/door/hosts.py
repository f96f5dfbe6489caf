"""The hosts of a door: finds those that are alive through their shared store, and orders them for the next session."""

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
# Interval at which the store is asked for the hosts that are alive, in seconds.
WATCH_S = 1.0
# Seconds for which a host that was unreachable is tried last.
SHUNNED_S = 5.0


class Hosts:
    """The hosts of a door, by their URLs (`http://host:port`), and the number of this door's sessions at each.

    `urls`: hosts that are always tried. `clock` returns monotonic seconds.
    """

    def __init__(self, urls: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._given = self._urls = urls
        self._draining: frozenset[str] = frozenset()
        self._clock = clock
        self._sessions: Counter[str] = Counter()
        self._failed_s: dict[str, float] = {}
        # Rotates hosts of equal rank.
        self._turn = itertools.count()

    def in_order(self, first: str = "") -> list[str]:
        """Return all hosts in the order in which to try them: `first`, then the others by their number of sessions,
        then draining hosts, and last the hosts that were recently unreachable. May be empty.
        """
        turn = next(self._turn) % max(len(self._urls), 1)
        urls = self._urls[turn:] + self._urls[:turn]

        def rank(url: str) -> tuple[bool, bool, bool, int]:
            return self._is_shunned(url), url in self._draining, url != first, self._sessions[url]

        return sorted(urls, key=rank)

    def has(self, url: str) -> bool:
        """Return whether the host is alive, as far as the store knows. A host that was given by its URL always is."""
        return url in self._urls

    def found(self, alive: Collection[Host]) -> None:
        """Set the hosts that are alive, from the store. Hosts without an address are ignored."""
        urls = dict.fromkeys([*self._given, *(host.address for host in alive if host.address)])
        self._urls = tuple(urls)
        self._draining = frozenset(host.address for host in alive if host.draining)

    def failed(self, url: str) -> None:
        """Note that a host could not be reached, or broke a connection."""
        self._failed_s[url] = self._clock()

    @contextlib.contextmanager
    def session_at(self, url: str) -> Iterator[None]:
        """Count a session at this host while the `with` block runs."""
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
    """Return the host URLs in the settings. May be empty if the door finds its hosts in a store.

    Raises SettingsError if there is neither a URL nor a store, or if a URL is not `http://HOST:PORT`.
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
    """Keep `hosts` up to date from the store while the `with` block runs; without a store, do nothing.

    Raises StoreError.
    """
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
    """Refresh the hosts from the store until cancelled. While the store fails, the last known hosts stay."""
    failing = False
    while True:
        await anyio.sleep(WATCH_S)
        try:
            # On cancellation, a hanging thread is abandoned: the store's calls have timeouts of their own.
            hosts.found(await anyio.to_thread.run_sync(store.hosts, abandon_on_cancel=True))
            failing = False
        except StoreError as error:
            if not failing:
                log.error("the hosts cannot be read from the store: %s", error)
            failing = True
