"""Attaches one transport at a time to a live session, with one task that reads from it and one that writes to it.

A session with a resume token outlives its transport for `grace_s`, and can be resumed on another transport. Without a
token, session and transport end together. The session handles the frames that are read, and puts the frames to write
into its outbox. Two state tables say what is allowed: the session's `lifecycle`, and the state of the attachment.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
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
    """One live session, as its attachment and the server use it. All calls come from one event loop.

    `attachment`: the slot for its transport, which a resuming client takes over. The client needs the attachment's
    token.
    """

    attachment: Attachment

    @property
    def id(self) -> str:
        """The session's id on the wire."""
        ...

    @property
    def caller(self) -> object:
        """The caller that opened the session. Only a caller that compares equal to it may resume the session."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the session currently uses, without the frames in its outbox."""
        ...

    @property
    def backlog_s(self) -> float:
        """Seconds of received audio that the session has not processed yet; 0 for a session without audio."""
        ...

    def drain(self, within_s: float) -> None:
        """Drain the session within `within_s` seconds. Returns at once: `all_left` waits for the end.

        The session first waits until it is silent. It then stops reading, sends the outstanding results and closes.
        """
        ...

    def finish(self) -> None:
        """Send the waiting frames and close, even if the session still has work in progress. Returns at once."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds without a frame after which `end_if_idle` is called; None if it is never called."""
        ...

    async def handle(self, data: ClientData) -> None:
        """Handle one frame, or audio that arrived outside of the frames. No further frame is read until this returns.

        If the session can be resumed, this call is never cancelled, so each frame that counts as received was handled.
        """
        ...

    async def end_if_idle(self) -> None:
        """End the session, unless something else counts as activity. Called after `idle_s` seconds without a frame."""
        ...

    async def wind_up(self) -> None:
        """Finish the outstanding work of a session that is DRAINING, then end the session. No more frames arrive.

        It is called again for each transport that is attached while the session drains.
        """
        ...

    def control(self, data: str | bytes) -> Control | None:
        """Return the event if it concerns the connection, such as an acknowledgement. Otherwise return None."""
        ...

    async def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        """Answer an event about the connection with an error. Waits if the client is slow to read."""
        ...

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        """Return the first frame for a client that has resumed the session. It has the new token and `how`.

        For a stored session, waits until the token is stored too.
        """
        ...

    def replaced(self) -> Sequence[Frame]:
        """Return the last frames for a transport whose session continues on another transport."""
        ...


