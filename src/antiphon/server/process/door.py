"""Runs a door: a server without models that carries clients' connections to hosts (`antiphon serve --role door`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from antiphon.cluster.door.app import Door, build
from antiphon.cluster.door.hosts import Hosts
from antiphon.errors import SettingsError, StoreError
from antiphon.server.origin import is_loopback
from antiphon.server.process.connections import BoundedConfig, Connections, connection_limit, log_failed_accepts
from antiphon.server.process.listening import QuietServer, base_url, bind, stop_on_signals
from antiphon.server.routes.door_calls import DoorCalls
from antiphon.settings import ResumeSettings, Settings
from antiphon.signals import unless_set
from antiphon.store.sessions import SessionStore, open_store

log = logging.getLogger(__name__)
# A client is silent while a host is looked for, and a ping waits behind audio that it has yet to read.
PING_TIMEOUT_S = 300.0
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


async def serve_door(settings: Settings, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Carry connections until SIGTERM or SIGINT, then wait `drain_s` for those that are open, or for a second signal.

    Run it in the main thread's event loop. `on_ready` is called with the base URL. Raises SettingsError.
    """
    server = settings.server
    if not is_loopback(server.host) and not server.allow_anonymous:
        raise SettingsError(
            f"--host {server.host} is open to others, and a door checks no API key, its hosts do: give "
            "--allow-anonymous if each of them has one"
        )
    hosts = Hosts(host_urls(settings), time.monotonic)
    door = Door(hosts, settings.resume.grace_s)
    calls = DoorCalls(door, server)
    app = build(door, calls.routes())
    app.state.body_timeout_s = server.body_timeout_s
    log_failed_accepts(asyncio.get_running_loop())
    sock = bind(server.host, server.port)
    connections = Connections(connection_limit(server.max_sessions), server.connections_per_address, lambda: None)
    config = BoundedConfig(
        app,
        connections,
        server.head_timeout_s,
        log_config=None,
        access_log=False,
        ws_max_size=settings.audio.max_frame_bytes * 2,
        ws_per_message_deflate=False,
        ws_ping_timeout=PING_TIMEOUT_S,
        lifespan="on",
    )
    http = QuietServer(config)
    with contextlib.closing(sock), _hosts_store(settings.resume) as store, stop_on_signals() as (stop, now):
        if store:
            hosts.found(await anyio.to_thread.run_sync(store.hosts))
        async with anyio.create_task_group() as group:
            group.start_soon(_serve_http, http, sock, group.cancel_scope)
            if store:
                group.start_soon(_watch_hosts, store, hosts)
            await http.listens.wait()
            on_ready(base_url(server, sock))
            await stop.wait()
            door.draining = True
            with anyio.move_on_after(server.drain_s):
                await unless_set(now, door.all_closed)
            await calls.hang_up_all()
            http.should_exit = True


@contextlib.contextmanager
def _hosts_store(resume: ResumeSettings) -> Iterator[SessionStore | None]:
    """The store of the hosts while the block runs; None where the door was given none. Raises StoreError."""
    if not resume.state:
        yield None
        return
    with contextlib.closing(open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)) as store:
        yield store


async def _watch_hosts(store: SessionStore, hosts: Hosts) -> None:
    """Have the door know which hosts live, until cancelled. While the store cannot be had, those of before do."""
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


async def _serve_http(http: QuietServer, sock: object, scope: anyio.CancelScope) -> None:
    await http.serve(sockets=[sock])  # type: ignore[list-item]
    scope.cancel()
