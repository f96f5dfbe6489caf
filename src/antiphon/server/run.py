"""Runs the server: opens the socket, loads the models, serves, and on SIGTERM or SIGINT drains before it closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import uvicorn

from antiphon.errors import AntiphonError, ModelLost, SettingsError
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.server.app import build
from antiphon.server.memory import reclaim_excess, settle_garbage
from antiphon.server.metrics import Metrics
from antiphon.server.origin import is_loopback
from antiphon.server.process.connections import BoundedConfig, Connections, connection_limit, log_failed_accepts
from antiphon.server.process.drain import drain
from antiphon.server.process.loop_watch import watch_loop
from antiphon.server.process.model_watch import watch_models
from antiphon.server.state import ServerState
from antiphon.settings import ServerSettings, Settings
from antiphon.signals import unless_set
from antiphon.store.sessions import SessionStore

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# uvicorn 0.54 logs this error after every upgrade that was answered with an HTTP status, as a 401 has to be.
FALSE_ALARM = "ASGI callable returned without completing handshake."
# And this one after a response that a drain has cut off.
CUT_OFF = "ASGI callable returned without completing response."
# Frames above the limit get an answer up to this; beyond it the connection is closed with 1009.
HARD_FRAME_FACTOR = 2
# A ping waits behind the audio that a client has yet to read, which may be minutes at the pace it is heard.
PING_TIMEOUT_S = 300.0
# What clients get to read the rest of their responses, and models to finish their steps, when the server stops.
CLOSE_TIMEOUT_S, CLOSE_MODELS_S = 3.0, 2.0
# A thread that computes in Python keeps the interpreter so long from one that waits for it (Python's own: 5 ms). A
# model's step takes it hundreds of times, so that one busy thread would make each step last seconds.
SWITCH_INTERVAL_S = 0.0005


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which close live sessions at once, and with a quiet end of its grace."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets and all connections. Those that are not read are aborted in the end."""
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def check_exposure(settings: Settings) -> None:
    """Raise SettingsError for an address beyond loopback without an API key, unless that was asked for."""
    host = settings.server.host
    if not is_loopback(host) and not settings.server.api_keys and not settings.server.allow_anonymous:
        raise SettingsError(
            f"--host {host} is open to others and no API key is set: "
            "give --api-key KEY, or --allow-anonymous if that is meant"
        )


