"""Attaches one transport at a time to a live session, with one task that reads from it and one that writes to it.

A session with a resume token outlives its transport for `grace_s` and can be resumed on another; without a token, both
end together. What is read and written is the session's; frames wait in its outbox. Two tables say what may happen
when: the session's `lifecycle` and the state of the attachment.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import anyio.abc

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume import Control, EventAck, HowResumed, SessionEnd
from antiphon.protocols.wire import Frame
from antiphon.signals import Signal
from antiphon.transports.journal import ResumeToken, SentFrame
from antiphon.transports.lifecycle import (
    AttachmentEvent,
    AttachmentState,
    Lifecycle,
    LifecycleEvent,
    LifecycleMachine,
    new_attachment,
)
from antiphon.transports.outbox import CloseFrame, Outbox
from antiphon.transports.transport import STALL_S, ClientData, Transport, TransportClosed

log = logging.getLogger(__name__)


class AttachedSession(Protocol):
    """One live session, as its attachment and the server see it. All calls come from one event loop.

    `attachment`: the place of its transport, which a client that resumes takes. Its token says whether one may.
    """

    attachment: Attachment

    @property
    def id(self) -> str:
        """The session's id on the wire."""
        ...

    @property
    def caller(self) -> object:
        """What opened it: only an equal caller may resume it."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory that the session holds for its client now, beside the frames of its outbox."""
        ...

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that it has received and not yet listened to; 0 for a session without audio."""
        ...

    def drain(self, within_s: float) -> None:
        """Once neither side is in the middle of something, stop reading, send what was asked for, and close, all of it
        within `within_s` seconds. Returns at once: `all_left` waits until it is over.
        """
        ...

    def finish(self) -> None:
        """Send what waits, and close, whatever is still under way. Returns at once."""
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

    async def end_if_idle(self) -> None:
        """Nothing came for `idle_s`: end the session, unless something else counts as activity."""
        ...

    async def wind_up(self) -> None:
        """The session is DRAINING and no more frames come: finish what was asked for, and then the session.

        It is called again on each transport that is attached while the session drains.
        """
        ...

    def control(self, data: str | bytes) -> Control | None:
        """Return the event if it is about the connection (a resume, an acknowledgement); None: it is for `handle`."""
        ...

    async def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        """Answer an event about the connection with an error. Waits while the client does not read."""
        ...

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        """Return the first frame for a client that has resumed the session, with its new token, and how it has.

        Waits until the token is stored wherever the session is stored.
        """
        ...

    def replaced(self) -> Frame:
        """Return the last frame for a transport whose session goes on over another one."""
        ...


class Attachment:
    """The place of one live session where one transport at a time is attached.

    The session calls `serve` with its first transport in a task group of its own; other connections call `resume`.
    `lifecycle` is shared with the session: the attachment reads it, and closes it when no client is attached any more
    and none may come.
    """

    def __init__(
        self,
        session: AttachedSession,
        outbox: Outbox,
        lifecycle: LifecycleMachine,
        token: ResumeToken | None,
        grace_s: float,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self._session = session
        self.outbox = outbox
        self._lifecycle = lifecycle
        self._token = token
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._place = new_attachment()
        # Notified when the state of the attachment changes, and when the session is closed.
        self._changed = Signal()
        # Frames of the client that were taken, the one that is being handled too. A client that resumes sends again
        # those that came after.
        self.num_received = 0
        self._group: anyio.abc.TaskGroup | None = None
        # Of the transport that was attached last: all its tasks, and its reader.
        self._scope = self._reading = anyio.CancelScope()
        self._resuming = anyio.Lock()
        # Whether the session outlives its transport, where it has a token.
        self._waits_for_client = True

    @property
    def state(self) -> AttachmentState:
        """Whether a transport is attached at the moment, or about to be."""
        return self._place.state

    @property
    def token(self) -> ResumeToken | None:
        """What resumes the session; None: it cannot be resumed (any more), and ends with its transport."""
        return self._token if self._lifecycle.state.resumable else None

    async def serve(self, transport: Transport, group: anyio.abc.TaskGroup) -> None:
        """Serve the first transport, then those that resume, and return when the session is closed.

        `group` is the session's task group; the grace period and the end of a drained session run in it.
        """
        self._group = group
        self._take_place()
        await self._attach(transport)
        await self._closed()

    def stop_reading(self) -> None:
        """Read no more frames, since the session has left OPEN; have it wind up if it drains. Does not wait."""
        self._reading.cancel()
        draining = self._lifecycle.state is Lifecycle.DRAINING
        if draining and not self._place.state.has_transport and self._group:
            self._group.start_soon(self._session.wind_up)

    def abandon(self) -> None:
        """Close the session at once: frames that wait are not sent. Does nothing if it is closed. Does not wait."""
        if self._lifecycle.state is not Lifecycle.CLOSED:
            self._lifecycle.apply(LifecycleEvent.ABANDONED)
            self._changed.notify()

    async def resume(
        self,
        token: str,
        last_received: int,
        transport: Transport,
        how: HowResumed = "attached",
        *,
        has_left: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Serve over `transport` from now on, until it is gone. A transport that is still attached is closed.

        `last_received`: the number of the last frame that the client has. `has_left`: waits a moment for the client to
        leave; asked where it may have given up, and then nothing is replaced. Raises RemoteProtocolError
        (`unknown_session`, `invalid_resume_token`, `invalid_event_ack`) and JournalGap before anything is replaced.
        """
        journal = self.outbox.journal
        async with self._resuming:
            # Before `_check`, by which the token of before would take the place of the newer one.
            if has_left and self.doubts(token) and await self._has_given_up(token, has_left):
                log.info("session %s: an attempt to resume it was given up", self._session.id)
                return
            self._check(token)
            # A client that cannot be served must not end the connection of one that is.
            journal.check_rewind(last_received)
            self._apply(AttachmentEvent.RESUME_BEGAN)
            try:
                await self._replaced()
                resume_token = self._check(token)
                journal.rewind(last_received)
                self.outbox.put_first(await self._session.resumed(resume_token.renew(), how))
                self._check_open()
            except BaseException:
                self._apply(AttachmentEvent.RESUME_FAILED)
                self._wait_or_abandon()
                raise
            # Before the lock is released, so that the next client finds the place taken.
            self._take_place()
        log.info("session %s is resumed", self._session.id)
        await self._attach(transport)

    def continue_from(
        self, num_received: int, last_received: int, first_frame: Frame, frames: Sequence[SentFrame] = ()
    ) -> None:
        """Prepare a session that was restored from the store, before `serve`.

        `num_received`: how many frames of the client the session has in it. `first_frame` is sent first, then those of
        `frames`, another host's, that the client lacks after `last_received`. Without them, what follows is numbered
        from `last_received` + 1.
        """
        self.num_received = num_received
        journal = self.outbox.journal
        if not journal.take_over(frames, last_received):
            journal.continue_from(last_received)
        self.outbox.put_first(first_frame)

    def doubts(self, token: str) -> bool:
        """Whether a client that shows this token may have given up meanwhile: it was sent before the transport that is
        attached got a newer one, and nobody was heard there yet.
        """
        return bool(self._place.state.has_transport and self._token and self._token.is_previous(token))

    async def _has_given_up(self, token: str, has_left: Callable[[], Awaitable[bool]]) -> bool:
        """Whether a client that is doubted leaves while it is: the doubt ends with the transport that is attached."""
        left = False
        async with anyio.create_task_group() as group:

            async def until_gone() -> None:
                while self.doubts(token):
                    await self._changed.wait()
                group.cancel_scope.cancel()

            group.start_soon(until_gone)
            left = await has_left()
            group.cancel_scope.cancel()
        return left

    # --- the two states -----------------------------------------------------------------------------------------------

    def _apply(self, event: AttachmentEvent) -> None:
        """Move to the next state of the attachment, and wake the tasks that depend on it."""
        self._place.apply(event)
        self.outbox.set_attached(self._place.state.takes_frames)
        self._changed.notify()

    def _stop(self) -> None:
        """Send no more frames over the transport, and end its tasks: a frame that is being handled is, to its end."""
        if self._place.state is AttachmentState.ATTACHED:
            self._apply(AttachmentEvent.TRANSPORT_STOPPED)
        self._scope.cancel()

    def _wait_or_abandon(self) -> None:
        """Where the place is empty and no client is on its way, begin the grace period, or end the session."""
        if self._place.state is not AttachmentState.DETACHED:
            return
        if self._token is None or not self._waits_for_client or not self._lifecycle.state.is_running:
            self.abandon()
        else:
            # A session that drains ends by itself; if it does not, the grace period ends it.
            log.info("session %s waits to be resumed", self._session.id)
            assert self._group
            if self._lifecycle.state is Lifecycle.DRAINING:
                # The drain may have begun while the transport was leaving, whose tasks are cancelled.
                self._group.start_soon(self._session.wind_up)
            self._group.start_soon(self._abandon_after_grace, self._scope)

    async def _abandon_after_grace(self, last: anyio.CancelScope) -> None:
        await anyio.sleep(self._grace_s)
        if self._scope is last and self._place.state is AttachmentState.DETACHED:
            log.info("session %s was not resumed", self._session.id)
            self.abandon()

    async def _closed(self) -> None:
        while self._lifecycle.state is not Lifecycle.CLOSED:
            await self._changed.wait()

    # --- transports that come and go ----------------------------------------------------------------------------------

    def _check(self, token: str) -> ResumeToken:
        """Return the session's token if `token` is it. Raises RemoteProtocolError."""
        self._check_open()
        resume_token = self.token
        if resume_token is None or not resume_token.matches(token):
            raise RemoteProtocolError("invalid_resume_token", "The token does not resume this session.", "resume_token")
        return resume_token

    def _check_open(self) -> None:
        if self._lifecycle.state is Lifecycle.CLOSED:
            raise RemoteProtocolError("unknown_session", "The session has just ended.", "session_id")

    async def _replaced(self) -> None:
        """End the tasks of a transport that is REPLACED, and wait until they have ended."""
        if self._place.state is AttachmentState.REPLACED:
            # A frame that its reader has begun to handle has to be counted: it does not wait for room any more.
            self._scope.cancel()
        while self._place.state is AttachmentState.REPLACED:
            await self._changed.wait()

    def _take_place(self) -> None:
        self._scope, self._reading = anyio.CancelScope(), anyio.CancelScope()
        self._apply(AttachmentEvent.TRANSPORT_ATTACHED)

    async def _attach(self, transport: Transport) -> None:
        """Read from and write to `transport`, which has the place, until one of them ends, or the session does."""
        reading = self._reading
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._stop_when_closed)
                    group.start_soon(self._write, transport)
                    client_left = False
                    with reading:
                        client_left = await self._read(transport)
                    if self._lifecycle.state is Lifecycle.DRAINING:
                        await self._session.wind_up()
                    elif client_left:
                        # Frames that are still to come have no reader.
                        self._stop()
        except* Exception:
            # The session's edge: whatever failed in handling its client's frames ends this session alone.
            log.exception("session %s failed", self._session.id)
            self.abandon()
        finally:
            was_replaced = self._place.state is AttachmentState.REPLACED
            self._apply(AttachmentEvent.TRANSPORT_GONE)
            self._wait_or_abandon()
        if was_replaced:
            await self._close_replaced(transport)

    async def _close_replaced(self, transport: Transport) -> None:
        try:
            with anyio.fail_after(self._stall_s):
                await transport.send(self._session.replaced().encode())
                await transport.close(1000, "session_replaced")
        except (TransportClosed, TimeoutError):
            return

    async def _stop_when_closed(self) -> None:
        await self._closed()
        self._stop()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, transport: Transport) -> bool:
        """Handle frames until the session leaves OPEN; return True if the client has left before."""
        session = self._session
        while self._lifecycle.state.reads_frames:
            with anyio.move_on_after(session.idle_s) as waiting:
                data = await transport.receive()
            if waiting.cancelled_caught:
                await session.end_if_idle()
                continue
            if data is None:
                return True
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
        if isinstance(message, SessionEnd):
            self._waits_for_client = False
            return True
        try:
            if not isinstance(message, EventAck):
                raise RemoteProtocolError("session_resume_conflict", "A session is open on this connection.", "type")
            seq = message.server_event_seq
            if not isinstance(seq, int) or isinstance(seq, bool):
                raise RemoteProtocolError("invalid_event_ack", "server_event_seq is a number.", "server_event_seq")
            self.outbox.journal.acknowledge(seq)
        except RemoteProtocolError as error:
            await self._session.reject(error, message.event_id if isinstance(message.event_id, str) else None)
        return True

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _write(self, transport: Transport) -> None:
        """Send frames until the end. A client that has left, or has stopped reading, is detached."""
        try:
            while True:
                item = await self.outbox.get()
                with anyio.fail_after(self._stall_s):
                    if isinstance(item, CloseFrame):
                        await transport.close(item.code, item.reason)
                        self._close_sent()
                        break
                    await transport.send(item)
        except TimeoutError:
            log.info("session %s: the client has not read for %.0f s", self._session.id, self._stall_s)
        except TransportClosed:
            log.info("session %s: the client is gone", self._session.id)
            if not self._lifecycle.state.is_running:
                self.abandon()
        # No frame is sent over this transport any more, so no task may wait for room in it.
        self._stop()

    def _close_sent(self) -> None:
        # The session may have been abandoned while the transport was being closed.
        if self._lifecycle.state is not Lifecycle.CLOSED:
            self._lifecycle.apply(LifecycleEvent.CLOSE_SENT)
            self._changed.notify()
