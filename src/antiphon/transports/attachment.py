"""Attaches one transport at a time to a live session, with one task that reads from it and one that writes to it.

A session with a resume token outlives its transport for `grace_s` and can be resumed on another; without a token, both
end together. What is read and written is the session's; frames wait in its outbox.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import anyio
import anyio.abc

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.resume.control import Control, EventAck
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.wire import Frame
from antiphon.signals import Signal
from antiphon.transports.outbox import CloseFrame, Outbox
from antiphon.transports.transport import STALL_S, Transport, TransportClosed

log = logging.getLogger(__name__)
ClientData = str | bytes | AppendAudio


class AttachedSession(Protocol):
    """What an attachment asks of its live session. All calls come from one event loop, one frame at a time."""

    @property
    def id(self) -> str:
        """The session's id, for logs."""
        ...

    @property
    def ending(self) -> bool:
        """No more frames are read; the session sends what it still has and ends its outbox."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds without a frame after which `end_if_idle` is called; None: never."""
        ...

    async def handle(self, data: ClientData) -> None:
        """Handle one frame, or audio that came beside the frames. The next is read when this returns.

        It is not cancelled where the session can be resumed: a frame that was counted as received has been handled.
        """
        ...

    async def end_if_idle(self) -> bool:
        """Nothing came for `idle_s`. Return True after ending the outbox: the client is given up."""
        ...

    async def wind_up(self) -> None:
        """No more frames come and `ending` is true: finish what was asked for, then end the outbox."""
        ...

    def control(self, data: str | bytes) -> Control | None:
        """Return the event if it is about the connection (a resume, an acknowledgement); None: it is for `handle`."""
        ...

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Answer an event about the connection with an error. Waits while the client does not read."""
        ...

    async def resumed(self, token: str) -> Frame:
        """Return the first frame for a client that has resumed the session, with its new token.

        Waits until the token is stored wherever the session is stored.
        """
        ...

    def replaced(self) -> Frame:
        """Return the last frame for a transport whose session goes on over another one."""
        ...


class Attachment:
    """The place of one live session where one transport at a time is attached.

    The session calls `serve` with its first transport in a task group of its own; other connections call `resume`.
    `over` is set when the session has no client any more and none may come: its task group is cancelled then.
    """

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
        self._token = token
        self._grace_s = grace_s
        self._stall_s = stall_s
        self.over = anyio.Event()
        # Frames of the client that were handled. A client that resumes sends those again that came after.
        self.num_received = 0
        self._group: anyio.abc.TaskGroup | None = None
        # Of the attached transport; None while none is.
        self._scope: anyio.CancelScope | None = None
        # How many transports were attached, and which of them were replaced by another.
        self._number = 0
        self._replaced: set[int] = set()
        self._detached = Signal()
        self._resuming = anyio.Lock()
        self._reading = anyio.CancelScope()

    @property
    def attached(self) -> bool:
        """A transport is attached at the moment."""
        return self._scope is not None

    @property
    def token(self) -> ResumeToken | None:
        """What resumes the session; None: it cannot be resumed, and ends with its transport."""
        return self._token

    def forbid_resume(self) -> None:
        """Make the session end with its transport: its client has closed it, and will not come back."""
        self._token = None

    async def serve(self, transport: Transport, group: anyio.abc.TaskGroup) -> None:
        """Serve the first transport, then those that resume, and return when `over` is set.

        `group` is the session's task group; the grace period and the end of a drained session run in it.
        """
        self._group = group
        self._scope = scope = anyio.CancelScope()
        await self._attach(transport, scope)
        await self.over.wait()

    def stop_reading(self) -> None:
        """Read no more frames, and have the session wind up: what it still has to send is sent. Does not wait."""
        self._reading.cancel()
        if self._scope is None and self._group:
            self._group.start_soon(self._session.wind_up)

    async def resume(self, token: str, last_received: int, transport: Transport) -> None:
        """Serve over `transport` from now on, until it is gone. A transport that is still attached is closed.

        `last_received`: the number of the last frame that the client has. Raises RemoteProtocolError
        (`unknown_session`, `invalid_resume_token`, `invalid_event_ack`) and JournalGap before anything is replaced.
        """
        async with self._resuming:
            resume_token = self._checked(token)
            # A client that cannot be served must not end the connection of one that is.
            self.outbox.check_rewind(last_received)
            while self._scope:
                # A frame that the other reader has begun to handle has to be counted: it must not wait for room now.
                self._replaced.add(self._number)
                self.outbox.set_attached(False)
                self._scope.cancel()
                await self._detached.wait()
                resume_token = self._checked(token)
            try:
                self.outbox.rewind(last_received)
                self.outbox.put_first(await self._session.resumed(resume_token.renew()))
            except BaseException:
                self._on_detached()
                raise
            # Set before the lock is released, so that the next client finds the place taken.
            self._scope = scope = anyio.CancelScope()
        log.info("session %s is resumed", self._session.id)
        await self._attach(transport, scope)

    def continue_from(self, last_received: int, first_frame: Frame) -> None:
        """Prepare a session that was restored from the store, before `serve`.

        `first_frame` is sent first; frames after it are numbered from `last_received` + 1.
        """
        self.outbox.continue_from(last_received, first_frame)

    def _checked(self, token: str) -> ResumeToken:
        """Return the session's token if `token` is it. Raises RemoteProtocolError."""
        if self.over.is_set():
            raise RemoteProtocolError("unknown_session", "The session has just ended.", "session_id")
        if self._token is None or not self._token.matches(token):
            raise RemoteProtocolError("invalid_resume_token", "The token does not resume this session.", "resume_token")
        return self._token

    async def _attach(self, transport: Transport, scope: anyio.CancelScope) -> None:
        """Read from and write to `transport` until one of them ends, or the session does."""
        self._number += 1
        number = self._number
        self._reading = reading = anyio.CancelScope()
        self.outbox.set_attached(True)
        try:
            with scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._cancel_when_over, scope)
                    group.start_soon(self._write, transport, scope)
                    given_up = False
                    with reading:
                        given_up = await self._read(transport)
                    if self._session.ending:
                        await self._session.wind_up()
                    elif not given_up:
                        # The client has left: frames that are still to come have no reader.
                        scope.cancel()
        except* Exception:
            # The session's edge: whatever failed in handling its client's frames ends this session alone.
            log.exception("session %s failed", self._session.id)
            self.over.set()
        finally:
            self._scope = None
            self.outbox.set_attached(False)
            self._detached.notify()
            if number not in self._replaced:
                self._on_detached()
        if number in self._replaced:
            await self._close_replaced(transport)

    def _on_detached(self) -> None:
        """End the session, or begin its grace period: no transport is attached any more."""
        if self._token is None or self.over.is_set() or self.outbox.ended:
            self.over.set()
        else:
            # A session that is ending ends by itself; if it does not, the grace period ends it.
            log.info("session %s waits to be resumed", self._session.id)
            assert self._group
            self._group.start_soon(self._end_after_grace, self._number)

    async def _end_after_grace(self, number: int) -> None:
        await anyio.sleep(self._grace_s)
        if self._number == number and self._scope is None:
            log.info("session %s was not resumed", self._session.id)
            self.over.set()

    async def _close_replaced(self, transport: Transport) -> None:
        try:
            with anyio.fail_after(self._stall_s):
                await transport.send(self._session.replaced().encode())
                await transport.close(1000, "session_replaced")
        except (TransportClosed, TimeoutError):
            return

    async def _cancel_when_over(self, scope: anyio.CancelScope) -> None:
        await self.over.wait()
        self.outbox.set_attached(False)
        scope.cancel()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, transport: Transport) -> bool:
        """Handle frames until the client leaves or the session ends; return True for a client given up as idle.

        Its outbox has ended then: the writer sends the last frames, and closes the transport.
        """
        session = self._session
        while not session.ending:
            with anyio.move_on_after(session.idle_s) as waiting:
                data = await transport.receive()
            if waiting.cancelled_caught:
                if await session.end_if_idle():
                    return True
                continue
            if data is None:
                return False
            if not (self._token and isinstance(data, str | bytes) and await self._control(self._token, data)):
                # A frame is handled to its end or not at all: a client that resumes does not send it again.
                with anyio.CancelScope(shield=self._token is not None):
                    self.num_received += 1
                    await session.handle(data)
        return False

    async def _control(self, token: ResumeToken, data: str | bytes) -> bool:
        """Handle an event about the connection itself; return False for all others."""
        # The client has sent something since it got this token, so it has it.
        token.confirm()
        message = self._session.control(data)
        if message is None:
            return False
        try:
            if not isinstance(message, EventAck):
                raise RemoteProtocolError("session_resume_conflict", "A session is open on this connection.", "type")
            seq = message.server_event_seq
            if not isinstance(seq, int) or isinstance(seq, bool):
                raise RemoteProtocolError("invalid_event_ack", "server_event_seq is a number.", "server_event_seq")
            self.outbox.acknowledge(seq)
        except RemoteProtocolError as error:
            await self._session.reject(error, message.event_id)
        return True

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _write(self, transport: Transport, scope: anyio.CancelScope) -> None:
        """Send frames until the end. A client that has left, or has stopped reading, is detached."""
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
        # No frame is sent over this transport any more, so no task may wait for room in it.
        self.outbox.set_attached(False)
        scope.cancel()
