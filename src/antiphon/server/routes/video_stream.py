"""The WebSocket of /v1/video/chat/stream: one video session over whichever socket is attached to it (line.py)."""

from __future__ import annotations

import logging

from starlette.websockets import WebSocket

from antiphon.errors import Refused
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import bearer
from antiphon.server.errors import deny
from antiphon.server.live.handshake import YES, accept, by_resume
from antiphon.server.live.video import LiveVideo
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)


async def video_stream(websocket: WebSocket) -> None:
    """GET /v1/video/chat/stream, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    who = state.who(bearer(websocket.headers))
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    resume = websocket.query_params.get("resume", "")
    try:
        watcher = state.loaded().watcher
        if watcher is None:
            await deny(websocket, 404, "No language model is loaded.", "model_not_found")
            return
        if resume and resume not in YES:
            await by_resume(state, who, websocket)
            return
        with state.admit(who):
            await accept(websocket)
            token = ResumeToken() if resume else None
            ga = websocket.query_params.get("events") == "ga"
            await LiveVideo(WebSocketTransport(websocket), state, who, watcher, token, ga=ga).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)
