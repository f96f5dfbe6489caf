"""Limits the number of a server's TCP connections, the time that a TLS handshake and a request's head take, and the
silence of WebSockets.

A connection takes a file descriptor when it is accepted, long before it shows a key. uvicorn has no timeout for silent
connections. The classes here extend uvicorn's protocols. Each connection holds a place until it is closed, even after
the upgrade to a WebSocket. These classes know nothing about requests and sessions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from antiphon.transports.http import LineLimit

log = logging.getLogger(__name__)

# Number of connections for requests without a place. They are in addition to the two connections for each session.
SPARE_CONNECTIONS = 256
# Fraction of the file descriptors that connections may use. The rest is for files, codecs and the sockets of calls.
OTHER_DESCRIPTORS = 0.5
# Minimum interval between log lines about failed accepts. asyncio itself would log a traceback every second.
LOG_EVERY_S = 60.0
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# A client that shows no sign of life for SILENCE_S is considered gone. A client with unread data gets more time: as
# long as the slowest client (mu-law in base64) takes to read that data, up to MAX_SILENCES times SILENCE_S.
SILENCE_S, MAX_SILENCES, SLOWEST_BYTES_PER_S = 60.0, 5, 10_000
# Interval of pings. They also keep proxies from closing idle connections.
PING_INTERVAL_S = 20.0
# Seconds that a client has to answer the end of TLS before its connection is closed.
TLS_CLOSE_S = 5.0
# The ASGI extension with which the application limits a WebSocket's first message.
_FIRST_MESSAGE = "antiphon.first_message"


def _body(kind: bytes, code: bytes, message: bytes) -> bytes:
    return b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}' % (message, kind, code)


def _refusal(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    """Return a complete HTTP response, which is sent without the application."""
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


# The body of a refusal.
TOO_MANY = _body(b"server_error", b"too_many_connections", b"Too many connections.")
REFUSAL = _refusal(b"503 Service Unavailable", TOO_MANY, b"retry-after: 10\r\n")
BAD_UPGRADE = _refusal(
    b"400 Bad Request",
    _body(
        b"invalid_request_error",
        b"invalid_upgrade",
        b"An upgrade to a WebSocket has at most 128 headers of at most 8,190 bytes each, and a URL of at most 8,190.",
    ),
)


def connection_limit(max_sessions: int) -> int:
    """Return the maximum number of connections of a server with `max_sessions` sessions.

    The limit is two connections for each session plus SPARE_CONNECTIONS. But connections get at most the fraction
    OTHER_DESCRIPTORS of the descriptors that the process may open (RLIMIT_NOFILE), so that descriptors are always left
    for the sessions' files and calls.
    """
    wanted = 2 * max_sessions + SPARE_CONNECTIONS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if descriptors == resource.RLIM_INFINITY else min(wanted, int(descriptors * OTHER_DESCRIPTORS))


class Connections:
    """Counts the open connections of a server, in total and by the client's address. For one event loop.

    If `max_per_address` is 0, the limit for each address is half of `max_total`. `on_refused` is called for each
    refused connection. `proxies` are addresses whose connections carry many clients. Each of these clients may have
    `max_per_address` requests under way.
    """

    def __init__(
        self, max_total: int, max_per_address: int, on_refused: Callable[[], None], proxies: Container[str] = ()
    ) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address or max(1, max_total // 2)
        self._on_refused = on_refused
        self._proxies = proxies
        self._by_address: Counter[str] = Counter()
        self._forwarded: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Number of connections that hold a place."""
        return self._by_address.total()

    def take(self, address: str) -> bool:
        """Take a place for a connection from `address`. If none is left, count a refusal and return False."""
        is_full = self.num_open >= self._max_total
        return self._take(self._by_address, address, is_full or self._has_all(self._by_address, address))

    def give_back(self, address: str) -> None:
        """Release the place of a closed connection."""
        _give_back(self._by_address, address)

    def take_forwarded(self, address: str) -> bool:
        """Take a place for a request of a client behind a proxy. If none is left, count a refusal and return False."""
        return self._take(self._forwarded, address, self._has_all(self._forwarded, address))

    def give_back_forwarded(self, address: str) -> None:
        """Release the place of a request or WebSocket that has ended."""
        _give_back(self._forwarded, address)

    def _has_all(self, held: Counter[str], address: str) -> bool:
        """Return whether an address has reached its limit. A proxy's address, which has many clients, has no limit."""
        return held[address] >= self._max_per_address and address not in self._proxies

    def _take(self, held: Counter[str], address: str, is_full: bool) -> bool:
        if is_full:
            self._on_refused()
            return False
        held[address] += 1
        return True


