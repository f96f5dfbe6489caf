"""The WebSocket of /v1/audio/speech/stream."""

from __future__ import annotations

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import identify
from antiphon.server.live.handshake import by_resume, resume_asked, wants_token
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport


async def speech_stream(websocket: WebSocket) -> None:
    """Serve one speech session. What is refused before the upgrade is answered over HTTP (server/errors.py)."""
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    if state.loaded().synthesizer is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.")
    if resume_asked(websocket):
        await by_resume(state, caller, websocket)
        return
    with state.admit(caller):
        await websocket.accept()
        token = ResumeToken() if wants_token(websocket) else None
        await LiveSpeech(WebSocketTransport(websocket), state, caller, token).run()
