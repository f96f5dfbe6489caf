"""A WebSocket as a transport."""

from __future__ import annotations

from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.protocols.wire import BinaryFrame
from antiphon.transports.transport import TransportClosed


class WebSocketTransport:
    """A WebSocket as a transport; see server/transport.py. `first`: a frame that was read already."""

    playback = None

    def __init__(self, websocket: WebSocket, first: str | bytes | None = None) -> None:
        self._websocket = websocket
        self._first = first

    async def receive(self) -> str | bytes | None:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, frame: str) -> None:
        try:
            if isinstance(frame, BinaryFrame):
                await self._websocket.send_bytes(frame.data)
            else:
                await self._websocket.send_text(frame)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportClosed from None

    async def close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportClosed from None
