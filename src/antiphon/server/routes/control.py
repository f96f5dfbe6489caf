"""For those who run hosts: POST /internal/drain, GET /internal/hosts, DELETE /internal/hosts/{name}; and traces of
what the models compute: POST /start_profile and /stop_profile.

The paths under /internal/ are there where the setting `internal_key` is, and want it as a bearer token. No other key
opens them, and this one opens nothing else. Profiles are recorded where `--torch-profiler-dir` allows it.
"""

from __future__ import annotations

import hmac
import logging
from functools import partial
from typing import Literal

import anyio.to_thread
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from antiphon.engine.profiling import Profiler
from antiphon.errors import EngineError, Unauthorized
from antiphon.server.http.auth import bearer
from antiphon.server.http.body import json_response
from antiphon.server.state import ServerState
from antiphon.store.sessions import Host, SessionStore

log = logging.getLogger(__name__)


class Draining(msgspec.Struct):
    """The answer to a drain. `sessions`: how many are live now."""

    status: Literal["draining"]
    sessions: int


class HostList(msgspec.Struct):
    """The hosts that live, by name."""

    data: tuple[Host, ...]


class Buried(msgspec.Struct):
    """The answer to a word that a host is dead. `was_alive`: whether the store took it to be alive until now."""

    name: str
    was_alive: bool


async def drain_host(request: Request) -> Response:
    """POST /internal/drain: have this server drain and end, as SIGTERM does. Answers 202 at once."""
    state = _opened(request)
    log.info("asked to drain")
    state.stop()
    return json_response(Draining("draining", state.admission.num_sessions), 202)


async def list_hosts(request: Request) -> Response:
    """GET /internal/hosts: the hosts that share this server's store and live."""
    store = _store(_opened(request))
    return json_response(HostList(await anyio.to_thread.run_sync(store.hosts)))


async def bury(request: Request) -> Response:
    """DELETE /internal/hosts/{name}: a supervisor's word that a host is dead, so that others may take up its sessions.

    `name`: with its incarnation (`host-3/9f2c41d0`), or without for all of them. A host that lives after all is back
    with its next heartbeat; sessions that were claimed meanwhile stay where they are.
    """
    state = _opened(request)
    store, name = _store(state), request.path_params["name"]
    hosts = await anyio.to_thread.run_sync(store.hosts)
    await anyio.to_thread.run_sync(partial(store.unregister, name))
    was_alive = any(host.name == name or host.name.startswith(f"{name}/") for host in hosts)
    log.info("the host %s is said to be dead; it was %s", name, "alive" if was_alive else "not alive")
    return json_response(Buried(name, was_alive))


def _opened(request: Request) -> ServerState:
    """Return the server's state. Raises 404 where there is no internal key, Unauthorized for a wrong one."""
    state: ServerState = request.app.state.antiphon
    key = state.settings.cluster.internal_key
    if not key:
        raise HTTPException(404, "The paths under /internal/ are there where ANTIPHON_INTERNAL_KEY is set.")
    if not hmac.compare_digest(key.encode(), (bearer(request.headers) or "").encode()):
        raise Unauthorized("the internal key is missing or wrong")
    return state


def _store(state: ServerState) -> SessionStore:
    if state.sessions.store is None:
        raise HTTPException(404, "This server shares no store with other hosts (--state).")
    return state.sessions.store


# --- profiles ---------------------------------------------------------------------------------------------------------


class ProfileState(msgspec.Struct):
    """The body of both. `trace`: the file that was written; None for a profile that has begun."""

    recording: bool
    trace: str | None = None


async def start_profile(request: Request) -> Response:
    """Begin a trace. 404 without the setting, 409 where one is being recorded, 507 where the folder cannot be had."""
    try:
        await anyio.to_thread.run_sync(_profiler(request).start)
    except EngineError as error:
        raise HTTPException(409, f"{error}".capitalize() + ".") from None
    return json_response(ProfileState(recording=True))


async def stop_profile(request: Request) -> Response:
    """End the trace and write it. 404 without the setting, 409 where none is being recorded, 507 where it cannot be
    written.
    """
    try:
        path = await anyio.to_thread.run_sync(_profiler(request).stop)
    except EngineError as error:
        raise HTTPException(409, f"{error}".capitalize() + ".") from None
    return json_response(ProfileState(recording=False, trace=str(path)))


def _profiler(request: Request) -> Profiler:
    profiler: Profiler | None = request.app.state.antiphon.profiler
    if profiler is None:
        raise HTTPException(404, "Profiling is off: the server was started without --torch-profiler-dir.")
    return profiler
