"""API keys: where a request carries one, and which caller it stands for."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from antiphon.errors import Unauthorized
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller, Credentials
from antiphon.shares.places import current_owner

# A browser cannot set headers on a WebSocket; OpenAI's clients offer a subprotocol that begins so and ends in the key.
BROWSER_KEY = "openai-insecure-api-key."
# What a client is told.
NO_KEY = "You didn't provide an API key. Send it as `Authorization: Bearer KEY`."
WRONG_KEY = "Incorrect API key provided."


def bearer(headers: Headers) -> str | None:
    """Return the key that a request carries, or None.

    It is taken from the Authorization header (`Bearer KEY`), or else from the subprotocols that a WebSocket offers. The
    key is not checked.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(BROWSER_KEY):
            return offered.strip().removeprefix(BROWSER_KEY)
    return None


def identify(connection: HTTPConnection, *, short: bool = False) -> Caller:
    """Return the caller of a request or upgrade, by its key. What this task and those it begins submit to a lane is the
    caller's from now on.

    With `short`, a short-lived key is accepted too; the route has to check that it opens what is asked for. Raises
    Unauthorized for a key that is missing, unknown or expired.
    """
    credentials: Credentials = connection.app.state.antiphon.credentials
    key = bearer(connection.headers)
    caller = credentials.caller(key, short=short)
    if caller is None:
        raise Unauthorized(WRONG_KEY if key else NO_KEY)
    caller = replace(caller, address=connection.client.host if connection.client else "")
    current_request().key = caller.label
    current_owner.set(caller.key)
    return caller
