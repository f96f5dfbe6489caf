"""Carries one client to a host, and to another host when the first is lost.

Two tasks read, one from the client and one from the host. The client's reader writes each frame to the host directly;
a third task writes if there is no host, or if the host's socket is not ready. When the connection to the host breaks,
the client's frames are kept, the session is resumed on the same host or another, and missing frames are sent again in
both directions. The client notices only a pause.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlencode

import anyio
import anyio.abc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from antiphon.client.held_session import END, CannotResume
from antiphon.client.held_speech import held_for, resume_over
from antiphon.cluster.door.hosts import Hosts
from antiphon.cluster.relay import close_of, connect_to_host
from antiphon.signals import Signal
from antiphon.transports.transport import TransportClosed

log = logging.getLogger(__name__)
# Timeout of a host's answer to a resume, in seconds: the host may wait until the previous owner counts as dead.
RESUME_S = 20.0
# Limit on the client's unsent frames, in bytes. Above the limit, the door stops reading the client's socket.
MAX_UNSENT_BYTES = 4 << 20
# The close code of a host whose session continues on another host; and the code and reason that close a client whose
# host is lost.
MOVED, HOST_LOST = 1012, (1011, "host_lost")
# How a host closes a session that it does not hand over, because it stops.
STOPS = (1001, "server_shutting_down")
# Timeout of closing the connection to a host, in seconds.
CLOSE_S = 2.0
NOT_FOUND = 404
# Backoff between rounds of attempts to resume, in seconds; the last value repeats.
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)
# Histogram buckets, in seconds, of the pauses that a client hears. The shortest pauses are those of a local restart,
# the longest those of a dead host that no supervisor reported.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


class HostRefused(Exception):
    """No host accepted the upgrade. `status`, `headers` and `body` are those of the last host's response."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"the hosts have refused the upgrade with {status}")
        self.status, self.headers, self.body = status, headers, body


class DoorClient(Protocol):
    """One client of a door. One task receives and one sends.

    - `connection`: the client's request; its headers are forwarded to hosts.
    - `path` (percent-encoded), `query`: the path and query of the WebSocket to open at a host.
    - `is_held`: the door resumes the session. For clients that do so themselves, and for dialects whose sessions end
      with their connection, it only forwards frames.
    """

    @property
    def connection(self) -> HTTPConnection: ...

    @property
    def path(self) -> str: ...

    @property
    def query(self) -> QueryParams: ...

    @property
    def is_held(self) -> bool: ...

    async def accept(self, subprotocol: str | None) -> None:
        """Accept the client, after a host has accepted its session."""
        ...

    async def receive(self) -> str | bytes | None:
        """Wait for the client's next frame, and return it; None if the client has left."""
        ...

    async def send(self, frame: str | bytes) -> None:
        """Send a frame of the host to the client. Waits while the client does not read. Raises TransportClosed."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection with a WebSocket close code. Raises TransportClosed if the client closed it first."""
        ...


