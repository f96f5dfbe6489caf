"""POST /v1/realtime/client_secrets, and the beta's /v1/realtime/sessions: short-lived keys for browsers.

Each key is made for one session configuration, which is checked at that time.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon.protocols.fields import EMPTY, decode, json_object, number
from antiphon.protocols.opening import NULL
from antiphon.server.credentials import Caller, ClientSecret
from antiphon.server.http.auth import identify
from antiphon.server.http.body import limited
from antiphon.server.live.open_wire import checked_session
from antiphon.server.state import ServerState

MAX_BODY_BYTES = 1 << 20
# Lifetime of a key in seconds: default, minimum and maximum.
DEFAULT_S, MIN_S, MAX_S = 600, 10, 7200


class ExpiresAfter(msgspec.Struct):
    """The time at which the key expires, in seconds from now."""

    seconds: float = DEFAULT_S


class SecretRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a key. `session` is an object, which is checked now and applied when the key opens a session."""

    expires_after: ExpiresAfter | None = None
    session: msgspec.Raw = NULL


async def client_secrets(request: Request) -> Response:
    """Make a key that opens sessions of this configuration until it expires.

    Returns the key, its expiry in Unix seconds and the session; 400 or 404 if the server cannot open such a session.
    """
    return await _respond(request, beta=False)


async def sessions(request: Request) -> Response:
    """Make a key in the beta's format: the body is the session, and the response is the session with its key."""
    return await _respond(request, beta=True)


async def _respond(request: Request, *, beta: bool) -> Response:
    state: ServerState = request.app.state.antiphon
    config, seconds = parse(await limited(request, MAX_BODY_BYTES).body(), beta=beta)
    caller = identify(request)
    shown = await checked_session(state, caller, config, beta=beta)
    session = msgspec.json.decode(msgspec.json.encode(shown))
    value, expires_at = new_secret(state, caller, config, seconds), int(time.time() + seconds)
    if beta:
        return JSONResponse(session | {"client_secret": {"value": value, "expires_at": expires_at}})
    return JSONResponse({"value": value, "expires_at": expires_at, "session": session})


def new_secret(state: ServerState, caller: Caller, session: msgspec.Raw, seconds: float) -> str:
    """Make a key of a caller that opens this session for some seconds. Raises Refused if the caller has no memory left.

    The key is not made for one connection: it opens as many as its owner may have.
    """
    value = f"ek_{secrets.token_hex(24)}"
    state.credentials.add(value, ClientSecret(caller.key, time.monotonic() + seconds, session))
    return value


def parse(body: bytes, *, beta: bool) -> tuple[msgspec.Raw, float]:
    """Return the session's configuration, and the lifetime of its key in seconds. Raises RemoteProtocolError."""
    body = body.strip() or b"{}"
    if beta:
        return json_object(body), DEFAULT_S
    asked = decode(body, SecretRequest)
    after = asked.expires_after or ExpiresAfter()
    session = EMPTY if bytes(asked.session) == b"null" else json_object(bytes(asked.session), "session", "session")
    return session, number(after.seconds, "expires_after.seconds", MIN_S, MAX_S)
