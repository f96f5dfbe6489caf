"""The WebSocket of /v1/audio/speech/stream: one speech session over whichever socket is attached to it (line.py)."""

from __future__ import annotations

import logging

from starlette.websockets import WebSocket

from antiphon.errors import Refused
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import bearer
from antiphon.server.errors import deny
from antiphon.server.live.handshake import YES, by_resume
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)


async def speech_stream(websocket: WebSocket) -> None:
    """GET /v1/audio/speech/stream, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    who = state.who(bearer(websocket.headers))
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    resume = websocket.query_params.get("resume", "")
    try:
        if state.loaded().speaks is None:
            await deny(websocket, 404, "No speech synthesizer is loaded.", "model_not_found")
            return
        if resume and resume not in YES:
            await by_resume(state, who, websocket)
            return
        with state.admit(who):
            await websocket.accept()
            await LiveSpeech(WebSocketTransport(websocket), state, who, ResumeToken() if resume else None).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)
