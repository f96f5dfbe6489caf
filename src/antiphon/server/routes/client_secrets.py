"""POST /v1/realtime/client_secrets (and the beta's /v1/realtime/sessions): short-lived keys for browsers, with the session they open."""

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
DEFAULT_S, LEAST_S, MOST_S = 600, 10, 7200


async def client_secrets(request: Request) -> Response:
    """A key that opens one kind of session until it expires."""
    return await _answer(request, beta=False)


async def sessions(request: Request) -> Response:
    """The same in the beta's shape: the session, with its key inside."""
    return await _answer(request, beta=True)


async def _answer(request: Request, *, beta: bool) -> Response:
    state: ServerState = request.app.state.antiphon
    asked, seconds = _parse(await limited(request, MAX_BODY_BYTES).body(), beta=beta)
    connection = connection_for(state, Opening(beta=beta, session=asked))
    connection.open()
    session = connection.session()
    value, expires_at = f"ek_{secrets.token_hex(24)}", int(time.time() + seconds)
    state.keep_secret(value, ClientSecret(identify(request), time.monotonic() + seconds, asked))
    if beta:
        return JSONResponse(session | {"client_secret": {"value": value, "expires_at": expires_at}})
    return JSONResponse({"value": value, "expires_at": expires_at, "session": session})


def _parse(body: bytes, *, beta: bool) -> tuple[dict[str, Any], float]:
    fields = json_body(body) if body.strip() else {}
    if beta:
        return fields, DEFAULT_S
    known(fields, ("expires_after", "session"), "")
    after = typed(fields.get("expires_after") or {}, dict, "expires_after")
    seconds = number(after.get("seconds", DEFAULT_S), "expires_after.seconds", LEAST_S, MOST_S)
    return typed(fields.get("session") or {}, dict, "session"), seconds
