"""The listening socket of a server process, its HTTP server, and its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Literal

import anyio
import uvicorn
from starlette.types import ASGIApp

from antiphon.errors import SettingsError
from antiphon.server.http.connections import BoundedConfig, Connections, connection_limit
from antiphon.server.http.forwarded import ForwardedClients, TrustedProxies
from antiphon.settings import ServerSettings, Settings
from antiphon.transports.http import LineLimit

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A frame above this multiple of `max_frame_bytes` closes the connection with 1009. A smaller frame above
# `max_frame_bytes` is answered with an error.
HARD_FRAME_FACTOR = 2
# Seconds that clients have to read the rest of their responses when the server stops.
CLOSE_TIMEOUT_S = 3.0
# uvicorn 0.54 logs this error after each upgrade that is answered with an HTTP status, such as 401.
FALSE_ALARM = "ASGI callable returned without completing handshake."
# Part of the lines with which uvicorn logs the URL of each upgrade.
WITH_URL = '"WebSocket %s"'
# uvicorn logs this error after a response that was cut off.
CUT_OFF = "ASGI callable returned without completing response."


def quiet_log(is_cut: Callable[[], bool]) -> None:
    """Filter uvicorn's log.

    Drops false alarms. Drops lines about accepted and refused requests, and all lines of the level DEBUG, because they
    have the URL or headers, which may have a key. Drops errors about responses that were cut off, while `is_cut`
    returns true. Limits warnings about invalid requests to a few lines a minute, because anyone can send such requests
    without a key.
    """
    limit = LineLimit(time.monotonic)

    def passes(record: logging.LogRecord) -> bool:
        has_key = record.levelno < logging.INFO or WITH_URL in str(record.msg)
        if has_key or record.msg == FALSE_ALARM or (record.msg == CUT_OFF and is_cut()):
            return False
        if record.levelno != logging.WARNING:
            return True
        unlogged = limit.admit()
        if unlogged:
            record.msg += f" unlogged={unlogged}"
        return unlogged is not None

    logging.getLogger("uvicorn.error").addFilter(passes)
    logging.getLogger("uvicorn.access").addFilter(_never)


def _never(record: logging.LogRecord) -> bool:
    return False


class QuietServer(uvicorn.Server):
    """uvicorn's server with a bounded shutdown, and without signal handlers that close live sessions at once.

    `listens` is set when its sockets accept connections.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        on_refused: Callable[[], None] = lambda: None,
        lifespan: Literal["on", "off"] = "off",
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Make the server. `on_refused` is called for each connection that finds no place.

        `tls` returns the context of each handshake; None: the server has no TLS.
        """
        server = settings.server
        proxies = TrustedProxies(server.trusted_proxies)
        most = connection_limit(server.max_sessions)
        self.connections = Connections(most, server.connections_per_address, on_refused, proxies)
        config = BoundedConfig(
            ForwardedClients(app, proxies, self.connections),
            self.connections,
            server.head_timeout_s,
            tls=tls,
            log_config=None,
            access_log=False,
            ws_max_size=settings.audio.max_frame_bytes * HARD_FRAME_FACTOR,
            ws_per_message_deflate=False,
            lifespan=lifespan,
        )
        super().__init__(config)
        self.listens = anyio.Event()

    async def serve_on(self, sock: socket.socket, scope: anyio.CancelScope) -> None:
        """Serve on an open socket until `should_exit` is set; then cancel `scope`."""
        await self.serve(sockets=[sock])
        scope.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections on the sockets, and set `listens`."""
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets and all connections. Aborts connections still open after CLOSE_TIMEOUT_S."""
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[tuple[anyio.Event, anyio.Event]]:
    """Yield two events: while the block runs, the first SIGTERM or SIGINT sets one, and the next signal the other."""
    stop, now, loop = anyio.Event(), anyio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, now
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def base_url(server: ServerSettings, sock: socket.socket, *, tls: bool) -> str:
    """Return the base URL of a server with this socket, with the configured host name."""
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"http{'s' if tls else ''}://{host}:{sock.getsockname()[1]}"


def is_wildcard(host: str) -> bool:
    """Return whether `host` stands for all addresses of the machine, so that clients cannot use it as an address."""
    return host in ("", "0.0.0.0", "::")


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket that does not listen yet. The caller closes it.

    The socket is IPv6 if `host` contains a colon. Port 0 is any free port. Raises SettingsError if the address is not
    available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only for sockets with the explicit protocol TCP. Without it, Nagle's algorithm delays
    # successive frames by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock
