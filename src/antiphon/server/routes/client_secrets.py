"""POST /v1/realtime/client_secrets, and the beta's /v1/realtime/sessions: short-lived keys for browsers.

A key comes with the session that it opens, whose configuration is checked when the key is made.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon.protocols.fields import json_body, known, number, typed
from antiphon.protocols.opening import Opening
from antiphon.server.auth import identify
from antiphon.server.body import limited
from antiphon.server.live.open_wire import connection_for
from antiphon.server.state import ClientSecret, ServerState

MAX_BODY_BYTES = 1 << 20
# How long a key is valid, in seconds.
DEFAULT_S, MIN_S, MAX_S = 600, 10, 7200


async def client_secrets(request: Request) -> Response:
    """Make a key that opens sessions of this configuration until it expires.

    Returns the key, its expiry in Unix seconds and the session. 400 or 404 for a session that the server cannot open.
    """
    return await _respond(request, beta=False)


async def sessions(request: Request) -> Response:
    """Do the same in the beta's shape: the body is the session, and so is the response, with its key inside."""
    return await _respond(request, beta=True)


async def _respond(request: Request, *, beta: bool) -> Response:
    state: ServerState = request.app.state.antiphon
    config, seconds = _parse(await limited(request, MAX_BODY_BYTES).body(), beta=beta)
    connection = connection_for(state, Opening(beta=beta, session=config))
    connection.open()
    session = connection.session()
    value, expires_at = f"ek_{secrets.token_hex(24)}", int(time.time() + seconds)
    state.add_secret(value, ClientSecret(identify(request), time.monotonic() + seconds, config))
    if beta:
        return JSONResponse(session | {"client_secret": {"value": value, "expires_at": expires_at}})
    return JSONResponse({"value": value, "expires_at": expires_at, "session": session})


def _parse(body: bytes, *, beta: bool) -> tuple[dict[str, Any], float]:
    """Return the session's configuration, and for how many seconds its key is valid. Raises RemoteProtocolError."""
    fields = json_body(body) if body.strip() else {}
    if beta:
        return fields, DEFAULT_S
    known(fields, ("expires_after", "session"), "")
    after = typed(fields.get("expires_after") or {}, dict, "expires_after")
    seconds = number(after.get("seconds", DEFAULT_S), "expires_after.seconds", MIN_S, MAX_S)
    return typed(fields.get("session") or {}, dict, "session"), seconds