class DoorMetrics:
    """The metrics of one door, in their own registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.connections = Gauge("antiphon_door_connections", "WebSockets of clients that are open", registry=registry)
        self.pauses_s = Histogram(
            "antiphon_door_pause_seconds",
            "From the loss of a host until its session continues",
            buckets=PAUSES_S,
            registry=registry,
        )
        self.lost = Counter("antiphon_door_lost", "Sessions that no host could resume", registry=registry)

    def exposed(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class Carrier:
    """Carries the connection of one client until either side ends the session. `run` may be called once.

    `warn` logs failures before a host has accepted the client.
    """

    def __init__(
        self, client: DoorClient, hosts: Hosts, metrics: DoorMetrics, grace_s: float, warn: Callable[..., None]
    ) -> None:
        self._client = client
        self._hosts = hosts
        self._metrics = metrics
        self._grace_s = grace_s
        self._warn = warn
        self._held = held_for(client.path, hides_created=True)
        self._url = ""
        self._host: ClientConnection | None = None
        self._changed = Signal()
        self._client_left = False

    async def run(self) -> None:
        """Open the session at a host, accept the client, and carry frames until the end.

        Raises HostRefused, before the client is accepted, if no host accepts the session.
        """
        query = self._client.query
        host = await self._open(_query(query, resume="1", keeps_words="1") if self._client.is_held else _query(query))
        await self._client.accept(host.subprotocol)
        code, reason = HOST_LOST
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read_client)
                group.start_soon(self._write_host)
                code, reason = await self._read_hosts(host)
                group.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                if self._host:
                    await self._host.close()
        if not self._client_left:
            await self._close_client(code, reason)

    # --- the client ---------------------------------------------------------------------------------------------------

    async def _read_client(self) -> None:
        while (frame := await self._client.receive()) is not None:
            self._held.keep(frame)
            alone = self._held.unsent_bytes == len(frame)
            if alone and (host := self._host) and not host.transport.get_write_buffer_size():
                # Nothing is queued, neither here nor in the socket: write directly, without the other task.
                await self._write_next(host)
            else:
                self._changed.notify()
            while self._held.unsent_bytes > MAX_UNSENT_BYTES:
                await self._changed.wait()
        self._client_left = True
        if self._host:
            # This client cannot resume, so its session ends with its connection.
            try:
                if self._client.is_held:
                    await self._host.send(END)
                await self._host.close()
            except ConnectionClosed:
                pass
        self._changed.notify()

    async def _send_client(self, frame: str | bytes) -> None:
        try:
            await self._client.send(frame)
        except TransportClosed:
            # The task that reads from the client notices this too.
            self._client_left = True

    async def _close_client(self, code: int, reason: str) -> None:
        try:
            await self._client.close(code, reason)
        except TransportClosed:
            log.info("a client left before its session was closed")

    # --- the host -----------------------------------------------------------------------------------------------------

    async def _write_host(self) -> None:
        """Send the client's frames to the current host, in order."""
        while True:
            if self._host and await self._write_next(self._host):
                self._changed.notify()
            else:
                await self._changed.wait()

    async def _write_next(self, host: ClientConnection) -> bool:
        """Send the client's next frame to the host. Returns False if all frames were sent.

        Two tasks call this. Frames keep their order, since a task has already written its frame when it waits for the
        socket.
        """
        if (frame := self._held.next_frame()) is None:
            return False
        try:
            await host.send(frame)
        except ConnectionClosed:
            # Frames that the host did not receive are sent again when the session is resumed.
            if self._host is host:
                self._host = None
        return True

    async def _read_hosts(self, host: ClientConnection) -> tuple[int, str]:
        """Forward the frames of the host, and of its successors. Returns the client's close code and reason."""
        while True:
            self._host = host
            self._changed.notify()
            with self._hosts.session_at(self._url):
                await self._read_host(host)
            self._host = None
            closed = close_of(host)
            has_gone = closed is None or closed[0] == MOVED or (closed == STOPS and self._held.starts_again)
            if self._client_left or not (self._client.is_held and self._held.can_resume and has_gone):
                return closed or HOST_LOST
            log.info("the host %s has gone; a session is resumed", self._url)
            if closed is None:
                self._hosts.failed(self._url)
            try:
                host = await self._resume()
            except CannotResume as error:
                if not self._client_left:
                    log.warning("a session is lost: %s", error)
                    self._metrics.lost.inc()
                return HOST_LOST
            if self._client_left:
                # The client left while the session was resumed, so no other task ends it at the new host.
                with suppress(ConnectionClosed):
                    await host.send(END)
                await host.close()
                return HOST_LOST

    async def _read_host(self, host: ClientConnection) -> None:
        try:
            async for frame in host:
                given = self._held.receive(frame) if self._client.is_held else frame
                if given is not None:
                    await self._send_client(given)
                if self._client.is_held and (acknowledgement := self._held.acknowledgement()):
                    await host.send(acknowledgement)
        except ConnectionClosed:
            return

    async def _open(self, query: str) -> ClientConnection:
        """Open a connection to the first host that accepts it. Raises HostRefused."""
        refused = HostRefused(503, {"retry-after": "5"}, b"")
        for url in self._hosts.in_order():
            try:
                self._url = url
                return await self._connect(url, query)
            except InvalidStatus as error:
                answer = error.response
                refused = HostRefused(answer.status_code, dict(answer.headers.raw_items()), bytes(answer.body or b""))
                # Another host may have the session that a sideband names.
                is_elsewhere = answer.status_code == NOT_FOUND and "call_id" in self._client.query
                if answer.status_code < 500 and not is_elsewhere:
                    break
            except (OSError, TimeoutError, InvalidHandshake) as error:
                self._warn("the host %s cannot be reached: %s", url, error)
                self._hosts.failed(url)
        raise refused

    async def _connect(self, url: str, query: str) -> ClientConnection:
        return await connect_to_host(self._client.connection, url, query, path=self._client.path)

    async def _resume(self) -> ClientConnection:
        """Resume the session at any host, within the grace period. Raises CannotResume."""
        began_s = anyio.current_time()
        last, attempt = CannotResume("host_lost", "no host can be reached"), 0
        while anyio.current_time() - began_s < self._grace_s and not self._client_left:
            for url in self._hosts.in_order(first=self._url):
                try:
                    host = await self._resume_at(url)
                except CannotResume as error:
                    if error.is_final:
                        raise
                    last = error
                except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed):
                    self._hosts.failed(url)
                else:
                    self._url = url
                    self._metrics.pauses_s.observe(anyio.current_time() - began_s)
                    return host
            # With jitter, since many sessions may have lost the same host.
            await anyio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)] * (0.5 + random.random()))
            attempt += 1
        raise last

    async def _resume_at(self, url: str) -> ClientConnection:
        """Resume the session at this host, or start it again. Raises CannotResume, and what connecting raises."""
        try:
            return await self._resume_over(url)
        except CannotResume as error:
            if error.code != "unknown_session" or not self._held.starts_again:
                raise
        self._held.is_lost = True
        return await self._resume_over(url)

    async def _resume_over(self, url: str) -> ClientConnection:
        resume = "1" if self._held.is_lost else self._held.session_id
        host = await self._connect(url, _query(self._client.query, resume=resume))
        try:
            with anyio.fail_after(RESUME_S):
                await resume_over(self._held, host)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await host.close()
            raise
        return host


def _query(given: QueryParams, **more: str) -> str:
    return urlencode([(k, v) for k, v in given.multi_items() if k not in more] + list(more.items()))
