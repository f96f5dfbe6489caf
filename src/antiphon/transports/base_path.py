"""Paths of clients whose base URL ends in a slash: `//v1/models` and `/v1//models` are `/v1/models`."""

from __future__ import annotations

import re
from typing import Any

# Only the slashes around the prefix: what follows it stays as it was sent, and no other path becomes one that is known.
_PREFIX = re.compile(r"/+v1/+")


class BasePath:
    """ASGI middleware. It has to be the outermost, so that all others see one path."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand the request on, with the path that was meant."""
        if scope["type"] in ("http", "websocket") and (found := _PREFIX.match(scope["path"])):
            raw = scope.get("raw_path")
            scope = scope | {"path": f"/v1/{scope['path'][found.end() :]}"}
            if raw is not None and (found := _PREFIX.match(raw.decode("latin-1"))):
                scope["raw_path"] = b"/v1/" + raw[found.end() :]
        await self._app(scope, receive, send)
