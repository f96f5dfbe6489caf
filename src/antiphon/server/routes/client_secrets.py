"""POST /v1/realtime/client_secrets (and the beta's /v1/realtime/sessions): short-lived keys for browsers, with the session they open."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.fields import known, number, typed
from antiphon.protocols.opening import Opening
from antiphon.server.auth import bearer
from antiphon.server.errors import error_response
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
    try:
        if int(request.headers.get("content-length", "0") or 0) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        asked, seconds = _parse(await request.body(), beta=beta)
        connection = connection_for(state, Opening(beta=beta, session=asked))
        connection.open()
        session = connection.session()
    except RemoteProtocolError as error:
        status = 404 if error.code == "model_not_found" else 400
        return error_response(status, error.message, code=error.code, param=error.param)
    except Refused as refusal:
        return error_response(503, str(refusal), code="rate_limit_exceeded", retry_after_s=refusal.retry_after_s)
    except HTTPException as error:
        return error_response(error.status_code, error.detail, code="invalid_value")
    value, expires_at = f"ek_{secrets.token_hex(24)}", int(time.time() + seconds)
    state.keep_secret(value, ClientSecret(state.who(bearer(request.headers)) or "", time.monotonic() + seconds, asked))
    if beta:
        return JSONResponse(session | {"client_secret": {"value": value, "expires_at": expires_at}})
    return JSONResponse({"value": value, "expires_at": expires_at, "session": session})


def _parse(body: bytes, *, beta: bool) -> tuple[dict[str, Any], float]:
    try:
        fields = typed(msgspec.json.decode(body) if body.strip() else {}, dict, "body")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError("invalid_json", f"The body is not valid JSON: {error}") from None
    if beta:
        return fields, DEFAULT_S
    known(fields, ("expires_after", "session"), "")
    after = typed(fields.get("expires_after") or {}, dict, "expires_after")
    seconds = number(after.get("seconds", DEFAULT_S), "expires_after.seconds", LEAST_S, MOST_S)
    return typed(fields.get("session") or {}, dict, "session"), seconds
