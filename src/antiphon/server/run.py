"""Run the server: open the socket, load the models, serve, and on SIGTERM or SIGINT drain before closing."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import uvicorn

from antiphon.errors import AntiphonError, SettingsError
from antiphon.loading.loader import load, store_of
from antiphon.server.app import build
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.store.sessions import SessionStore

log = logging.getLogger(__name__)
# uvicorn 0.54 logs this error after every upgrade that was answered with an HTTP status, as a 401 has to be.
FALSE_ALARM = "ASGI callable returned without completing handshake."
# Frames above the limit get an answer up to this; beyond it the connection is closed with 1009.
HARD_FRAME_FACTOR = 2


class _Server(uvicorn.Server):
    """uvicorn, with its signals handled here: its own way closes live sessions at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_exposure(settings: Settings) -> None:
    """Raises SettingsError for an address beyond loopback without an API key, unless that was asked for."""
    host = settings.server.host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not settings.server.api_keys and not settings.server.allow_anonymous:
        raise SettingsError(
            f"--host {host} is open to others and no API key is set: give --api-key KEY, or --allow-anonymous if that is meant"
        )


async def serve(settings: Settings, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Until told to stop. `on_ready` gets the base URL once the models are loaded.

    Raises SettingsError, StoreError, ModelError before or while loading.
    """
    check_exposure(settings)
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != FALSE_ALARM)
    server = settings.server
    metrics = Metrics()
    state = ServerState(settings, metrics, started_s=int(time.time()))
    state.kept = _kept(settings)
    sock = _bind(server.host, server.port)
    config = uvicorn.Config(
        build(state),
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=settings.audio.max_frame_bytes * HARD_FRAME_FACTOR,
        ws_per_message_deflate=False,
        # A ping waits behind the sound that a client has yet to read, which may be minutes at the pace it is heard.
        ws_ping_timeout=300.0,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    http = _Server(config)
    stop, models, failure = anyio.Event(), None, None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with anyio.create_task_group() as group:
            state.group = group
            group.start_soon(_serve_http, http, sock, group.cancel_scope)
            store = store_of(settings.models)
            try:
                models = await anyio.to_thread.run_sync(load, settings, store, metrics.step)
                await models.warm()
            except (AntiphonError, ExceptionGroup) as error:
                failure = error
            else:
                state.models = models
                metrics.watch(state.models.lanes, state.backlog_s, state.models.language_model)
                host = f"[{server.host}]" if ":" in server.host else server.host
                on_ready(f"http://{host}:{sock.getsockname()[1]}")
                await stop.wait()
                await _drain(state, server.drain_s)
            http.should_exit = True
        if failure:
            raise _first(failure)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        sock.close()
        if state.kept:
            state.kept.close()
        if models:
            models.close()


def _first(failure: Exception) -> Exception:
    """Of several failures, the first that says what is wrong by itself."""
    while isinstance(failure, ExceptionGroup):
        found = failure.subgroup(AntiphonError)
        failure = (found or failure).exceptions[0]
    return failure


def _kept(settings: Settings) -> SessionStore | None:
    """Where conversations outlive the server. Raises StoreError."""
    folder, max_age_s = settings.resume.state, settings.resume.state_hours * 3600
    return SessionStore(Path(folder).expanduser(), max_age_s) if folder else None


async def _serve_http(http: _Server, sock: socket.socket, scope: anyio.CancelScope) -> None:
    await http.serve(sockets=[sock])
    scope.cancel()


async def _drain(state: ServerState, seconds: float) -> None:
    """Tell every session, let it flush its finals, and wait for them at most `seconds`."""
    state.draining = True
    state.metrics.drained.set(1)
    if state.live:
        log.info("draining %d sessions", len(state.live))
    for live in list(state.live):
        live.finish()
    with anyio.move_on_after(seconds):
        await state.emptied()
    if state.live:
        log.warning("%d sessions did not finish in %.0f s", len(state.live), seconds)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that say they are TCP; with it, a frame that follows another waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock
