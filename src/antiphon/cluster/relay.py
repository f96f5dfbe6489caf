"""A connection to another host on behalf of a client, as the client itself would have made it; and the relay, which
carries a client that has come to another host than its session's to the right one, frame by frame and unread.
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

# Says to a host that another one relays: it must not do so itself.
RELAYED_HEADER = "x-antiphon-relayed-by"
# How the client's connection is closed where the host has gone: it may resume at once.
CLOSE_GONE = 1012
# How long a host gets for its answer to an upgrade, in seconds.
OPEN_S = 10.0
# A host that does not answer pings for so long hangs.
PING_S, PONG_S = 2.0, 4.0
# Headers of the client's that belong to its own connection.
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
# What proxies say of a client. A server that passes a request on says it itself, whatever the client has sent.
FORWARDED_HEADERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip"})
# A Host header that is one: it has nothing that would be another part of a URL.
_HOST = re.compile(r"[\w.%:\[\]-]+", re.ASCII)


def forwarded(client: HTTPConnection) -> dict[str, str]:
    """Return the headers by which the next server knows a client: its address, as this server knows it, and its scheme.

    The address is that of the connection, or what a proxy has said of it that this server trusts.
    """
    address = {"x-forwarded-for": client.client.host} if client.client else {}
    return address | {"x-forwarded-proto": "https" if client.scope["scheme"] in ("https", "wss") else "http"}


def close_of(host: ClientConnection) -> tuple[int, str] | None:
    """Return how the host has closed this connection, which is over; None where it did not: it broke, or hung."""
    received = host.protocol.close_rcvd
    return (received.code, received.reason) if received else None


async def connect_to_host(
    client: HTTPConnection, url: str, query: str, headers: Mapping[str, str] | None = None, path: str = ""
) -> ClientConnection:
    """Open a WebSocket to the host at `url` (`http://host:port`), at `path`, or else the client's own, with this query.

    `path` is percent-encoded. The host gets the client's own headers, its key among them, the subprotocols that it
    offers, its address, and `headers`. Raises what `websockets.connect` raises: OSError, TimeoutError, and
    InvalidHandshake with the host's answer.
    """
    # The host sees the name by which the client has called this server, as it checks the origins of browsers by it.
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
