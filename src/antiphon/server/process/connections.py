"""Bounds the TCP connections of a server: how many there are, and how long a request's head may take to arrive.

A connection costs a descriptor from the moment it is accepted, long before a key is shown, and uvicorn lets it be
silent for ever. These are uvicorn's protocols with a place that a connection holds until it is closed, across the
upgrade to a WebSocket. They know nothing of requests and sessions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState as UvicornState
from websockets.frames import CloseCode
from websockets.http11 import Request

log = logging.getLogger(__name__)

# Connections beside those of the sessions: a second one for each client, and requests that hold no place.
SPARE_CONNECTIONS = 256
# Descriptors that a process has for something else than connections: files, codecs, the sockets of calls.
OTHER_DESCRIPTORS = 0.5
# Failures to accept are logged at most so often; asyncio itself logs a traceback every second.
LOG_EVERY_S = 60.0
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# The ASGI extension by which the application limits a WebSocket's first message.
_FIRST_MESSAGE = "antiphon.first_message"


def _refusal(status: bytes, kind: bytes, code: bytes, message: bytes, more: bytes = b"") -> bytes:
    """A whole answer, before which no request has reached the application."""
    body = b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}' % (message, kind, code)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


REFUSAL = _refusal(
    b"503 Service Unavailable",
    b"server_error",
    b"too_many_connections",
    b"Too many connections.",
    b"retry-after: 10\r\n",
)
BAD_UPGRADE = _refusal(
    b"400 Bad Request",
    b"invalid_request_error",
    b"invalid_upgrade",
    b"An upgrade to a WebSocket has at most 128 headers of at most 8,190 bytes each, and a URL of at most 8,190.",
)


def connection_limit(max_sessions: int) -> int:
    """Return how many connections a server of `max_sessions` sessions holds at once.

    Two for each session and SPARE_CONNECTIONS, but at most half of the descriptors that the process may open
    (RLIMIT_NOFILE), so that sessions never lack one for a file or a call.
    """
    wanted = 2 * max_sessions + SPARE_CONNECTIONS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if descriptors == resource.RLIM_INFINITY else min(wanted, int(descriptors * OTHER_DESCRIPTORS))


class Connections:
    """Counts the open connections of a server, in all and by the client's address. For one event loop.

    `max_per_address` 0: half of `max_total`. `on_refused`: called for each connection that finds no place.
    """

    def __init__(self, max_total: int, max_per_address: int, on_refused: Callable[[], None]) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address or max(1, max_total // 2)
        self._on_refused = on_refused
        self._by_address: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """How many connections hold a place."""
        return self._by_address.total()

    def take(self, address: str) -> bool:
        """Take a place for a connection from `address`; return False, and count a refusal, where there is none."""
        if self.num_open >= self._max_total or self._by_address[address] >= self._max_per_address:
            self._on_refused()
            return False
        self._by_address[address] += 1
        return True

    def give_back(self, address: str) -> None:
        """Give back the place of a connection that is closed."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration with its HTTP/1.1 and WebSocket protocols bounded by `connections`.

    `head_timeout_s`: seconds in which the whole head of a request has to arrive, counted from the accept, or from its
    first byte on a connection that has served a request. A connection that takes longer is closed.
    """

    def __init__(self, app: Any, connections: Connections, head_timeout_s: float, **options: Any) -> None:
        super().__init__(app, http=_BoundedHttp, ws=_BoundedWebSocket, **options)
        self.connections = connections
        self.head_timeout_s = head_timeout_s


class _BoundedHttp(H11Protocol):
    def __init__(
        self,
        config: BoundedConfig,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections, self._head_timeout_s = config.connections, config.head_timeout_s
        self._has_place = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._has_place = self._connections.take(_address(self.client))
        if not self._has_place:
            transport.write(REFUSAL)
            transport.close()
            return
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        # Not called for a connection that became a WebSocket, whose protocol gives the place back.
        super().connection_lost(exc)
        self._stop_timer()
        if self._has_place:
            self._connections.give_back(_address(self.client))

    def _time_head(self) -> None:
        """Start the timer where a head is still to come whole, and stop it where it has come."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    # How many bytes may still come before the first message is whole; None: any number, and after that message.
    _bytes_left: int | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        # The application has not run yet. A handshake that was refused has no scope.
        if not self.handshake_complete:
            self.scope["extensions"][_FIRST_MESSAGE] = {"limit": self._limit}

    def _limit(self, max_bytes: int) -> None:
        self._bytes_left = max_bytes

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Its parser takes less than that of HTTP before it. It says nothing, and waits for the client to leave.
            self.transport.write(BAD_UPGRADE)
            self.transport.close()
            return
        if self._bytes_left is None:
            return
        self._bytes_left -= len(data)
        if self._bytes_left < 0 and not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, "first_event_too_large")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        self._bytes_left = None
        super().send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        assert isinstance(self.config, BoundedConfig)
        self.config.connections.give_back(_address(self.client))


def limit_first_message(scope: Scope, max_bytes: int) -> None:
    """Close the WebSocket of `scope` with 1009 once more than `max_bytes` have come and no whole message.

    For one whose first message is known to be small. Later messages are bounded by `ws_max_size`, as without this. Does
    nothing on a server that is not configured by a BoundedConfig.
    """
    if extension := scope.get("extensions", {}).get(_FIRST_MESSAGE):
        extension["limit"](max_bytes)


def _address(client: tuple[str, int] | None) -> str:
    return client[0] if client else ""


def log_failed_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` log a line a minute, without a traceback, while it cannot accept for want of descriptors or memory.

    asyncio tries again every second by itself. What else fails in the loop is logged as before.
    """
    last_s = -LOG_EVERY_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_s
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in NO_DESCRIPTORS:
            loop.default_exception_handler(context)
        elif time.monotonic() >= last_s + LOG_EVERY_S:
            last_s = time.monotonic()
            log.warning("no connection can be accepted at the moment: %s", error.strerror)

    loop.set_exception_handler(handle)
