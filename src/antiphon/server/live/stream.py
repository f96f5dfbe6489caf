"""The common part of live speech and video streams: metrics, resuming, idle clients, draining and closing.

A stream has a WebSocket and one kind of configuration. Unlike `/v1/realtime`, each endpoint has only one dialect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import anyio

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.resume import Control, HowResumed, control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.wire import Frame, random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.session import CLOSE_GOING_AWAY, CLOSE_NORMAL, LiveSession
from antiphon.server.state import ServerState
from antiphon.transports.journal import ResumeToken
from antiphon.transports.transport import STALL_S, ClientData
from antiphon.transports.websocket import WebSocketTransport

# Maximum average rate, in messages per second, at which `pace` lets a client's messages be read.
MESSAGES_PER_S = 1000.0


class StreamedSession(Protocol):
    """The session that a LiveStream carries, along with its dialect. All calls are made in one event loop.

    It sends frames with `LiveStream.put`, and ends with `LiveStream.finish`.
    """

    @property
    def idle_limit_s(self) -> float:
        """The idle timeout, in seconds without a message from either side. The configuration may change it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the session holds for its client now."""
        ...

    @property
    def idle(self) -> bool:
        """True if nothing is being produced for the client. The idle timeout applies only then."""
        ...

    async def handle(self, data: str | bytes) -> None:
        """Handle one message of the client. Errors of the client are answered, not raised.

        The next message is not read until this returns. So an implementation waits here to slow the client down.
        """
        ...

    @property
    def is_silent(self) -> bool:
        """True if the client has finished everything that it began to say or ask."""
        ...

    def refuse_idle(self) -> None:
        """Send the frames that report the idle timeout to the client. The stream finishes after that."""
        ...

    async def wind_up(self) -> None:
        """Finish all requested work, and then finish the stream. Called after the last message was read."""
        ...


class StreamCopy(Protocol):
    """The copy of a streamed session in the session store."""

    @property
    def can_move(self) -> bool:
        """Whether another host can continue the session now."""
        ...

    async def move(self, within_s: float) -> None:
        """End the session here within `within_s` seconds, and give it to another host."""
        ...

    async def store_token(self) -> int | None:
        """Store the session's new token, and return how many messages the client need not send again, even if this host
        dies. None if the session is not stored. Raises RemoteProtocolError (`session_elsewhere`).
        """
        ...


class LiveStream:
    """Carries one streamed session over a WebSocket, and over later WebSockets that resume it. Call `serve` once.

    `caller` opened the session. A client resumes it with `token`; without a token, it ends with its WebSocket. `label`
    is its `dialect` in the metrics. For `max_waiting`, `waits_detached` and `stall_s` see Outbox and Attachment. A
    client that resumes attaches its WebSocket to `attachment`. `live` is the part common to all live sessions.
    `session_id` is the id of a session that another host has begun; "" for a new session. `copy` is the session's copy
    in the session store; None if sessions of this kind end with their host.
    """

    # A stream has no queue of received audio.
    backlog_s = 0.0

    def __init__(
        self,
        session: StreamedSession,
        socket: WebSocketTransport,
        state: ServerState,
        caller: Caller,
        token: ResumeToken | None,
        label: str,
        max_waiting: int,
        *,
        waits_detached: bool = False,
        stall_s: float = STALL_S,
        session_id: str = "",
    ) -> None:
        self._session = session
        self._socket = socket
        self.caller = caller
        self._label = label
        # The session id that the client knows.
        self.id = session_id or random_id("sess-")
        self._is_new = not session_id
        self.copy: StreamCopy | None = None
        self.live = LiveSession(self, state, caller, token, max_waiting, waits_detached=waits_detached, stall_s=stall_s)
        self.attachment = self.live.attachment
        # Time at which either side last sent something, on the monotonic clock.
        self._active_s = self._began_s = time.monotonic()
        # Number of messages for which `pace` was called.
        self._num_paced = 0

    async def serve(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Serve until the stream is closed. Runs `tasks` concurrently, and cancels them at the end."""
        if self._is_new and (token := self.attachment.token):
            fields = {"session_id": self.id, "resume_token": token.renew()}
            self.live.outbox.put(Frame({"type": "session.created"} | fields, numbered=False))
        self.live.count(self._label)
        await self.live.serve(self._socket, *tasks)

    # --- called by the streamed session -------------------------------------------------------------------------------

    def put(self, frames: Sequence[Frame]) -> bool:
        """Queue the frames for sending; return whether there were any."""
        for frame in frames:
            self.live.outbox.put(frame)
        if frames:
            self.live.count_memory()
        return bool(frames)

    async def pace(self) -> None:
        """Delay a client that sends more than MESSAGES_PER_S. Call it after each message that costs little itself.

        Always yields to the event loop, so that a fast client does not starve other tasks.
        """
        self._num_paced += 1
        due_s = self._began_s + self._num_paced / MESSAGES_PER_S - 1.0
        await anyio.sleep(max(0.0, due_s - time.monotonic()))

    def mark_active(self) -> None:
        """Restart the idle timeout after something was sent. The client's messages restart it without this call."""
        self._active_s = time.monotonic()

    def finish(self, code: int | None = None, reason: str | None = None) -> None:
        """Close the WebSocket after the last frame. Only the first call counts. Does not wait.

        `code` and `reason` default to those of the drain, or to 1000.
        """
        self.live.finish(code, reason)

    # --- AttachedSession: called by the server ------------------------------------------------------------------------

    def drain(self, within_s: float) -> None:
        """Stop reading when the session is silent, or after `within_s` seconds at the latest; then call its `wind_up`.

        All requested output is still sent. Does not wait. A session that another host can continue is handed over
        instead.
        """
        if self.copy and self.copy.can_move and self.live.lifecycle.reads_frames:
            self.live.start(partial(self.copy.move, within_s))
            return
        end = partial(self.live.end, CLOSE_GOING_AWAY, "server_shutting_down")
        self.live.end_once(lambda: self._session.is_silent, within_s, end)

    @property
    def num_bytes(self) -> int:
        return self._session.num_bytes

    # --- AttachedSession: called by its attachment --------------------------------------------------------------------

    @property
    def idle_s(self) -> float | None:
        """Seconds until the idle timeout; at least 1, or the timeout if that is shorter.

        Without the lower bound, a stream that is past the timeout but still producing would be polled without a pause.
        """
        limit_s = self._session.idle_limit_s
        return max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())

    async def handle(self, data: ClientData) -> None:
        """Pass a message to the session, and restart the idle timeout. Waits until the session has handled the message.

        If memory is short, the message is answered with an error. `data` is always a message, since streams have no
        separate audio track.
        """
        assert isinstance(data, str | bytes)
        self.mark_active()
        try:
            self.live.memory.check(len(data))
        except Refused as refusal:
            await self.reject(RemoteProtocolError("memory_limit_exceeded", f"The server is full: {refusal}."), None)
            return
        await self._session.handle(data)
        self.live.count_memory()

    async def end_if_idle(self) -> None:
        """Finish the stream if the idle timeout has expired and nothing is being produced."""
        if time.monotonic() >= self._active_s + self._session.idle_limit_s and self._session.idle:
            self._session.refuse_idle()
            self.finish(CLOSE_NORMAL, "timeout")

    async def wind_up(self) -> None:
        await self._session.wind_up()

    def control(self, data: str | bytes) -> Control | None:
        return control(data)

    async def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        self.live.outbox.put(refused_frame(random_id, error, event_id))
        await self.live.outbox.wait_for_room()

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        """Return the `session.resumed` frame, with the new token, `how`, and the number of client frames handled.

        Waits until the token is stored, if the session is stored. Raises RemoteProtocolError (`session_elsewhere`) if
        another host owns the session.
        """
        stored_events = await self.copy.store_token() if self.copy else None
        facts = {} if stored_events is None else {"stored_events": stored_events}
        received = self.attachment.num_received
        return resumed_frame(random_id, self.id, {}, resume_token=token, received_events=received, **facts, how=how)

    def replaced(self) -> list[Frame]:
        return [replaced_frame(random_id, self.id)]
