"""Reads the API key of a request, and identifies its caller."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from antiphon.errors import Unauthorized
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller, Credentials
from antiphon.shares.places import current_owner

# Prefix of the subprotocol in which OpenAI's clients send the key, since a browser cannot set headers on a WebSocket.
BROWSER_KEY = "openai-insecure-api-key."
# The header in which ElevenLabs' clients send the key.
ELEVENLABS_KEY = "xi-api-key"
# Messages of the 401 response.
NO_KEY = "You didn't provide an API key. Send it as `Authorization: Bearer KEY`."
WRONG_KEY = "Incorrect API key provided."


def bearer(headers: Headers) -> str | None:
    """Return the key of a request without checking it; None if the request has no key.

    Reads the Authorization header (`Bearer KEY`), or else ELEVENLABS_KEY or the subprotocols that a WebSocket offers.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get(ELEVENLABS_KEY, "").strip():
        return key
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(BROWSER_KEY):
            return offered.strip().removeprefix(BROWSER_KEY)
    return None


def identify(connection: HTTPConnection, *, short: bool = False, key: str | None = None) -> Caller:
    """Return the caller of a request or upgrade, by its key, or by `key` if the request has none.

    After this call, jobs that this task and its subtasks submit to a lane count for the caller. With `short`, a
    short-lived key is accepted too; the route has to check that the key opens the requested session. Raises
    Unauthorized for a key that is missing, unknown or expired.
    """
    credentials: Credentials = connection.app.state.antiphon.credentials
    key = bearer(connection.headers) or key
    caller = credentials.caller(key, short=short)
    if caller is None:
        raise Unauthorized(WRONG_KEY if key else NO_KEY)
    return act_for(replace(caller, address=connection.client.host if connection.client else ""))


def act_for(caller: Caller) -> Caller:
    """Count the jobs that this task and its subtasks submit for a caller, and log the request as the caller's."""
    current_request().key = caller.label
    current_owner.set(caller.key)
    return caller
