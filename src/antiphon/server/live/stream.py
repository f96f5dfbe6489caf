"""What live speech and video streams share: counting, resuming, idle clients, draining and closing.

They are sessions of one WebSocket and one kind of configuration; unlike `/v1/realtime`, they have one dialect each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.resume import Control, HowResumed, control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.wire import Frame, random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.session import CLOSE_GOING_AWAY, CLOSE_NORMAL, LiveSession
from antiphon.server.state import ServerState
from antiphon.transports.journal import ResumeToken
from antiphon.transports.transport import STALL_S, ClientData
from antiphon.transports.websocket import WebSocketTransport


class StreamedSession(Protocol):
    """What is carried by a LiveStream: a dialect and the session that it speaks to. All calls come from one event loop.

    Its frames go out by `LiveStream.put`; it ends by `LiveStream.finish`.
    """

    @property
    def idle_limit_s(self) -> float:
        """How long neither side may send anything, in seconds; it may change with the configuration."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory that it holds for its client now."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is being produced for the client. While something is, the client may be silent beyond its
        limit.
        """
        ...

    async def handle(self, data: str | bytes) -> None:
        """Handle one message of the client. The next is read when this returns, so it waits where the client is to be
        slowed down. Errors of the client are answered, and raise nothing.
        """
        ...

    @property
    def is_silent(self) -> bool:
        """Whether the client is in the middle of nothing: what it has begun to say or ask is complete."""
        ...

    def refuse_idle(self) -> None:
        """Put the frames that tell the client that it was idle for too long. The stream finishes after that."""
        ...

    async def wind_up(self) -> None:
        """The server drains, and no more messages come: finish what was asked for, and then the stream."""
        ...


class LiveStream:
    """Carries one streamed session over a WebSocket, and over those that resume: `serve` it once.

    `caller`: what opened it. `token`: what resumes it; None: it ends with its WebSocket. `label`: its `dialect` in the
    metrics. `max_waiting`, `waits_detached` and `stall_s` are those of Outbox and Attachment. `attachment`: the place
    of its WebSocket, where a client that resumes attaches another one. `live`: what it has in common with all sessions.
    """

    # What a stream receives is not queued as audio that it could be behind with.
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
    ) -> None:
        self._session = session
        self._socket = socket
        self.caller = caller
        self._label = label
        # As the client knows it.
        self.id = random_id("sess-")
        self.live = LiveSession(self, state, caller, token, max_waiting, waits_detached=waits_detached, stall_s=stall_s)
        self.attachment = self.live.attachment
        # When the client last sent something, or was last sent something.
        self._active_s = time.monotonic()

    async def serve(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Serve until the stream is closed, with `tasks` running beside it; they are cancelled at the end."""
        if token := self.attachment.token:
            fields = {"session_id": self.id, "resume_token": token.renew()}
            self.live.outbox.put(Frame({"type": "session.created"} | fields, numbered=False))
        self.live.count(self._label)
        await self.live.serve(self._socket, *tasks)

    # --- for the session that is streamed -----------------------------------------------------------------------------

    def put(self, frames: Sequence[Frame]) -> bool:
        """Queue the frames; return whether there were any."""
        for frame in frames:
            self.live.outbox.put(frame)
        if frames:
            self.live.count_memory()
        return bool(frames)

    def mark_active(self) -> None:
        """Begin the idle time anew: the client was sent something. What it sends itself counts without this."""
        self._active_s = time.monotonic()

    def finish(self, code: int | None = None, reason: str | None = None) -> None:
        """Have the WebSocket closed after the last frame: with 1000, or as the drain says, unless told otherwise.

        Only the first call counts. Does not wait.
        """
        self.live.finish(code, reason)

    # --- AttachedSession: what the server asks ------------------------------------------------------------------------

    def drain(self, within_s: float) -> None:
        """Once the client is in the middle of nothing, read no more messages, and have the session wind up: what was
        asked for is sent. Does not wait.
        """
        end = partial(self.live.end, CLOSE_GOING_AWAY, "server_shutting_down")
        self.live.end_once(lambda: self._session.is_silent, within_s, end)

    @property
    def num_bytes(self) -> int:
        return self._session.num_bytes

    # --- AttachedSession: what its attachment asks --------------------------------------------------------------------

    @property
    def idle_s(self) -> float | None:
        """Seconds until the client will have been idle for its limit; at least 1, or the limit if that is shorter.

        The lower bound keeps a stream that is over its limit, but not idle, from being asked without a pause.
        """
        limit_s = self._session.idle_limit_s
        return max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())

    async def handle(self, data: ClientData) -> None:
        """Hand a message to the session, and begin the idle time anew. Waits as the session does. Streams take no audio
        beside their messages. A message for which there is no memory is answered with an error.
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
        """Finish the stream if neither side has sent anything for the limit, and nothing is being produced."""
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
        """Return the `session.resumed` frame: the new token, how, and how many frames of the client were handled.

        Does not wait: streams are not stored.
        """
        received = self.attachment.num_received
        return resumed_frame(random_id, self.id, {}, resume_token=token, received_events=received, how=how)

    def replaced(self) -> Frame:
        return replaced_frame(random_id, self.id)
