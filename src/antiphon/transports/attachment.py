"""The line between one session and whoever is attached to it: a transport at a time, with one reader and one writer.

Where the session has a token it outlives its transport for a while, and another transport can take the line; else they end together.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import anyio
import anyio.abc

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.transports.outbox import CloseFrame, Outbox
from antiphon.transports.transport import STALL_S, Transport, TransportClosed

log = logging.getLogger(__name__)
ClientData = str | bytes | AppendAudio


class AttachedSession(Protocol):
    """Who is at the other end of the line."""

    @property
    def id(self) -> str: ...

    @property
    def ending(self) -> bool:
        """Nothing more is to be read: it says what it has to say, and ends."""
        ...

    @property
    def idle_s(self) -> float | None:
        """After this long without a frame `idle` is asked."""
        ...

    async def take(self, data: ClientData) -> None:
        """One frame from the client. Not interrupted where the session can be resumed."""
        ...

    async def idle(self) -> bool:
        """Nothing came for idle_s. True: the client is given up."""
        ...

    async def wind_up(self) -> None:
        """Nothing more is read."""
        ...

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """The event, if it is about the connection."""
        ...

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Answer what the client did wrong about it; waits while it does not read."""
        ...

    async def resumed(self, token: str) -> str:
        """The first frame of who has taken the session up again. The token is kept wherever the session is."""
        ...

    def replaced(self) -> str:
        """The last frame of a transport whose session goes on over another."""
        ...


