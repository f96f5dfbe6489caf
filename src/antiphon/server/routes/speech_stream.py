"""The WebSocket of /v1/audio/speech/stream."""

from __future__ import annotations

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import identify
from antiphon.server.live.handshake import check_query, names_session, serve_resumed, wants_token
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport


async def speech_stream(websocket: WebSocket) -> None:
    """Serve one speech stream, new or resumed, until it is closed.

    Without a known key or a synthesizer, or while models load, the upgrade is refused over HTTP (`server/errors.py`).
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    if state.loaded().synthesizer is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.")
    check_query(websocket.query_params)
    if names_session(websocket):
        await serve_resumed(state, caller, websocket)
        return
    with state.admission.admit(caller, "speech"):
        await websocket.accept()
        token = ResumeToken() if wants_token(websocket) else None
        await LiveSpeech(WebSocketTransport(websocket), state, caller, token).run()
