"""Carries a client to the host that has its session, frame by frame and unread, where it has come to another one."""

from __future__ import annotations

from contextlib import suppress

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from antiphon.cluster.connect import close_of, connect_to_host

# Says to a host that another one relays: it must not do so itself.
RELAYED_HEADER = "x-antiphon-relayed-by"
# How the client's connection is closed where the host has gone: it may resume at once.
CLOSE_GONE = 1012


async def open_relay(websocket: WebSocket, owner_url: str, host_name: str) -> ClientConnection:
    """Open the connection to the owner, as the client's own. Raises what `connect_to_host` raises."""
    return await connect_to_host(websocket, owner_url, websocket.url.query, {RELAYED_HEADER: host_name})


async def relay(websocket: WebSocket, owner: ClientConnection, first: str | bytes) -> None:
    """Send the owner the client's `first` frame, then carry all frames both ways until either side closes.

    The client is closed as the owner has closed, and with 1012 where the owner is lost.
    """
    client_left = False

    async def read_client() -> None:
        nonlocal client_left
        try:
            await owner.send(first)
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                text = message.get("text")
                await owner.send(text if text is not None else message.get("bytes") or b"")
            client_left = True
            await owner.close()
        except ConnectionClosed:
            # Its reader sees that, too.
            return

    async with anyio.create_task_group() as group:
        group.start_soon(read_client)
        try:
            async for frame in owner:
                if isinstance(frame, bytes):
                    await websocket.send_bytes(frame)
                else:
                    await websocket.send_text(frame)
        except ConnectionClosed:
            pass
        except (WebSocketDisconnect, RuntimeError, OSError):
            client_left = True
        group.cancel_scope.cancel()
    with anyio.CancelScope(shield=True):
        await owner.close()
    if not client_left:
        code, reason = close_of(owner) or (CLOSE_GONE, "host_lost")
        with suppress(WebSocketDisconnect, RuntimeError, OSError):
            await websocket.close(code, reason)
