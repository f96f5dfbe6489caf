"""Reads the API key of a request, and identifies its caller."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from antiphon.errors import Unauthorized
from antiphon.protocols.opening import URL_KEYS
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller, Credentials
from antiphon.shares.places import current_owner

# Prefixes of the subprotocol in which clients of OpenAI, and of ElevenLabs' agents, send the key, since a browser
# cannot set headers on a WebSocket.
BROWSER_KEYS = ("openai-insecure-api-key.", "bearer.")
# Subprotocols before the key of Deepgram's clients in browsers, as in `token, KEY`. The server selects the first one.
KEY_SUBPROTOCOLS = ("token", "bearer")
# Schemes of the Authorization header before a key. AssemblyAI's clients send the key without a scheme.
_SCHEMES = ("bearer", "token")
# The header in which ElevenLabs' clients send the key.
ELEVENLABS_KEY = "xi-api-key"
# Other headers with a key: of Google's clients, and of Cartesia's.
_KEY_HEADERS = (ELEVENLABS_KEY, "x-goog-api-key", "x-api-key")
# Messages of the 401 response.
NO_KEY = "You didn't provide an API key. Send it as `Authorization: Bearer KEY`."
WRONG_KEY = "Incorrect API key provided."


def bearer(headers: Headers) -> str | None:
    """Return the key in the headers of a request without checking it; None if they have no key.

    Reads the Authorization header (`Bearer KEY`, `Token KEY` or `KEY`), or else the headers of other vendors' clients,
    or the subprotocols that a WebSocket offers.
    """
    if key := _authorized(headers.get("authorization", "")):
        return key
    for name in _KEY_HEADERS:
        if key := headers.get(name, "").strip():
            return key
    offered = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
    if offered[0] in KEY_SUBPROTOCOLS and len(offered) > 1:
        return offered[1]
    found = (name.removeprefix(prefix) for name in offered for prefix in BROWSER_KEYS if name.startswith(prefix))
    return next(found, None)


def _authorized(header: str) -> str:
    scheme, _, key = header.strip().partition(" ")
    if scheme.lower() in _SCHEMES:
        return key.strip()
    return "" if key else scheme


def key_of(connection: HTTPConnection) -> str | None:
    """Return the key of a request or upgrade without checking it: that of its headers, or else of its URL (URL_KEYS).

    None if it has no key. Never log, store or return the URL of a request: it may have the key.
    """
    query = connection.query_params
    return bearer(connection.headers) or next((query[name] for name in URL_KEYS if query.get(name)), None)


def identify(connection: HTTPConnection, *, short: bool = False, key: str | None = None) -> Caller:
    """Return the caller of a request or upgrade, by its key, or by `key` if the request has none.

    After this call, jobs that this task and its subtasks submit to a lane count for the caller. With `short`, a
    short-lived key is accepted too; the route has to check that the key opens the requested session. Raises
    Unauthorized for a key that is missing, unknown or expired.
    """
    credentials: Credentials = connection.app.state.antiphon.credentials
    key = key_of(connection) or key
    caller = credentials.caller(key, short=short)
    if caller is None:
        raise Unauthorized(WRONG_KEY if key else NO_KEY)
    return act_for(replace(caller, address=connection.client.host if connection.client else ""))


def act_for(caller: Caller) -> Caller:
    """Count the jobs that this task and its subtasks submit for a caller, and log the request as the caller's."""
    current_request().key = caller.label
    current_owner.set(caller.key)
    return caller
