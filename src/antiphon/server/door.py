"""Runs a door: a server without models that relays clients' connections to hosts (`antiphon serve --role door`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import anyio
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from antiphon.cluster.door.app import Door, build
from antiphon.cluster.door.hosts import Hosts, host_urls, watching
from antiphon.errors import SettingsError
from antiphon.server.app import application
from antiphon.server.credentials import PassedKeys
from antiphon.server.http.connections import log_failed_accepts
from antiphon.server.http.errors import Forbidden, error_response
from antiphon.server.http.listening import QuietServer, base_url, bind, quiet_log, stop_on_signals
from antiphon.server.http.origin import OriginCheck, Origins, cors, is_loopback
from antiphon.server.http.tls import keep_current, open_tls
from antiphon.server.metrics import Metrics
from antiphon.server.routes.door_calls import DoorCalls
from antiphon.server.routes.table import TELEPHONE_ROUTES
from antiphon.server.sip.listening import check_sip, open_sip
from antiphon.server.state import ServerState
from antiphon.server.telephone.at_hosts import AtHosts
from antiphon.server.telephone.audiosocket import check_audiosocket, open_audiosocket
from antiphon.settings import ServerSettings, Settings
from antiphon.signals import unless_set


async def serve_door(settings: Settings, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Relay connections, and hold calls, until SIGTERM or SIGINT. Then wait until all are closed, for `drain_s` or a
    second signal.

    Run it in the main thread's event loop. `on_ready` is called with the base URL. Raises SettingsError.
    """
    server = settings.server
    if not is_loopback(server.host) and not server.allow_anonymous:
        raise SettingsError(
            f"--host {server.host} is open to others, and a door checks no API key, which its hosts do: give "
            "--allow-anonymous if each host has a key"
        )
    check_audiosocket(settings)
    check_sip(settings)
    hosts = Hosts(host_urls(settings), time.monotonic)
    door = Door(hosts, settings.resume.grace_s, server.metrics_key, server.body_timeout_s)
    state = _telephone(settings, door)
    calls = DoorCalls(door, server)
    app = build(door, [*calls.routes(), *_telephone_routes(state)], partial(_foreign, _origins(server)))
    app.state.antiphon = state
    app.state.body_timeout_s = server.body_timeout_s
    # uvicorn need not log responses that a host breaks off, since the door logs them itself.
    quiet_log(lambda: True)
    log_failed_accepts(asyncio.get_running_loop())
    tls = open_tls(settings)
    sock = bind(server.host, server.port)
    http = QuietServer(app, settings, lifespan="on", tls=tls.context if tls else None)
    with contextlib.ExitStack() as stack, stop_on_signals() as (stop, now):
        stack.enter_context(contextlib.closing(sock))
        stack.callback(state.listeners.close)
        open_audiosocket(state)
        if sip := open_sip(state):
            stack.callback(sip.close)
        async with watching(settings.resume, hosts), anyio.create_task_group() as group:
            state.group = group
            group.start_soon(http.serve_on, sock, group.cancel_scope)
            if tls:
                group.start_soon(keep_current, tls)
            await http.listens.wait()
            if sip:
                await group.start(sip.serve)
            await group.start(state.listeners.serve)
            on_ready(base_url(server, sock, tls=tls is not None))
            await stop.wait()
            door.draining = state.admission.draining = True
            state.listeners.drain()
            with anyio.move_on_after(server.drain_s):
                await unless_set(now, door.all_closed)
            await calls.hang_up_all(list(state.sessions.calls.values()))
            http.should_exit = True


def _telephone(settings: Settings, door: Door) -> ServerState:
    """Return the state of a server without models, which holds telephone calls with conversations of the hosts."""
    state = ServerState(settings, Metrics())
    state.credentials = PassedKeys((), state.memory)
    state.switchboard.hosts = AtHosts(door, settings.telephone)

    def session_of(call_id: str) -> str:
        call = state.sessions.calls.get(call_id)
        return call.id if call else call_id

    door.session_of, door.calls_exposed = session_of, state.metrics.of_calls
    return state


def _telephone_routes(state: ServerState) -> list[Route | WebSocketRoute]:
    """Return the routes of telephone calls, as a host serves them."""
    server = state.settings.server
    middleware = [Middleware(OriginCheck, server), *([cors(server)] if server.cors_origins else [])]
    app = application(state, TELEPHONE_ROUTES, middleware)
    return [type(route)(route.path, app) for route in TELEPHONE_ROUTES]


def _origins(server: ServerSettings) -> Origins:
    """Return the origins that may read the door's own responses. A door checks no key except the metrics key."""
    return Origins(replace(server, api_keys=(server.metrics_key,) if server.metrics_key else ()))


def _foreign(origins: Origins, request: HTTPConnection) -> Response | None:
    """Return the response that refuses a page of another site, as a host would; None for an allowed request."""
    try:
        origins.check(request.headers)
    except Forbidden as error:
        return error_response(error.status_code, error.detail, code=error.code)
    return None
