"""Runs the server: opens the socket, loads the models, serves, and on SIGTERM or SIGINT drains before it closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from antiphon.errors import AntiphonError, ModelLost, SettingsError, StoreError
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.server.app import build
from antiphon.server.drain import drain
from antiphon.server.http.connections import log_failed_accepts
from antiphon.server.http.listening import QuietServer, base_url, bind, is_wildcard, quiet_log, stop_on_signals
from antiphon.server.http.origin import is_loopback
from antiphon.server.http.tls import ServerTls, keep_current, open_tls
from antiphon.server.memory import reclaim_excess, settle_garbage
from antiphon.server.metrics import Metrics
from antiphon.server.sip.listening import check_sip, open_sip
from antiphon.server.state import ServerState
from antiphon.server.telephone.audiosocket import check_audiosocket, open_audiosocket
from antiphon.server.watches import as_host, keep_registered, watch_headroom, watch_loop, watch_models
from antiphon.server.wyoming.listening import check_wyoming, open_wyoming
from antiphon.settings import Settings
from antiphon.signals import unless_set
from antiphon.store.sessions import SessionStore, open_store

log = logging.getLogger(__name__)
# Timeout, in seconds, for models to finish their steps when the server stops.
CLOSE_MODELS_S = 2.0
# Timeout, in seconds, for sending the remaining traces when the server stops.
CLOSE_TRACES_S = 5.0
# Seconds after which a busy thread yields the interpreter lock to a waiting thread. Python's default is 5 ms. A model's
# step acquires the lock hundreds of times. If the step waited 5 ms each time, one busy thread would make each step take
# seconds.
SWITCH_INTERVAL_S = 0.0005


def check_exposure(settings: Settings) -> None:
    """Raise SettingsError for a non-loopback address without an API key, unless `--allow-anonymous` is given."""
    host = settings.server.host
    if not is_loopback(host) and not settings.server.api_keys and not settings.server.allow_anonymous:
        raise SettingsError(
            f"--host {host} is open to others and no API key is set: "
            "give --api-key KEY, or set ANTIPHON_API_KEYS, or give --allow-anonymous if this is intended"
        )


async def serve(
    settings: Settings,
    on_ready: Callable[[str], None] = lambda _: None,
    bound: socket.socket | None = None,
    ends: tuple[anyio.Event, anyio.Event] | None = None,
    on_app: Callable[[ASGIApp], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and close. Run it in the main thread's event loop.

    The socket is open while the models load, and requests are refused with 503 meanwhile. `on_ready` is called with the
    base URL when the models are loaded and warm. `on_app` gets the application at that time, for callers in this
    process. `bound` is a socket from `bind`, which is closed at the end; if None, the function binds a socket. `ends`
    replaces the signals: its first event stops the server, and its second event ends the drain. With `ends`, the event
    loop may run in any thread.

    A signal while models load ends the server at once. A second signal ends the drain. The function does not wait for
    threads that hang or still load; the caller has to end the process. Raises SettingsError, StoreError or ModelError
    if the server cannot start, and ModelLost after the drain if a model was lost and `exit_on_model_loss` is set.
    """
    check_exposure(settings)
    check_wyoming(settings)
    check_audiosocket(settings)
    check_sip(settings)
    tls = open_tls(settings)
    sock = bound or bind(settings.server.host, settings.server.port)
    with contextlib.closing(sock):
        await _serve(settings, on_ready, on_app, sock, ends, tls)