async def serve(settings: Settings, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and close. Run it in the main thread's event loop.

    The socket is open while the models load; requests are refused with 503 until then. `on_ready` is called with the
    base URL once they are loaded and warm. A signal before that ends the server at once, and a second one ends the
    drain. Threads that hang, or still load, are left to the caller, which ends the process. Raises SettingsError,
    StoreError or ModelError if the server cannot start, ModelLost after the drain if a model was lost and
    `exit_on_model_loss` is set.
    """
    check_exposure(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log_failed_accepts(asyncio.get_running_loop())
    state = ServerState(settings, Metrics(), started_s=int(time.time()))
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.msg == FALSE_ALARM or (record.msg == CUT_OFF and state.draining))
    )
    state.session_store = sessions = _session_store(settings)
    if sessions:
        state.metrics.state_degraded.set_function(lambda: float(sessions.degraded is not None))
    sock = bind(settings.server.host, settings.server.port)
    http = http_server(state)
    models: LoadedModels | None = None
    failure: Exception | None = None
    try:
        with _stop_on_signals() as (stop, now):
            async with anyio.create_task_group() as group:
                state.group = group
                group.start_soon(_serve_http, http, sock, group.cancel_scope)
                try:
                    models = await unless_set(stop, partial(_load, state))
                    if models and not stop.is_set():
                        await unless_set(stop, models.warm)
                        await unless_set(stop, partial(anyio.to_thread.run_sync, settle_garbage))
                except (AntiphonError, ExceptionGroup) as error:
                    failure = error
                if models and not failure and not stop.is_set():
                    _begin(state, models, stop)
                    on_ready(_base_url(settings.server, sock))
                    await stop.wait()
                    await drain(state, settings.server.drain_s, now)
                    if settings.server.exit_on_model_loss and (lost := models.lost()):
                        failure = ModelLost("; ".join(f"the model {name} is lost: {why}" for name, why in lost.items()))
                http.should_exit = True
            if failure:
                raise first_cause(failure)
    finally:
        sock.close()
        if state.session_store:
            state.session_store.close()
        if models:
            # A worker that hangs is left to the end of the process.
            with anyio.move_on_after(CLOSE_MODELS_S, shield=True):
                await anyio.to_thread.run_sync(models.close, abandon_on_cancel=True)


async def _load(state: ServerState) -> LoadedModels:
    """Load the models in a thread, which goes on by itself where this is cancelled."""
    settings = state.settings
    work = partial(load, settings, store_of(settings.models), state.metrics.step)
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _begin(state: ServerState, models: LoadedModels, stop: anyio.Event) -> None:
    """Serve with models that are loaded and warm, and watch them. Does not wait."""
    server = state.settings.server
    state.models = models
    state.metrics.watch(models.lanes, state.backlog_s, models.language_model, models.workers)
    on_lost = stop.set if server.exit_on_model_loss else lambda: None
    assert state.group
    state.group.start_soon(reclaim_excess, state.memory)
    state.group.start_soon(watch_loop, state.metrics.loop_lag_s.observe)
    state.group.start_soon(watch_models, models.workers, server.stall_s, on_lost)
    if not server.api_keys:
        log.info("no API key is set: %s may use this server", _reaching(server.host))


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[tuple[anyio.Event, anyio.Event]]:
    """Yield an event that the first SIGTERM or SIGINT sets while the block runs, and one that the second sets."""
    stop, now, loop = anyio.Event(), anyio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, now
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def http_server(state: ServerState) -> uvicorn.Server:
    """Return a server of the application over `state`, which installs no signal handlers. Its `serve` takes sockets."""
    server = state.settings.server
    connections = Connections(
        connection_limit(server.max_sessions),
        server.connections_per_address,
        state.metrics.refused.labels("connections").inc,
    )
    state.metrics.connections.set_function(lambda: float(connections.num_open))
    config = BoundedConfig(
        build(state),
        connections,
        server.head_timeout_s,
        log_config=None,
        access_log=False,
        ws_max_size=state.settings.audio.max_frame_bytes * HARD_FRAME_FACTOR,
        ws_per_message_deflate=False,
        ws_ping_timeout=PING_TIMEOUT_S,
        lifespan="off",
    )
    return _Server(config)


def _reaching(host: str) -> str:
    return "every program on this machine" if is_loopback(host) else f"everyone who reaches {host}"


async def _serve_http(http: uvicorn.Server, sock: socket.socket, scope: anyio.CancelScope) -> None:
    await http.serve(sockets=[sock])
    scope.cancel()


def _base_url(server: ServerSettings, sock: socket.socket) -> str:
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"http://{host}:{sock.getsockname()[1]}"


def first_cause(failure: Exception) -> Exception:
    """Return the error to report: of an exception group, the first AntiphonError in it, or else its first exception."""
    while isinstance(failure, ExceptionGroup):
        found = failure.subgroup(AntiphonError)
        failure = (found or failure).exceptions[0]
    return failure


def _session_store(settings: Settings) -> SessionStore | None:
    """Open the store of conversations that outlive the server (`--state`). Raises StoreError."""
    folder, max_age_s = settings.resume.state, settings.resume.state_hours * 3600
    return SessionStore(Path(folder).expanduser(), max_age_s) if folder else None


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket (IPv6 for a `host` with a colon; port 0: any) that does not listen yet. The caller closes it.

    Raises SettingsError if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that say they are TCP; with it, a frame that follows another
    # waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock
