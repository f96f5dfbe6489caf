"""Where a caller's API key is: the Authorization header, or the subprotocol a browser has to use."""

from __future__ import annotations

from starlette.datastructures import Headers

BROWSER_KEY = "openai-insecure-api-key."


def bearer(headers: Headers) -> str | None:
    """The key a request carries, or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(BROWSER_KEY):
            return offered.strip().removeprefix(BROWSER_KEY)
    return None
