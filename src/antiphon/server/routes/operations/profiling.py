"""POST /start_profile and /stop_profile: a trace of what the models compute, where `--torch-profiler-dir` allows it."""

from __future__ import annotations

import anyio.to_thread
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from antiphon.engine.profiling import Profiler
from antiphon.errors import EngineError
from antiphon.server.body import json_response


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
