"""Listeners: the TCP ports of protocols that are not HTTP. They are started, bounded, counted and drained together.

HTTP's port has its own bound (`server/http/connections.py`). A listener's protocol has no key on the wire, so a
listener serves loopback and the addresses that its setting allows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Container
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
import anyio.abc

from antiphon.errors import SettingsError
from antiphon.server.http.connections import Connections, connection_limit
from antiphon.server.http.listening import bind
from antiphon.server.http.origin import is_loopback
from antiphon.server.metrics import Metrics
from antiphon.settings import Settings

log = logging.getLogger(__name__)

# Bytes that a connection's reader keeps before it pauses the socket.
READ_BYTES = 1 << 16
# Connections that have not been accepted yet.
BACKLOG = 128


class StreamConnection(Protocol):
    """One accepted connection of a listener's protocol. All calls are made in one event loop."""

    async def run(self) -> None:
        """Serve the connection until either side ends it. Must not raise for anything that a client does."""
        ...

    def drain(self) -> None:
        """Close the connection when the work that its client has asked for is done, at once without work.

        Returns at once.
        """
        ...

    def cut(self) -> None:
        """Tell the client that its work is cut off, and close the connection. Returns at once."""
        ...


# Makes the connection of an accepted socket. The last argument is the client's address.
Connect = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], StreamConnection]


@dataclass(frozen=True, slots=True)
class Listener:
    """One port that is no HTTP."""

    # The protocol's name, in metrics and logs.
    name: str
    # The bound socket. It listens when the models are loaded: clients that connect earlier are refused, and try again.
    sock: socket.socket
    # Makes the connection of an accepted socket.
    connect: Connect
    # The addresses that may connect, in addition to loopback.
    allowed: Container[object]
    # Announces the port, given as the argument, while its block runs.
    announce: Callable[[int], AbstractAsyncContextManager[None]]

    @property
    def port(self) -> int:
        """The port, also if the system chose it."""
        port: int = self.sock.getsockname()[1]
        return port


class Listeners:
    """All listeners of a server, with one bound for their connections, in total and for each address."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        server = settings.server
        # Each connection does one thing at a time, so more connections than sessions are of no use.
        most = min(server.max_sessions, connection_limit(server.max_sessions) // 2)
        refuse = metrics.refused.labels("listener_connections").inc
        self._room = Connections(most, server.connections_per_address, refuse)
        self._listeners: list[Listener] = []
        self._open: set[StreamConnection] = set()
        self._servers: list[asyncio.Server] = []
        self._drains = anyio.Event()

    @property
    def ports(self) -> dict[str, int]:
        """The port of each listener, by its name."""
        return {listener.name: listener.port for listener in self._listeners}

    def add(self, listener: Listener) -> None:
        """Add a listener. It is served from the next `serve` on."""
        self._listeners.append(listener)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Accept connections until the server drains. Connections continue in tasks of their own, until `cut`.

        `task_status` is set to started when all ports listen.
        """
        async with AsyncExitStack() as announcements:
            try:
                for listener in self._listeners:
                    accept = partial(self._accepted, listener)
                    server = await asyncio.start_server(accept, sock=listener.sock, limit=READ_BYTES, backlog=BACKLOG)
                    self._servers.append(server)
                    log.info("%s listens on port %d", listener.name, listener.port)
                task_status.started()
                for listener in self._listeners:
                    await announcements.enter_async_context(listener.announce(listener.port))
                await self._drains.wait()
            finally:
                self._stop_accepting()

    def close(self) -> None:
        """Close the sockets, also of listeners that were never served."""
        self._stop_accepting()
        for listener in self._listeners:
            listener.sock.close()

    def drain(self) -> None:
        """Accept no further connection, and close each connection when its work is done. Returns at once."""
        self._drains.set()
        self._stop_accepting()
        for connection in list(self._open):
            connection.drain()

    def cut(self) -> None:
        """Tell the clients of all open connections that their work is cut off, and close them. Returns at once."""
        for connection in list(self._open):
            connection.cut()

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def _accepted(self, listener: Listener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        address = peer[0].removeprefix("::ffff:") if peer else ""
        if self._drains.is_set() or not (is_loopback(address) or address in listener.allowed):
            self._metrics.refused.labels("listener_address").inc()
            writer.transport.abort()
        elif not self._room.take(address):
            writer.transport.abort()
        else:
            await self._serve(listener, listener.connect(reader, writer, address), writer, address)

    async def _serve(
        self, listener: Listener, connection: StreamConnection, writer: asyncio.StreamWriter, address: str
    ) -> None:
        gauge = self._metrics.listener_connections.labels(listener.name)
        self._open.add(connection)
        gauge.inc()
        try:
            await connection.run()
        except Exception:
            # The boundary of a connection: any failure in it ends only this connection.
            log.exception("a connection of %s failed", listener.name)
        finally:
            gauge.dec()
            self._open.discard(connection)
            self._room.give_back(address)
            writer.close()


def unannounced(port: int) -> AbstractAsyncContextManager[None]:
    """Announce nothing: for listeners whose clients know the address."""
    return nullcontext()


class Everyone:
    """The set of all addresses, for listeners that serve everyone who reaches their port."""

    def __contains__(self, address: object) -> bool:
        return True


def host_of(address: str) -> str:
    """Return the host of `HOST:PORT`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def bind_listener(address: str) -> socket.socket:
    """Bind the socket of a listener to `HOST:PORT`, where an IPv6 address is in brackets.

    Raises SettingsError if the address is not available.
    """
    port = int(address.rpartition(":")[2])
    if not 0 <= port <= 65535:
        raise SettingsError(f"{address} has no port between 0 and 65535")
    return bind(host_of(address), port)


def check_listener_exposure(flag: str, address: str, allowed: str, *, allow_anonymous: bool) -> None:
    """Raise SettingsError for an address that others can reach without a list of the addresses that may connect.

    `allow_anonymous` permits it. `flag` is the flag of `address`, and FLAG-allow that of `allowed`.
    """
    if not is_loopback(host_of(address)) and not allowed and not allow_anonymous:
        raise SettingsError(
            f"{flag} {address} is open to others, and its protocol has no keys: give {flag}-allow NETWORKS, or give "
            "--allow-anonymous if this is intended"
        )
