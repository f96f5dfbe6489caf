"""The WebSockets of /v1/realtime, /v1/duplex and the bridges."""

from __future__ import annotations

import time

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.bridges.base import Bridge
from antiphon.protocols.bridges.minicpmo_worker import MinicpmoWorkerBridge
from antiphon.protocols.bridges.omni import OmniBridge
from antiphon.protocols.bridges.openbmb import SUBPROTOCOL, OpenbmbBridge
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.wire import random_id
from antiphon.server.auth import bearer, identify
from antiphon.server.live.handshake import (
    TRUE_VALUES,
    accept,
    names_session,
    refuse,
    serve_by_first_frame,
    wants_token,
)
from antiphon.server.live.open_wire import connection_for
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport

# Path -> the dialect spoken there. OpenbmbBridge is chosen by `?mode=` instead.
BRIDGES: dict[str, type[Bridge]] = {"/ws/duplex": MinicpmoWorkerBridge, "/v1/omni": OmniBridge}


async def realtime(websocket: WebSocket) -> None:
    """Serve one WebSocket of /v1/realtime, /v1/duplex or a bridge, until it is closed.

    Without an admissible key, or while models load, the upgrade is refused over HTTP (`server/errors.py`).
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket, short=True)
    state.loaded()
    query = websocket.query_params
    bridge = BRIDGES.get(websocket.url.path) or (OpenbmbBridge if query.get("mode") in ("audio", "video") else None)
    duplex = query.get("duplex") in TRUE_VALUES or websocket.url.path == "/v1/duplex"
    if bridge:
        await _serve_bridge(state, caller, websocket, bridge)
    elif duplex or names_session(websocket):
        await serve_by_first_frame(state, caller, websocket, duplex=duplex)
    else:
        await _serve_realtime(state, caller, websocket)


async def _serve_realtime(state: ServerState, caller: str, websocket: WebSocket) -> None:
    """Serve a new session of /v1/realtime; its first frames say which dialect it speaks."""
    query = websocket.query_params
    with state.admit(caller):
        secret = state.secret(bearer(websocket.headers))
        opening = Opening(
            model=query.get("model", ""),
            dialect=query.get("dialect", ""),
            intent=query.get("intent", ""),
            beta="realtime=v1" in websocket.headers.get("openai-beta", ""),
            session=secret.session if secret else None,
        )
        token = ResumeToken() if wants_token(websocket) else None
        wire = connection_for(state, opening, resume_token=token.renew() if token else None)
        await accept(websocket)
        try:
            wire.open()
        except RemoteProtocolError as error:
            await refuse(websocket, error)
            return
        await LiveRealtime(state, caller, wire, WebSocketTransport(websocket), token=token).run()


async def _serve_bridge(state: ServerState, caller: str, websocket: WebSocket, dialect: type[Bridge]) -> None:
    """Serve a new session in the dialect of another server."""
    model = state.loaded().conversation_model
    with state.admit(caller):
        opening = Opening(model=websocket.query_params.get("model", ""))
        max_append_bytes = state.settings.audio.max_append_bytes
        voices = model.profile.voices if model else ()
        wire = dialect(opening, state.conversation_names, voices, random_id, max_append_bytes, time.monotonic)
        protocols = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in protocols else None)
        try:
            wire.open()
        except RemoteProtocolError as error:
            await refuse(websocket, error)
            return
        await LiveRealtime(state, caller, wire, WebSocketTransport(websocket)).run()