def _give_back(held: Counter[str], address: str) -> None:
    held[address] -= 1
    if not held[address]:
        del held[address]


class LifeSigns:
    """Tracks the signs of life of one client. It shows life by sending bytes, and by reading again after a pause.

    Pongs alone do not suffice. A ping waits behind unread data, and a client that reads audio at the speed of playback
    may be minutes behind. Pure: the caller passes the time.
    """

    def __init__(self, now_s: float, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._last_s = now_s
        self._sent = self._read = 0

    def seen(self, now_s: float) -> None:
        """Record a sign of life at `now_s`."""
        self._last_s = max(self._last_s, now_s)

    def sent(self, num_bytes: int) -> None:
        """Count bytes that were sent to the client."""
        self._sent += num_bytes

    @property
    def ping(self) -> bytes:
        """The payload of a ping that is sent now. The pong repeats it, which shows how much the client had read."""
        return struct.pack("!Q", self._sent)

    def pong(self, payload: bytes) -> None:
        """Record how much the client has read, from a pong's payload. Ignores payloads that `ping` did not make."""
        if len(payload) == 8:
            self._read = min(self._sent, max(self._read, struct.unpack("!Q", payload)[0]))

    @property
    def gone_s(self) -> float:
        """The time, on the clock of `now_s`, at which the client counts as gone if it shows no further sign of life."""
        unread_s = (self._sent - self._read) / SLOWEST_BYTES_PER_S
        return self._last_s + min(max(self._silence_s, unread_s), MAX_SILENCES * self._silence_s)


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration with its HTTP/1.1 and WebSocket protocols limited by `connections`.

    `head_timeout_s` is the timeout for the whole head of a request, counted from the accept, or from the head's first
    byte on a connection that has already served a request. It is also the timeout of a TLS handshake. `silence_s` is
    the time after which a WebSocket without a sign of life is closed. Pings are sent every `ping_interval_s`. `tls`
    returns the context of each handshake; None: no TLS.
    """

    def __init__(
        self,
        app: Any,
        connections: Connections,
        head_timeout_s: float,
        *,
        silence_s: float = SILENCE_S,
        ping_interval_s: float = PING_INTERVAL_S,
        tls: Callable[[], ssl.SSLContext] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            app,
            http=_TlsHandshake if tls else _BoundedHttp,
            ws=_BoundedWebSocket,
            proxy_headers=False,
            ws_ping_interval=ping_interval_s,
            **options,
        )
        self.connections = connections
        self.head_timeout_s = head_timeout_s
        self.silence_s = silence_s
        self.tls = tls


class _TlsHandshake(asyncio.Protocol):
    """A connection until its TLS handshake is complete. Then `_BoundedHttp` takes it over.

    If asyncio's server did the handshake, the connection would have no place and no other limit until its end.
    """

    transport: asyncio.Transport
    _failures = LineLimit(time.monotonic)

    def __init__(self, config: BoundedConfig, server_state: ServerState, **uvicorns: Any) -> None:
        self._config, self._open = config, server_state.connections
        self._make = partial(_BoundedHttp, config=config, server_state=server_state, **uvicorns)
        # What the client sent directly after its handshake.
        self._early = list[bytes]()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.pause_reading()
        address = _address(get_remote_addr(transport))
        if not self._config.connections.take(address):
            transport.abort()
            return
        # uvicorn ends the connections in this set when it stops.
        self._open.add(self)  # type: ignore[arg-type]
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(address))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def shutdown(self) -> None:
        """End the connection, for uvicorn."""
        self.transport.abort()

    async def _shake_hands(self, address: str) -> None:
        assert self._config.tls
        loop, limit_s = asyncio.get_running_loop(), self._config.head_timeout_s
        try:
            transport = await loop.start_tls(
                self.transport,
                self,
                self._config.tls(),
                server_side=True,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )
        except OSError as error:
            # Also what OpenSSL refuses, as from a client that does not trust the certificate or speaks plain HTTP.
            if (unlogged := self._failures.admit()) is not None:
                log.info("a TLS handshake failed: %s address=%s unlogged=%d", error, address, unlogged)
            return
        finally:
            self._open.discard(self)
            self._config.connections.give_back(address)
        # None if the connection was lost at the same moment.
        if transport:
            http = self._make()
            transport.set_protocol(http)
            http.connection_made(transport)
            if self._early:
                http.data_received(b"".join(self._early))


class _BoundedHttp(H11Protocol):
    def __init__(self, config: BoundedConfig, **uvicorns: Any) -> None:
        super().__init__(config, **uvicorns)
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
        # Not called for a connection that became a WebSocket: _BoundedWebSocket releases its place.
        super().connection_lost(exc)
        self._stop_timer()
        if self._has_place:
            self._connections.give_back(_address(self.client))

    def _time_head(self) -> None:
        """Start the timer if the head is incomplete, or stop it if the head is complete."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    # Bytes that may still arrive before the first message is complete. None if there is no limit, or after that
    # message.
    _bytes_left: int | None = None
    _life: LifeSigns

    def __init__(self, config: BoundedConfig, **uvicorns: Any) -> None:
        super().__init__(config, **uvicorns)
        self._life = LifeSigns(self.loop.time(), config.silence_s)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        # The handshake was refused before the application ran, so it has no scope.
        if not self.handshake_complete:
            self.scope["extensions"][_FIRST_MESSAGE] = {"limit": self._limit}

    def _limit(self, max_bytes: int) -> None:
        self._bytes_left = max_bytes

    def data_received(self, data: bytes) -> None:
        self._life.seen(self.loop.time())
        super().data_received(data)
        if self.conn.handshake_exc and not self.handshake_initiated and not self.transport.is_closing():
            # websockets' parser accepts smaller heads than h11. It sends no error, and waits until the client leaves.
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

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.send":
            self._life.sent(len(message.get("bytes") or message.get("text") or b""))

    def resume_writing(self) -> None:
        # The client reads again: its TCP stack accepts bytes that the transport had buffered.
        self._life.seen(self.loop.time())
        super().resume_writing()

    def handle_pong(self, event: Frame) -> None:
        self._life.pong(bytes(event.data))

    def start_keepalive(self) -> None:
        # The time that the application takes to accept does not count as silence of the client.
        self._life.seen(self.loop.time())
        super().start_keepalive()

    def schedule_ping(self) -> None:
        # Wakes earlier than the next ping if the client counts as gone before it.
        now_s = self.loop.time()
        wait_s = min(self.config.ws_ping_interval or PING_INTERVAL_S, max(0.0, self._life.gone_s - now_s))
        self.ping_timer = self.loop.call_later(wait_s, self.send_keepalive_ping)

    def send_keepalive_ping(self) -> None:
        """Send a ping, or close the connection if the client is gone.

        uvicorn's own method waits for the pong to each ping. Its close waits until the system's timeout if the client
        reads nothing.
        """
        now_s = self.loop.time()
        if self.read_paused and self.writable.is_set():
            # Reading is paused until the application takes a message, so the client's later bytes cannot be seen.
            self._life.seen(now_s)
        if now_s >= self._life.gone_s:
            if not self.close_sent and not self.transport.is_closing():
                self.conn.fail(CloseCode.GOING_AWAY, "client_silent")
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.close_sent = True
                self.transport.close()
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            return
        if not self.close_sent and not self.transport.is_closing():
            self.conn.send_ping(self._life.ping)
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.schedule_ping()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        assert isinstance(self.config, BoundedConfig)
        self.config.connections.give_back(_address(self.client))


def limit_first_message(scope: Scope, max_bytes: int) -> None:
    """Close the WebSocket of `scope` with 1009 if more than `max_bytes` arrive before the first message is complete.

    Use it for a WebSocket whose first message has to be small. `ws_max_size` still limits later messages. Does nothing
    on a server that is not configured by a BoundedConfig.
    """
    if extension := scope.get("extensions", {}).get(_FIRST_MESSAGE):
        extension["limit"](max_bytes)


def _address(client: tuple[str, int] | None) -> str:
    return client[0] if client else ""


def log_failed_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """If descriptors or memory are short, let `loop` log failed accepts only once in LOG_EVERY_S, without a traceback.

    asyncio retries every second by itself. Other errors in the loop are logged as before.
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
