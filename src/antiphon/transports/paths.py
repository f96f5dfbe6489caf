"""Checks the paths of requests at hosts and doors.

Proxies and servers disagree on paths with several spellings. A proxy may hide `/metrics`, but the server behind it may
read `/%6detrics` or `/x/../metrics` as the same path. Therefore only one spelling is accepted. FOR_CLIENTS lists the
paths that clients may use, not the hidden paths. A door forwards no other path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from starlette.responses import Response
from starlette.websockets import WebSocket

# Paths for clients. An entry that ends in a slash includes all paths below it. A host's other paths are for operators.
# The load balancers in deploy/ and docs/hardening.md have the same list, plus the probes /health and /ready.
FOR_CLIENTS = ("/", "/realtime", "/stt/", "/tts/", "/v1/", "/v2/", "/v3/", "/web/", "/ws/")
MAX_PATH_BYTES = 4096
# Maximum rounds of percent-decoding. No client encodes a path more times.
_MAX_DECODED = 4
_NEEDLESS = re.compile(rb"%(?:3[0-9]|[46][1-9a-f]|[57][0-9a])", re.IGNORECASE)
_NO_ESCAPE = re.compile(rb"%(?![0-9a-fA-F]{2})")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
# Only the slashes around the prefix are joined. The rest of a path is not changed, so that no unknown path becomes
# a known path.
_PREFIX = re.compile(r"/+(v1|ws)/+")
# Some servers treat a backslash as a slash, and ignore the text after a semicolon in a segment.
_DOTS = re.compile(r"[/\\]\.\.?(?:[/\\;]|$)")


def raw_path(scope: Any) -> str:
    """Return the path of a request as it was received: percent-encoded, and without the query."""
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"]) if raw is None else raw.decode("latin-1")


def is_for_clients(path: str) -> bool:
    """Return whether a path is for clients. The path must not have a flaw."""
    return path in FOR_CLIENTS or path.startswith(tuple(p for p in FOR_CLIENTS if p != "/" and p.endswith("/")))


def flaw(path: str) -> str:
    """Describe the flaw in the spelling of a path as it was received. Returns "" if it has no flaw.

    A valid path has no segment `.` or `..`, even after repeated decoding, and no empty segment except at its end. It is
    UTF-8 without control characters. None of its letters and digits is percent-encoded.
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

    `/ws/` is joined in the same way.

    It must be the outermost middleware, so that all others see the same path.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward the request with the corrected path."""
        if scope["type"] in ("http", "websocket") and (found := _PREFIX.match(scope["path"])):
            raw = scope.get("raw_path")
            scope = scope | {"path": f"/{found[1]}/{scope['path'][found.end() :]}"}
            if raw is not None and (found := _PREFIX.match(raw.decode("latin-1"))):
                scope["raw_path"] = f"/{found[1]}/".encode() + raw[found.end() :]
        await self._app(scope, receive, send)


class CheckedPaths:
    """ASGI middleware that refuses paths with a flaw. It must be inside `BasePath`, which joins slashes.

    `refusal` creates the response, with status 400, from the description of the flaw.
    """

    def __init__(self, app: Any, refusal: Callable[[str], Response]) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward the request, or refuse it if its path has a flaw."""
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
