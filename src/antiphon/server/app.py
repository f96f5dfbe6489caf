"""The ASGI application: routes, keys, CORS, errors. Models are loaded by whoever runs it (server/run.py)."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon import __version__
from antiphon.errors import Unauthorized
from antiphon.server.auth import identify
from antiphon.server.errors import HANDLERS, error_response, response_to
from antiphon.server.routes.calls import calls, hang_up
from antiphon.server.routes.chat import chat_completions
from antiphon.server.routes.client_secrets import client_secrets, sessions
from antiphon.server.routes.health import worker_health
from antiphon.server.routes.page import asset, root
from antiphon.server.routes.realtime import realtime
from antiphon.server.routes.speech import batch, speech, voice, voices
from antiphon.server.routes.speech_stream import speech_stream
from antiphon.server.routes.transcriptions import transcriptions, translations
from antiphon.server.routes.video_stream import video_stream
from antiphon.server.state import ServerState

# Probes and scrapers come without a key, and so does the page, which asks for one; a call may come with a short-lived one.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/v1/realtime/calls"})


def build(state: ServerState) -> Starlette:
    """The application over `state`."""
    middleware = []
    if state.settings.server.cors_origins:
        origins = list(state.settings.server.cors_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    middleware.append(Middleware(_Keys))
    app = Starlette(
        routes=[
            Route("/", root),
            Route("/web/{name}", asset),
            Route("/health", _health),
            Route("/ready", _ready),
            Route("/metrics", _metrics),
            Route("/v1/models", _models),
            Route("/v1/models/{id:path}", _model),
            Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
            Route("/v1/audio/translations", translations, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/audio/speech", speech, methods=["POST"]),
            Route("/v1/audio/speech/batch", batch, methods=["POST"]),
            Route("/v1/audio/voices", voices, methods=["GET", "POST"]),
            Route("/v1/audio/voices/{name:path}", voice, methods=["DELETE"]),
            WebSocketRoute("/v1/audio/speech/stream", speech_stream),
            WebSocketRoute("/v1/video/chat/stream", video_stream),
            Route("/v1/realtime/calls", calls, methods=["POST"]),
            Route("/v1/realtime/calls/{id}/hangup", hang_up, methods=["POST"]),
            Route("/v1/realtime/client_secrets", client_secrets, methods=["POST"]),
            Route("/v1/realtime/sessions", sessions, methods=["POST"]),
            WebSocketRoute("/v1/realtime", realtime),
            WebSocketRoute("/realtime", realtime),
            WebSocketRoute("/v1/duplex", realtime),
            WebSocketRoute("/v1/omni", realtime),
            WebSocketRoute("/ws/duplex", realtime),
        ],
        middleware=middleware,
        exception_handlers=HANDLERS,
    )
    app.state.antiphon = state
    return app


class _Keys:
    """Refuses HTTP requests without a known key; WebSockets are refused by their own route, before the upgrade."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        wanted = scope["type"] == "http" and scope["method"] != "OPTIONS"
        wanted = wanted and path not in OPEN_PATHS and not path.startswith("/web/")
        if wanted:
            request = Request(scope)
            try:
                identify(request)
            except Unauthorized as error:
                await response_to(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _health(request: Request) -> Response:
    state: ServerState = request.app.state.antiphon
    return JSONResponse({"status": "ok", "version": __version__} | worker_health(state))


async def _ready(request: Request) -> Response:
    state: ServerState = request.app.state.antiphon
    if state.draining:
        return JSONResponse({"status": "draining", "sessions": state.num_sessions}, status_code=503)
    if state.models is None:
        return JSONResponse({"status": "loading"}, status_code=503)
    return JSONResponse({"status": "ready", "models": list(state.models.names), "sessions": state.num_sessions})


async def _metrics(request: Request) -> Response:
    state: ServerState = request.app.state.antiphon
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _listed(state: ServerState) -> list[dict[str, object]]:
    if state.models is None:
        return []
    listed: list[dict[str, object]] = [
        {"id": n, "object": "model", "created": state.started_s, "owned_by": "antiphon"}
        for n in (*state.models.names, "default")
    ]
    if watcher := state.models.video_model:
        # Whether who answers about a video sees pictures, or is told what can be read on them.
        listed = [m | ({"video": watcher.profile.sees} if m["id"] == watcher.profile.id else {}) for m in listed]
    return listed


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": _listed(request.app.state.antiphon)})


async def _model(request: Request) -> Response:
    name = request.path_params["id"]
    for entry in _listed(request.app.state.antiphon):
        if entry["id"] == name:
            return JSONResponse(entry)
    return error_response(404, f"The model '{name}' does not exist.", code="model_not_found", param="model")
