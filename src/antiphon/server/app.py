"""Builds the ASGI application: routes, access log, origins, API keys, CORS and errors. Loads no model."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.errors import Unauthorized
from antiphon.server.access_log import AccessLog
from antiphon.server.drain import CutRequests
from antiphon.server.http.auth import identify
from antiphon.server.http.body import CloseUnread, HeldBody
from antiphon.server.http.errors import HANDLERS, error_response, response_to
from antiphon.server.http.origin import OriginCheck, cors
from antiphon.server.routes.table import ROUTES
from antiphon.server.routes.telephone import TWILIO
from antiphon.server.state import ServerState
from antiphon.transports.paths import BasePath, CheckedPaths, is_for_clients

# Paths that need no API key. Probes and scrapers have none, and the page asks its user for one. A call may have a
# short-lived key, which its route checks.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/v1/realtime/calls"})
# Maximum length of a path in an error message, and number of known paths that the message names.
MAX_SHOWN_CHARS, MAX_NEAREST = 100, 4


def build(state: ServerState) -> Starlette:
    """Build the application. Its routes find `state` at `app.state.antiphon`.

    It can be built before the models are loaded: requests that need them are refused with 503 until then.
    """
    server = state.settings.server
    middleware = [
        Middleware(BasePath),
        Middleware(AccessLog, ROUTES),
        Middleware(CloseUnread),
        Middleware(CutRequests, state.sessions),
        Middleware(CheckedPaths, partial(error_response, 400, code="invalid_path")),
        Middleware(OriginCheck, server),
    ]
    if server.cors_origins:
        middleware.append(cors(server))
    middleware += [Middleware(_Keys), Middleware(HeldBody)]
    app = application(state, ROUTES, middleware)
    app.router.default = _no_route
    return app


def application(state: ServerState, routes: Sequence[BaseRoute], middleware: Sequence[Middleware]) -> Starlette:
    """Return an application of these routes over `state`, which answers their exceptions."""
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.antiphon = state
    app.state.body_timeout_s = state.settings.server.body_timeout_s
    return app


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request or an upgrade to an unknown path. The error names the known paths that resemble it."""
    is_upgrade = scope["type"] == "websocket"
    path = scope["path"][:MAX_SHOWN_CHARS]
    known = [route for route in ROUTES if isinstance(route, Route | WebSocketRoute) and _is_listed(route.path)]
    near = get_close_matches(path, sorted({route.path for route in known}), MAX_NEAREST)
    if path in near:
        # The path exists, but the client sent a request to a WebSocket's path, or a WebSocket upgrade to another path.
        text, near = f"{path} is {'no' if is_upgrade else 'a'} WebSocket.", [path]
    else:
        text = f"There is no {'WebSocket ' if is_upgrade else ''}{path}."
    if near:
        text += f" Nearest: {', '.join(_shown(route) for name in near for route in known if route.path == name)}."
    raise HTTPException(404, f"{text} All paths are in docs/wire/index.md.")


def _shown(route: Route | WebSocketRoute) -> str:
    if isinstance(route, WebSocketRoute):
        return f"WS {route.path}"
    methods = sorted((route.methods or set()) - {"HEAD", "OPTIONS"})
    return f"{'/'.join(methods)} {route.path.replace(':path', '')}"


def _is_listed(path: str) -> bool:
    """Return whether errors list a path. They list paths for clients, probes and scrapers, but not the page's files."""
    return path in OPEN_PATHS or (is_for_clients(path) and not path.startswith("/web/"))


class _Keys:
    """Refuses HTTP requests without a known API key. For WebSockets, the routes do so before the upgrade."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not _is_open(scope["path"]):
            request = Request(scope)
            try:
                identify(request)
            except Unauthorized as error:
                await response_to(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    # Operators have their own key, and Twilio signs its requests. The routes check both.
    return path in OPEN_PATHS or path == TWILIO or path.startswith(("/web/", "/internal/"))
