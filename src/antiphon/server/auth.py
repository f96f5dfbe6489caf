"""API keys: where a request carries one, and which caller it stands for."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from antiphon.errors import Unauthorized
from antiphon.server.state import ServerState

BROWSER_KEY = "openai-insecure-api-key."


def bearer(headers: Headers) -> str | None:
    """The key that a request carries in its Authorization header, or in the subprotocol a browser has to use; or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(BROWSER_KEY):
            return offered.strip().removeprefix(BROWSER_KEY)
    return None


def identify(connection: HTTPConnection, *, short: bool = False) -> str:
    """The caller of a request or upgrade: its API key, or "" where the server asks for none.

    With `short`, a short-lived key is accepted too, and stands for the key it was made with. Raises Unauthorized.
    """
    state: ServerState = connection.app.state.antiphon
    caller = state.caller(bearer(connection.headers), short=short)
    if caller is None:
        raise Unauthorized("the API key is missing or unknown")
    return caller
