"""A door's view of its hosts: which of them live, by the store that they share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from antiphon.cluster.door.hosts import Hosts
from antiphon.errors import SettingsError, StoreError
from antiphon.settings import ResumeSettings, Settings
from antiphon.store.sessions import SessionStore, open_store

log = logging.getLogger(__name__)
# How often it is looked up which hosts live.
WATCH_S = 1.0


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
    with _store(resume) as store:
        if store is None:
            yield
            return
        hosts.found(await anyio.to_thread.run_sync(store.hosts))
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, store, hosts)
            yield
            group.cancel_scope.cancel()


@contextlib.contextmanager
def _store(resume: ResumeSettings) -> Iterator[SessionStore | None]:
    """The store of the hosts while the block runs; None where the door was given none. Raises StoreError."""
    if not resume.state:
        yield None
        return
    with contextlib.closing(open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)) as store:
        yield store


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
