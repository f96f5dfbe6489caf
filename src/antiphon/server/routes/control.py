"""Routes for operators: POST /internal/drain, GET /internal/hosts and DELETE /internal/hosts/{name}; and POST
/start_profile and /stop_profile, which profile the models.

The paths under /internal/ exist if the setting `internal_key` is set, and require it as a bearer token. No other key is
accepted for these paths, and this key is accepted for no other path. Profiles require `--torch-profiler-dir`.
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
    """The response to a drain. `sessions` is the number of places taken now."""

    status: Literal["draining"]
    sessions: int


class HostList(msgspec.Struct):
    """The live hosts of the store, by name."""

    data: tuple[Host, ...]


class Buried(msgspec.Struct):
    """The response to a report that a host is dead. `was_alive`: whether the host counted as alive until now."""

    name: str
    was_alive: bool


async def drain_host(request: Request) -> Response:
    """POST /internal/drain: drain and end this server, as SIGTERM does. Returns 202 at once."""
    state = _opened(request)
    log.info("drain requested")
    state.stop()
    return json_response(Draining("draining", state.admission.num_sessions), 202)


async def list_hosts(request: Request) -> Response:
    """GET /internal/hosts: return the live hosts that share this server's store."""
    store = _store(_opened(request))
    return json_response(HostList(await anyio.to_thread.run_sync(store.hosts)))


async def bury(request: Request) -> Response:
    """DELETE /internal/hosts/{name}: report that a host is dead, so that other hosts may claim its sessions.

    A supervisor calls this. `name` is a full name (`host-3/9f2c41d0`), or only the first part, for all starts of that
    host. If the host is in fact alive, it is registered again by its next heartbeat. Sessions that were claimed
    meanwhile stay where they are.
    """
    state = _opened(request)
    store, name = _store(state), request.path_params["name"]
    hosts = await anyio.to_thread.run_sync(store.hosts)
    await anyio.to_thread.run_sync(partial(store.unregister, name))
    was_alive = any(host.name == name or host.name.startswith(f"{name}/") for host in hosts)
    log.info("the host %s is reported dead; it counted as %s", name, "alive" if was_alive else "not alive")
    return json_response(Buried(name, was_alive))


def _opened(request: Request) -> ServerState:
    """Return the server's state. Raises 404 if no internal key is set, and Unauthorized for a wrong key."""
    state: ServerState = request.app.state.antiphon
    key = state.settings.cluster.internal_key
    if not key:
        raise HTTPException(404, "The paths under /internal/ exist only if ANTIPHON_INTERNAL_KEY is set.")
    if not hmac.compare_digest(key.encode(), (bearer(request.headers) or "").encode()):
        raise Unauthorized("the internal key is missing or wrong")
    return state


def _store(state: ServerState) -> SessionStore:
    if state.sessions.store is None:
        raise HTTPException(404, "This server shares no store with other hosts (--state).")
    return state.sessions.store


# --- profiles ---------------------------------------------------------------------------------------------------------


class ProfileState(msgspec.Struct):
    """The response to both profile routes. `trace` is the file that was written; None when recording starts."""

    recording: bool
    trace: str | None = None


async def start_profile(request: Request) -> Response:
    """Begin a trace. 404 without the setting, 409 if a trace is being recorded, 507 if the folder cannot be written."""
    try:
        await anyio.to_thread.run_sync(_profiler(request).start)
    except EngineError as error:
        raise HTTPException(409, f"{error}".capitalize() + ".") from None
    return json_response(ProfileState(recording=True))


async def stop_profile(request: Request) -> Response:
    """End the trace and write it. 404 without the setting, 409 if no trace is being recorded, 507 if writing fails."""
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
