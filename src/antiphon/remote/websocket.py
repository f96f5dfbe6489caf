"""WebSockets to other servers: opened without redirects, closed at once, with errors of this package."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, WebSocketException

from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError
from antiphon.remote.breaker import retry_after_s
from antiphon.remote.http import CONNECT_TIMEOUT_S

# Bound of one received message, in bytes.
MAX_MESSAGE_BYTES = 16 << 20
# Messages that wait for their reader. When there are more, the socket is not read, and the server has to wait.
MAX_WAITING = 16
# Interval of pings, and the time without a pong after which the connection counts as broken, in seconds.
PING_S, PING_TIMEOUT_S = 10.0, 20.0
# Seconds for which a connection that is closed waits for the server's closing frame.
CLOSE_TIMEOUT_S = 1.0


class ConnectHere(connect):
    """Opens a WebSocket, and follows no redirect: no server may send a session's audio to another one."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Return the error itself instead of the new address."""
        return exc


async def open_websocket(
    server: str,
    url: str,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | None = None,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> ClientConnection:
    """Open a WebSocket within CONNECT_TIMEOUT_S.

    Args:
        server: The server's name in errors. They do not name the URL, because clients see them.
        url: A ws:// or wss:// URL.
        headers: Headers of the upgrade request, such as the key.
        tls: The certificates for wss://; None: those of the system.
        max_bytes: The bound of one received message.

    Raises:
        ModelError: The server does not accept the key, or has no such endpoint.
        Refused: It has no room.
        RemoteError: It cannot be reached, or is not a server of WebSockets.
    """
    try:
        return await ConnectHere(
            url,
            ssl=tls if url.startswith("wss:") else None,
            additional_headers=headers,
            max_size=max_bytes,
            max_queue=MAX_WAITING,
            compression=None,
            open_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_S,
            ping_timeout=PING_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            proxy=None,
        )
    except InvalidStatus as error:
        raise _refusal(server, error) from None
    except TimeoutError:
        raise RemoteError(f"{server} opens no WebSocket within {CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, InvalidHandshake, InvalidMessage, EOFError) as error:
        raise RemoteError(f"{server} opens no WebSocket: {error or type(error).__name__}") from None


def _refusal(server: str, error: InvalidStatus) -> AntiphonError:
    status = error.response.status_code
    if status in (401, 403):
        return ModelError(f"{server} does not accept the key (status {status})")
    if status in (429, 503):
        return Refused("The model's server has no room.", retry_after_s(error.response.headers.get("Retry-After", "")))
    if status in (404, 405):
        return ModelError(f"{server} has no WebSocket at this path (status {status})")
    what = ", a redirect, which is not followed" if 300 <= status < 400 else ""
    return RemoteError(f"{server} refuses a WebSocket with status {status}{what}")


def broken(server: str, error: WebSocketException | OSError) -> RemoteError:
    """Return the error of a connection that broke off."""
    if isinstance(error, ConnectionClosed) and error.rcvd:
        said = f" ({error.rcvd.code} {error.rcvd.reason[:200]})".replace(" )", ")")
        return RemoteError(f"{server} closed the connection{said}")
    return RemoteError(f"{server} broke off the connection")


def abort(socket: ClientConnection) -> None:
    """Close a connection at once, which ends the work at the server. Does not wait for the server."""
    socket.transport.abort()