class Attachment:
    """`serve` it with the first transport in a task group of the session's; `over` is set when there is nobody to serve any more."""

    def __init__(
        self,
        session: AttachedSession,
        outbox: Outbox,
        token: ResumeToken | None,
        grace_s: float,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self._session = session
        self.outbox = outbox
        # What resumes the session; None: it ends with its transport.
        self.token = token
        self._grace_s = grace_s
        self._stall_s = stall_s
        self.over = anyio.Event()
        # Frames of the client that were taken: one that resumes sends again what came after.
        self.num_received = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._attachment: anyio.CancelScope | None = None
        self._number = 0
        self._replaced: set[int] = set()
        self._detached = anyio.Event()
        self._resuming = anyio.Lock()
        self._reading = anyio.CancelScope()

    @property
    def attached(self) -> bool:
        """Somebody is at the line."""
        return self._attachment is not None

    async def serve(self, transport: Transport, group: anyio.abc.TaskGroup) -> None:
        """With the first transport, then with whoever resumes, until it is over. `group`: the session's tasks."""
        self._group = group
        self._attachment = scope = anyio.CancelScope()
        await self._attach(transport, scope)
        await self.over.wait()

    def stop_reading(self) -> None:
        """The session ends: what it still says is sent."""
        self._reading.cancel()
        if self._attachment is None and self._group:
            self._group.start_soon(self._session.wind_up)

    async def resume(self, token: str, last_received: int, transport: Transport) -> None:
        """Serve over `transport` from now on, if `token` is the session's. Whoever was attached is sent off.

        Raises RemoteProtocolError (invalid_resume_token, invalid_event_ack), JournalGap.
        """
        async with self._resuming:
            fitting = self._fitting(token)
            # Who cannot be served replaces nobody.
            self.outbox.journal.check_rewind(last_received)
            while self._attachment:
                # What the other reader has begun to take has to be counted; it waits for no room any more.
                self._replaced.add(self._number)
                self.outbox.attach(attached=False)
                self._attachment.cancel()
                await self._detached.wait()
                fitting = self._fitting(token)
            try:
                self.outbox.journal.rewind(last_received)
                self.outbox.journal.push(await self._session.resumed(fitting.renew()), first=True)
            except BaseException:
                self._left()
                raise
            # Whoever comes next finds it taken.
            self._attachment = scope = anyio.CancelScope()
        log.info("session %s is resumed", self._session.id)
        await self._attach(transport, scope)

    def _fitting(self, token: str) -> ResumeToken:
        if self.over.is_set():
            raise RemoteProtocolError("unknown_session", "The session has just ended.", "session_id")
        if self.token is None or not self.token.matches(token):
            raise RemoteProtocolError("invalid_resume_token", "The token does not resume this session.", "resume_token")
        return self.token

    async def _attach(self, transport: Transport, scope: anyio.CancelScope) -> None:
        self._number += 1
        mine = self._number
        self._reading = reading = anyio.CancelScope()
        self.outbox.attach(attached=True)
        try:
            with scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._watch_over, scope)
                    group.start_soon(self._write, transport, scope)
                    with reading:
                        await self._read(transport)
                    if self._session.ending:
                        await self._session.wind_up()
                    else:
                        # The client left: nothing that is still to come has a reader.
                        scope.cancel()
        except* Exception:
            # The session's edge: whatever failed in reading its client ends it alone.
            log.exception("session %s failed", self._session.id)
            self.over.set()
        finally:
            self._attachment = None
            self.outbox.attach(attached=False)
            self._detached.set()
            self._detached = anyio.Event()
            if mine not in self._replaced:
                self._left()
        if mine in self._replaced:
            await self._send_off(transport)

    def _left(self) -> None:
        """Nobody is attached any more."""
        if self.token is None or self.over.is_set() or self.outbox.ended:
            self.over.set()
        else:
            # One that is ending ends by itself; if it does not, this ends it.
            log.info("session %s waits to be resumed", self._session.id)
            assert self._group
            self._group.start_soon(self._grace, self._number)

    async def _grace(self, number: int) -> None:
        await anyio.sleep(self._grace_s)
        if self._number == number and self._attachment is None:
            log.info("session %s was not resumed", self._session.id)
            self.over.set()

    async def _send_off(self, transport: Transport) -> None:
        """The session goes on elsewhere."""
        try:
            with anyio.fail_after(self._stall_s):
                await transport.send(self._session.replaced())
                await transport.close(1000, "session_replaced")
        except (TransportClosed, TimeoutError):
            return

    async def _watch_over(self, scope: anyio.CancelScope) -> None:
        await self.over.wait()
        self.outbox.attach(attached=False)
        scope.cancel()

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def _read(self, transport: Transport) -> None:
        session = self._session
        while not session.ending:
            with anyio.move_on_after(session.idle_s) as waiting:
                data = await transport.receive()
            if waiting.cancelled_caught:
                if await session.idle():
                    return
                continue
            if data is None:
                return
            if not (self.token and isinstance(data, str | bytes) and await self._control(self.token, data)):
                # What was begun to be taken is taken: a client that resumes does not send it again.
                with anyio.CancelScope(shield=self.token is not None):
                    self.num_received += 1
                    await session.take(data)

    async def _control(self, token: ResumeToken, data: str | bytes) -> bool:
        """An event about the connection itself."""
        token.confirm()
        event = self._session.control(data)
        if event is None:
            return False
        try:
            if event.get("type") != "session.event_ack":
                raise RemoteProtocolError("session_resume_conflict", "A session is open on this connection.", "type")
            seq = event.get("server_event_seq")
            if not isinstance(seq, int) or isinstance(seq, bool):
                raise RemoteProtocolError("invalid_event_ack", "server_event_seq is a number.", "server_event_seq")
            self.outbox.journal.acknowledge(seq)
        except RemoteProtocolError as error:
            await self._session.reject(error, event.get("event_id"))
        return True

    # --- writing ----------------------------------------------------------------------------------------------------------

    async def _write(self, transport: Transport, scope: anyio.CancelScope) -> None:
        """Send frames until the end. A client that is gone or has stopped reading is not attached any more."""
        try:
            while True:
                item = await self.outbox.get()
                with anyio.fail_after(self._stall_s):
                    if isinstance(item, CloseFrame):
                        await transport.close(item.code, item.reason)
                        self.over.set()
                        break
                    await transport.send(item)
        except TimeoutError:
            log.info("session %s: the client has not read for %.0f s", self._session.id, self._stall_s)
        except TransportClosed:
            log.info("session %s: the client is gone", self._session.id)
            if self.outbox.ended:
                self.over.set()
        # Whoever waits for room waits for nobody.
        self.outbox.attach(attached=False)
        scope.cancel()
