"""The clients of a door: what carries their frames, and where they belong at a host."""

from __future__ import annotations

from typing import Protocol

from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from antiphon.protocols.opening import TRUE_VALUES
from antiphon.transports.paths import raw_path
from antiphon.transports.websocket import WebSocketTransport


class DoorClient(Protocol):
    """One client of a door. One task receives and one sends.

    - `connection`: what it has opened; hosts get its headers.
    - `path` (percent-encoded), `query`: of the WebSocket that a host is to serve for it.
    - `resumes_itself`: it takes its session up again by itself, and is only passed on.
    """

    @property
    def connection(self) -> HTTPConnection: ...

    @property
    def path(self) -> str: ...

    @property
    def query(self) -> QueryParams: ...

    @property
    def resumes_itself(self) -> bool: ...

    async def accept(self, subprotocol: str | None) -> None:
        """A host has taken the session."""
        ...

    async def receive(self) -> str | bytes | None:
        """Wait for the next frame for the host. None: the client has left."""
        ...

    async def send(self, frame: str | bytes) -> None:
        """Take a frame of the host's session, waiting while the client does not read. Raises TransportClosed."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection, in WebSocket's codes. Raises TransportClosed if the client has closed it first."""
        ...


class WebSocketClient:
    """A client on a WebSocket, as a DoorClient. It is accepted once a host has taken its session."""

    def __init__(self, websocket: WebSocket) -> None:
        self.connection = self._websocket = websocket
        self.path, self.query = raw_path(websocket.scope), websocket.query_params
        # It asks for it, or its dialect always does.
        asks = bool(self.query.get("resume")) or self.query.get("duplex") in TRUE_VALUES
        self.resumes_itself = asks or self.path == "/v1/duplex"
        self._transport = WebSocketTransport(websocket)

    async def accept(self, subprotocol: str | None) -> None:
        """As DoorClient says."""
        await self._websocket.accept(subprotocol=subprotocol)

    async def receive(self) -> str | bytes | None:
        """As DoorClient says."""
        return await self._transport.receive()

    async def send(self, frame: str | bytes) -> None:
        """As DoorClient says."""
        await self._transport.send(frame)

    async def close(self, code: int, reason: str) -> None:
        """As DoorClient says."""
        await self._transport.close(code, reason)
