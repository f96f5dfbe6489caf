"""A WebSocket as a transport of frames."""

from __future__ import annotations

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.transports.transport import TransportClosed


class WebSocketTransport:
    """An accepted WebSocket as a transport.

    `first`: a frame that was already read, for example to detect the dialect. `receive` returns it again. The route
    that accepted the WebSocket owns it.
    """

    playback = None

    def __init__(self, websocket: WebSocket, first: str | bytes | None = None) -> None:
        self._websocket = websocket
        self._first = first

    async def receive(self) -> str | bytes | None:
        """Wait for the next frame: str for text, bytes for binary. Returns None after the client has disconnected."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def has_left(self, within_s: float) -> bool:
        """Return whether the client disconnects within `within_s` seconds. Keeps a frame that arrives for `receive`."""
        with anyio.move_on_after(within_s):
            if self._first is None:
                self._first = await self.receive()
                return self._first is None
        return False

    async def send(self, data: str | bytes) -> None:
        """Send a text frame for str, or a binary frame for bytes. Waits while the socket's send buffer is full.

        Raises TransportClosed if the client has left.
        """
        try:
            if isinstance(data, bytes):
                await self._websocket.send_bytes(data)
            else:
                await self._websocket.send_text(data)
        except (WebSocketDisconnect, RuntimeError, OSError):
            # Starlette raises RuntimeError for a socket that was already closed.
            raise TransportClosed from None

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame, without waiting for the client's. Raises TransportClosed."""
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportClosed from None
