"""The WebSocket of /v1/video/chat/stream."""

from __future__ import annotations

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import identify
from antiphon.server.live.handshake import accept, check_query, names_session, serve_resumed, wants_token
from antiphon.server.live.video import LiveVideo
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport


async def video_stream(websocket: WebSocket) -> None:
    """Serve one video stream, new or resumed, until it is closed.

    Without a known key or a video model, or while models load, the upgrade is refused over HTTP (`server/errors.py`).
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    model = state.loaded().video_model
    if model is None:
        raise RemoteProtocolError("model_not_found", "No language model is loaded.")
    check_query(websocket.query_params)
    if names_session(websocket):
        await serve_resumed(state, caller, websocket)
        return
    with state.admission.admit(caller, "video"):
        await accept(websocket)
        token = ResumeToken() if wants_token(websocket) else None
        ga = websocket.query_params.get("events") == "ga"
        await LiveVideo(WebSocketTransport(websocket), state, caller, model, token, ga=ga).run()
