"""The WebSocket of /v1/realtime."""

from __future__ import annotations

import logging

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.realtime import Opening
from antiphon.server.auth import bearer
from antiphon.server.connection import CLOSE_POLICY, Connection, Gone
from antiphon.server.errors import deny
from antiphon.server.secrets import connection_for
from antiphon.server.state import ServerState

log = logging.getLogger(__name__)


class _Socket:
    """A WebSocket as a transport; see server/connection.py."""

    playback = None

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def receive(self) -> str | bytes | None:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, frame: str) -> None:
        try:
            await self._websocket.send_text(frame)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise Gone from None

    async def close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise Gone from None


async def realtime(websocket: WebSocket) -> None:
    """GET /v1/realtime, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    key = bearer(websocket.headers)
    who = state.who(key, short=True)
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    try:
        state.loaded()
        with state.admit(who):
            secret = state.secret(key)
            asked = websocket.query_params
            opening = Opening(
                model=asked.get("model", ""),
                dialect=asked.get("dialect", ""),
                intent=asked.get("intent", ""),
                beta="realtime=v1" in websocket.headers.get("openai-beta", ""),
                session=secret.session if secret else None,
            )
            wire = connection_for(state, opening)
            protocols = websocket.scope.get("subprotocols", [])
            await websocket.accept(subprotocol="realtime" if "realtime" in protocols else None)
            try:
                wire.open()
            except RemoteProtocolError as error:
                await _turn_away(websocket, error)
                return
            await Connection(state, who, wire, _Socket(websocket)).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)


async def _turn_away(websocket: WebSocket, error: RemoteProtocolError) -> None:
    body = {"type": "invalid_request_error", "code": error.code, "message": error.message, "param": error.param}
    frame = {"type": "error", "event_id": "event_0", "error": body}
    try:
        await websocket.send_text(msgspec.json.encode(frame).decode())
        await websocket.close(CLOSE_POLICY, error.code)
    except (WebSocketDisconnect, RuntimeError):
        log.info("a client left before it was turned away")
