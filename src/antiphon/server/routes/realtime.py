"""The WebSocket of /v1/realtime and /v1/duplex: who comes in, with what, and to which session."""

from __future__ import annotations

import logging
import time

from starlette.websockets import WebSocket

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.bridges.base import Bridge
from antiphon.protocols.bridges.minicpmo_worker import MinicpmoWorkerBridge
from antiphon.protocols.bridges.omni import OmniBridge
from antiphon.protocols.bridges.openbmb import SUBPROTOCOL, OpenbmbBridge
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.wire import random_id
from antiphon.server.auth import bearer
from antiphon.server.errors import deny
from antiphon.server.live.handshake import YES, _by_first_frame, _turn_away, accept
from antiphon.server.live.open_wire import connection_for
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)

BRIDGES: dict[str, type[Bridge]] = {"/ws/duplex": MinicpmoWorkerBridge, "/v1/omni": OmniBridge}


async def realtime(websocket: WebSocket) -> None:
    """GET /v1/realtime, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    key = bearer(websocket.headers)
    who = state.who(key, short=True)
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    asked = websocket.query_params
    bridge = BRIDGES.get(websocket.url.path) or (OpenbmbBridge if asked.get("mode") in ("audio", "video") else None)
    duplex = asked.get("duplex") in YES or websocket.url.path == "/v1/duplex"
    resume = asked.get("resume", "")
    try:
        state.loaded()
        if bridge:
            await _bridged(state, who, websocket, bridge)
            return
        if duplex or (resume and resume not in YES):
            await _by_first_frame(state, who, websocket, duplex=duplex)
            return
        with state.admit(who):
            secret = state.secret(key)
            opening = Opening(
                model=asked.get("model", ""),
                dialect=asked.get("dialect", ""),
                intent=asked.get("intent", ""),
                beta="realtime=v1" in websocket.headers.get("openai-beta", ""),
                session=secret.session if secret else None,
            )
            token = ResumeToken() if resume else None
            wire = connection_for(state, opening, resume_token=token.renew() if token else None)
            await accept(websocket)
            try:
                wire.open()
            except RemoteProtocolError as error:
                await _turn_away(websocket, error)
                return
            await LiveRealtime(state, who, wire, WebSocketTransport(websocket), token=token).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)


async def _bridged(state: ServerState, who: str, websocket: WebSocket, dialect: type[Bridge]) -> None:
    """A connection in one of the small dialects."""
    models = state.loaded()
    voices = models.partner.profile.voices if models.partner else ()
    with state.admit(who):
        opening = Opening(model=websocket.query_params.get("model", ""))
        most = state.settings.audio.max_append_bytes
        wire = dialect(opening, state.partners, voices, random_id, most, time.monotonic)
        protocols = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in protocols else None)
        try:
            wire.open()
        except RemoteProtocolError as error:
            await _turn_away(websocket, error)
            return
        await LiveRealtime(state, who, wire, WebSocketTransport(websocket)).run()