async def _serve(
    settings: Settings,
    on_ready: Callable[[str], None],
    on_app: Callable[[ASGIApp], None],
    sock: socket.socket,
    ends: tuple[anyio.Event, anyio.Event] | None,
    tls: ServerTls | None,
) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log_failed_accepts(asyncio.get_running_loop())
    state = ServerState(settings, Metrics(), started_s=int(time.time()))
    quiet_log(lambda: state.admission.draining)
    url = base_url(settings.server, sock, tls=tls is not None)
    state.sessions.address = settings.cluster.advertise or ("" if is_wildcard(settings.server.host) else url)
    sessions = _open_session_store(state)
    http = http_server(state, tls)
    open_wyoming(state)
    open_audiosocket(state)
    sip = open_sip(state)
    models: LoadedModels | None = None
    failure: Exception | None = None
    try:
        with contextlib.nullcontext(ends) if ends else stop_on_signals() as (stop, now):
            async with anyio.create_task_group() as group:
                state.group = group
                group.start_soon(http.serve_on, sock, group.cancel_scope)
                if tls:
                    group.start_soon(keep_current, tls)
                if sessions:
                    group.start_soon(keep_registered, state, sessions)
                if state.tool_servers:
                    group.start_soon(state.tool_servers.run)
                try:
                    models = await unless_set(stop, partial(_load, state))
                    if models and not stop.is_set():
                        await unless_set(stop, models.warm)
                        await unless_set(stop, partial(anyio.to_thread.run_sync, settle_garbage))
                except (AntiphonError, ExceptionGroup) as error:
                    failure = error
                if models and not failure and not stop.is_set():
                    _begin(state, models, stop)
                    if sip:
                        await group.start(sip.serve)
                    await group.start(state.listeners.serve)
                    on_app(cast(ASGIApp, http.config.app))
                    on_ready(url)
                    await stop.wait()
                    await drain(state, settings.server.drain_s, now)
                    if settings.server.exit_on_model_loss and (lost := models.lost()):
                        failure = ModelLost("; ".join(f"the model {name} is lost: {why}" for name, why in lost.items()))
                http.should_exit = True
            if failure:
                raise first_cause(failure)
    finally:
        sock.close()
        state.listeners.close()
        if sip:
            sip.close()
        if sessions:
            sessions.close(state.sessions.host_name)
        with anyio.move_on_after(CLOSE_TRACES_S, shield=True):
            await anyio.to_thread.run_sync(state.turns.close, abandon_on_cancel=True)
        if models:
            # A worker that hangs is abandoned, and ends with the process.
            with anyio.move_on_after(CLOSE_MODELS_S, shield=True):
                await anyio.to_thread.run_sync(models.close, abandon_on_cancel=True)


async def _load(state: ServerState) -> LoadedModels:
    """Load the models in a thread. The thread continues if this is cancelled."""
    settings = state.settings
    work = partial(load, settings, store_of(settings.models), state.metrics.step)
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _begin(state: ServerState, models: LoadedModels, stop: anyio.Event) -> None:
    """Begin to serve with models that are loaded and warm, and to monitor them. Does not wait."""
    server = state.settings.server
    state.models = models
    state.stop = stop.set
    state.metrics.watch(
        models.lanes,
        state.sessions.backlog_s,
        models.language_model,
        models.workers,
        models.detector_failures.counts,
        models.pools,
    )
    on_lost = stop.set if server.exit_on_model_loss else lambda: None
    assert state.group
    state.group.start_soon(reclaim_excess, state.memory)
    state.group.start_soon(watch_loop, state.metrics.lagged)
    state.admission.asks_headroom = server.headroom
    if server.headroom:
        state.group.start_soon(watch_headroom, state, models)
    state.group.start_soon(watch_models, models.workers, server.stall_s, on_lost)
    if not server.api_keys:
        log.info("no API key is set: %s may use this server", _reaching(server.host))


def http_server(state: ServerState, tls: ServerTls | None = None) -> QuietServer:
    """Return an HTTP server for the application over `state`. It installs no signal handlers."""
    refuse = state.metrics.refused.labels("connections").inc
    http = QuietServer(build(state), state.settings, refuse, tls=tls.context if tls else None)
    state.metrics.connections.set_function(lambda: float(http.connections.num_open))
    return http


def _reaching(host: str) -> str:
    return "every program on this machine" if is_loopback(host) else f"everyone who reaches {host}"


def first_cause(failure: Exception) -> Exception:
    """Return the error to report: the first AntiphonError in an exception group, or else its first exception."""
    while isinstance(failure, ExceptionGroup):
        found = failure.subgroup(AntiphonError)
        failure = (found or failure).exceptions[0]
    return failure


def _open_session_store(state: ServerState) -> SessionStore | None:
    """Open the store of conversations that outlive the server (`--state`), and register this host in it. Blocks.

    Raises StoreError, SettingsError.
    """
    resume = state.settings.resume
    if not resume.state:
        return None
    store = open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)
    try:
        # The host is registered before any session is stored, so that the owner of a session never counts as dead.
        store.renew(as_host(state))
    except StoreError:
        store.close()
        raise
    state.metrics.state_degraded.set_function(lambda: float(store.degraded is not None))
    state.sessions.store = store
    log.info("this server is host %s of its session store", state.sessions.host_name)
    return store
