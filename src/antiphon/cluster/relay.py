"""Opens connections to other hosts on behalf of a client, and relays a client to the owner of its session.

A client may reach a host that does not own its session. The relay then forwards the client's frames to the owner
without reading them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import anyio
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from antiphon.transports.paths import raw_path

# Marks a connection as relayed: the receiving host must not relay it again.
RELAYED_HEADER = "x-antiphon-relayed-by"
# Close code for the client if the host is lost; the client may resume at once.
CLOSE_GONE = 1012
# Timeout of a host's answer to an upgrade, in seconds.
OPEN_S = 10.0
# Interval of pings to a host, and the timeout of a pong, in seconds. After the timeout the host counts as hanging.
PING_S, PONG_S = 2.0, 4.0
# Headers that belong to the client's own connection and are not forwarded.
OWN_HEADERS = frozenset(
    {
        b"host",
        b"connection",
        b"upgrade",
        b"content-length",
        b"content-type",
        b"transfer-encoding",
        b"expect",
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
    }
)
# Headers in which proxies describe the client. The server that forwards a request replaces the client's values.
FORWARDED_HEADERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip"})
# Matches a valid Host header, without characters that would begin another part of a URL.
_HOST = re.compile(r"[\w.%:\[\]-]+", re.ASCII)


def forwarded(client: HTTPConnection) -> dict[str, str]:
    """Return the headers that describe a client to the next server: its address and scheme, as this server knows them.

    The address is that of the connection, or the address that a trusted proxy reported.
    """
    address = {"x-forwarded-for": client.client.host} if client.client else {}
    return address | {"x-forwarded-proto": "https" if client.scope["scheme"] in ("https", "wss") else "http"}


def close_of(host: ClientConnection) -> tuple[int, str] | None:
    """Return the host's close code and reason; None if the connection broke or the host hung, so that none was sent."""
    received = host.protocol.close_rcvd
    return (received.code, received.reason) if received else None


async def connect_to_host(
    client: HTTPConnection, url: str, query: str, headers: Mapping[str, str] | None = None, path: str = ""
) -> ClientConnection:
    """Open a WebSocket to the host at `url` (`http://host:port`) with this query.

    `path`: the percent-encoded path; "" for the client's own path. The host gets the client's headers, which include
    its key, the subprotocols that the client offers, its address, and `headers`. Raises what `websockets.connect`
    raises: OSError, TimeoutError, and InvalidHandshake with the host's response.
    """
    # Forward the client's Host header: the host checks browsers' origins against it.
    address = urlsplit(url)
    named = client.headers.get("host", "")
    named = named if _HOST.fullmatch(named) else address.netloc
    given = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in client.scope["headers"]
        if name not in OWN_HEADERS | FORWARDED_HEADERS
    ]
    offered: Sequence[str] = client.scope.get("subprotocols", [])
    return await connect(
        f"ws://{named}{path or raw_path(client.scope)}?{query}",
        host=address.hostname,
        port=address.port or 80,
        additional_headers=[*given, *forwarded(client).items(), *(headers or {}).items()],
        subprotocols=list(offered) or None,  # type: ignore[arg-type]
        compression=None,
        max_size=None,
        open_timeout=OPEN_S,
        close_timeout=1.0,
        ping_interval=PING_S,
        ping_timeout=PONG_S,
        user_agent_header=None,
        proxy=None,
    )


async def open_relay(websocket: WebSocket, owner_url: str, host_name: str) -> ClientConnection:
    """Open a connection to the session's owner on behalf of the client. Raises what `connect_to_host` raises."""
    return await connect_to_host(websocket, owner_url, websocket.url.query, {RELAYED_HEADER: host_name})


async def relay(websocket: WebSocket, owner: ClientConnection, first: str | bytes) -> None:
    """Send the client's `first` frame to the owner, then forward frames in both directions until either side closes.

    The client gets the owner's close code, or 1012 if the owner is lost.
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
            # The task that reads from the owner notices the loss too.
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
