"""Checks the paths of requests, at hosts and doors: which paths are for clients, and whether a path is spelled
properly.

Proxies and servers disagree on paths with several spellings: one hides `/metrics`, and another one reads `/%6detrics`
or `/x/../metrics` as that. Therefore only one spelling is accepted. The list contains the paths for clients, not the
hidden ones: a path that is not on the list passes no door.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from starlette.responses import Response
from starlette.websockets import WebSocket

# Paths for clients: these, and all below those that end in a slash. The other paths of a host are for its operators.
# The balancers of deploy/ and docs/hardening.md have the same list, plus the probes /health and /ready.
FOR_CLIENTS = ("/", "/realtime", "/v1/", "/web/", "/ws/")
MAX_PATH_BYTES = 4096
# Bound: rounds of percent-decoding. No client encodes more often.
_MAX_DECODED = 4
_NEEDLESS = re.compile(rb"%(?:3[0-9]|[46][1-9a-f]|[57][0-9a])", re.IGNORECASE)
_NO_ESCAPE = re.compile(rb"%(?![0-9a-fA-F]{2})")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
# Only the slashes around the prefix are joined. The rest of a path stays as it was sent, so no other path becomes a
# known one.
_PREFIX = re.compile(r"/+v1/+")
# Some servers treat a backslash as a slash, and do not count the text after a semicolon as part of the segment.
_DOTS = re.compile(r"[/\\]\.\.?(?:[/\\;]|$)")


def raw_path(scope: Any) -> str:
    """Return the path of a request as received, percent-encoded, without its query."""
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"]) if raw is None else raw.decode("latin-1")


def is_for_clients(path: str) -> bool:
    """Return whether a path, which has no flaw, is for clients."""
    return path in FOR_CLIENTS or path.startswith(tuple(p for p in FOR_CLIENTS if p != "/" and p.endswith("/")))


def flaw(path: str) -> str:
    """Return what is wrong with the spelling of a path as received; "" if nothing is.

    A path has no segment `.` or `..`, even after repeated decoding, and no empty segment inside. It is UTF-8 without
    control characters, and no letter or digit of it is percent-encoded.
    """
    if len(path) > MAX_PATH_BYTES:
        return f"A path has at most {MAX_PATH_BYTES} bytes."
    if not path.startswith("/"):
        return "A path begins with a slash."
    raw = path.encode("latin-1")
    if "#" in path or "\\" in path or _NO_ESCAPE.search(raw):
        return "Other characters than those of a path are percent-encoded, as is a percent sign."
    if _NEEDLESS.search(raw):
        return "Letters and digits of a path are not percent-encoded."
    if "//" in path:
        return "A path has no segments without a name. Slashes of a name are percent-encoded."
    for _ in range(_MAX_DECODED):
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return "A path is UTF-8."
        if _CONTROLS.search(text):
            return "A path has no control characters."
        if _DOTS.search(text) or text.startswith("//"):
            return "A path has no segments `.` and `..`, and begins with one slash."
        decoded = unquote_to_bytes(raw)
        if decoded == raw:
            return ""
        raw = decoded
    return "A path is percent-encoded once."


class BasePath:
    """ASGI middleware for clients whose base URL ends in a slash: `//v1/models` and `/v1//models` become `/v1/models`.

    It must be the outermost middleware, so that all others see the same path.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, with the corrected path."""
        if scope["type"] in ("http", "websocket") and (found := _PREFIX.match(scope["path"])):
            raw = scope.get("raw_path")
            scope = scope | {"path": f"/v1/{scope['path'][found.end() :]}"}
            if raw is not None and (found := _PREFIX.match(raw.decode("latin-1"))):
                scope["raw_path"] = b"/v1/" + raw[found.end() :]
        await self._app(scope, receive, send)


class CheckedPaths:
    """ASGI middleware that refuses paths with a flaw. It must be inside the one that joins slashes (`BasePath`).

    `refusal` creates the response, with status 400, from the description of the flaw.
    """

    def __init__(self, app: Any, refusal: Callable[[str], Response]) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or not (wrong := flaw(raw_path(scope))):
            await self._app(scope, receive, send)
        else:
            await respond(self._refusal(wrong), scope, receive, send)


async def respond(response: Response, scope: Any, receive: Any, send: Any) -> None:
    """Answer a request, or the upgrade of a WebSocket, with this response."""
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