class Attachment:
    """The slot of one live session, to which one transport at a time is attached.

    The session calls `serve` with its first transport in its own task group. Other connections call `resume`. The
    session shares its `lifecycle`. The attachment reads it, and closes it when no client is attached and no client can
    resume.
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
        # Set when the state of the attachment changes, and when the session is closed.
        self._changed = Signal()
        # Number of frames received from the client, including the frame in progress. A client that resumes sends all
        # later frames again.
        self.num_received = 0
        self._group: anyio.abc.TaskGroup | None = None
        # Cancel scopes of the last attached transport: for all its tasks, and for its reader.
        self._scope = self._reading = anyio.CancelScope()
        self._resuming = anyio.Lock()
        # Whether a session with a token outlives its transport.
        self._waits_for_client = True

    @property
    def state(self) -> AttachmentState:
        """Whether a transport is attached at present, or is about to be."""
        return self._place.state

    @property
    def token(self) -> ResumeToken | None:
        """The token that resumes the session. If None, the session cannot be resumed and ends with its transport."""
        return self._token if self._lifecycle.state.resumable else None

    async def serve(self, transport: Transport, group: anyio.abc.TaskGroup) -> None:
        """Serve the first transport, then the transports that resume. Returns when the session is closed.

        `group` is the session's task group. The grace period and the end of a drained session run in it.
        """
        self._group = group
        self._take_place()
        await self._attach(transport)
        await self._closed()

    def stop_reading(self) -> None:
        """Stop reading frames, because the session has left OPEN. Does not wait.

        Starts to wind up the session if it is draining and has no transport.
        """
        self._reading.cancel()
        draining = self._lifecycle.state is Lifecycle.DRAINING
        if draining and not self._place.state.has_transport and self._group:
            self._group.start_soon(self._session.wind_up)

    def abandon(self) -> None:
        """Close the session at once, without sending the waiting frames. No-op for a closed session. Does not wait."""
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
        """Serve the session over `transport` until that is gone. Closes a transport that is still attached.

        - `last_received`: the number of the last frame that the client has.
        - `has_left`: waits a moment for the client to leave. It is called if the client may have given up. If it has
          left, nothing is replaced.

        Raises RemoteProtocolError (`unknown_session`, `invalid_resume_token`, `invalid_event_ack`) or JournalGap. The
        attached transport then stays.
        """
        journal = self.outbox.journal
        async with self._resuming:
            # Do this before `_check`, which would make the previous token the current token again.
            if has_left and self.doubts(token) and await self._has_given_up(token, has_left):
                log.info("session %s: an attempt to resume it was given up", self._session.id)
                return
            self._check(token)
            # Check first: a client that cannot be served must not end the connection of another client.
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
            # Take the slot before the lock is released, so that the next client finds it taken.
            self._take_place()
        log.info("session %s is resumed", self._session.id)
        await self._attach(transport)

    def continue_from(
        self, num_received: int, last_received: int, first_frame: Frame, frames: Sequence[SentFrame] = ()
    ) -> None:
        """Prepare a session that was restored from the store. Call it before `serve`.

        `num_received`: how many of the client's frames the restored session contains. `first_frame` is sent first. Then
        the frames in `frames`, from another host, are sent, except those up to `last_received`. If there are none,
        numbering continues at `last_received` + 1.
        """
        self.num_received = num_received
        journal = self.outbox.journal
        if not journal.take_over(frames, last_received):
            journal.continue_from(last_received)
        self.outbox.put_first(first_frame)

    def doubts(self, token: str) -> bool:
        """Whether a client with this token may have given up.

        That is the case if the attached transport got a newer token, but the client has sent nothing on it yet.
        """
        return bool(self._place.state.has_transport and self._token and self._token.is_previous(token))

    async def _has_given_up(self, token: str, has_left: Callable[[], Awaitable[bool]]) -> bool:
        """Return whether a doubted client leaves. Stops waiting when `doubts` becomes False."""
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
        """Change the state of the attachment, and wake the tasks that depend on it."""
        self._place.apply(event)
        self.outbox.set_attached(self._place.state.takes_frames)
        self._changed.notify()

    def _stop(self) -> None:
        """Stop sending over the transport, and end its tasks. A frame in progress is still handled completely."""
        if self._place.state is AttachmentState.ATTACHED:
            self._apply(AttachmentEvent.TRANSPORT_STOPPED)
        self._scope.cancel()

    def _wait_or_abandon(self) -> None:
        """If the slot is empty and no client is resuming, begin the grace period or end the session."""
        if self._place.state is not AttachmentState.DETACHED:
            return
        if self._token is None or not self._waits_for_client or not self._lifecycle.state.is_running:
            self.abandon()
        else:
            # A session that drains ends by itself, or at the latest with the grace period.
            log.info("session %s waits to be resumed", self._session.id)
            assert self._group
            if self._lifecycle.state is Lifecycle.DRAINING:
                # The drain may have begun while the transport was leaving. The transport's tasks are cancelled then.
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

    # --- attaching and detaching transports ---------------------------------------------------------------------------

    def _check(self, token: str) -> ResumeToken:
        """Return the session's token if `token` matches it. Raises RemoteProtocolError otherwise."""
        self._check_open()
        resume_token = self.token
        if resume_token is None or not resume_token.matches(token):
            raise RemoteProtocolError("invalid_resume_token", "The token does not resume this session.", "resume_token")
        return resume_token

    def _check_open(self) -> None:
        if self._lifecycle.state is Lifecycle.CLOSED:
            raise RemoteProtocolError("unknown_session", "The session has just ended.", "session_id")

    async def _replaced(self) -> None:
        """Cancel the tasks of a REPLACED transport, and wait until they have ended."""
        if self._place.state is AttachmentState.REPLACED:
            # A frame in progress must still be counted. Its handler no longer waits for room in the outbox.
            self._scope.cancel()
        while self._place.state is AttachmentState.REPLACED:
            await self._changed.wait()

    def _take_place(self) -> None:
        self._scope, self._reading = anyio.CancelScope(), anyio.CancelScope()
        self._apply(AttachmentEvent.TRANSPORT_ATTACHED)

    async def _attach(self, transport: Transport) -> None:
        """Read from and write to `transport`, which has the slot, until one of the tasks or the session ends."""
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
                        # No task would read later frames.
                        self._stop()
        except* Exception:
            # This is the session's outermost handler. A failure to handle its frames ends this session only.
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
                for frame in self._session.replaced():
                    await transport.send(frame.encode())
                await transport.close(1000, "session_replaced")
        except (TransportClosed, TimeoutError):
            return

    async def _stop_when_closed(self) -> None:
        await self._closed()
        self._stop()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, transport: Transport) -> bool:
        """Handle frames until the session leaves OPEN. Return True if the client leaves before that."""
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
                # Handle a frame completely or not at all, because a client that resumes does not send it again.
                with anyio.CancelScope(shield=True) if self._token else nullcontext():
                    self.num_received += 1
                    await session.handle(data)
        return False

    async def _control(self, token: ResumeToken, data: str | bytes) -> bool:
        """Handle an event about the connection itself. Returns False for any other event."""
        # The client has sent a frame after it received this token, so the token is confirmed.
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
        """Send frames until the last one. Detaches the transport if the client has left or stopped reading."""
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
        # No more frames are sent over this transport, so no task may wait for room in the outbox.
        self._stop()

    def _close_sent(self) -> None:
        # The session may have been abandoned while the transport was being closed.
        if self._lifecycle.state is not Lifecycle.CLOSED:
            self._lifecycle.apply(LifecycleEvent.CLOSE_SENT)
            self._changed.notify()
