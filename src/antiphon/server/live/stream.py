"""What live speech and video streams share: counting, resuming, draining and closing.

They are sessions of one WebSocket and one kind of configuration; unlike `/v1/realtime`, they have one dialect each.
"""

from __future__ import annotations

import time
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.control import Control, control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.resume.journal import Journal, ResumeToken
from antiphon.protocols.wire import Frame, random_id
from antiphon.server.state import LiveEntry, ServerState
from antiphon.transports.attachment import Attachment
from antiphon.transports.outbox import Outbox
from antiphon.transports.transport import STALL_S
from antiphon.transports.websocket import WebSocketTransport

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_INTERNAL = 1000, 1001, 1008, 1011


class LiveStream:
    """The part of an AttachedSession that does not depend on what is streamed; LiveSpeech and LiveVideo are the rest.

    `caller`: the API key that opened it, or "". `token`: what resumes it; None: it ends with its WebSocket. `label`:
    its `dialect` in the metrics. `max_waiting`, `waits_detached` and `stall_s` are those of Outbox and Attachment.
    """

    def __init__(
        self,
        socket: WebSocketTransport,
        state: ServerState,
        caller: str,
        token: ResumeToken | None,
        label: str,
        max_waiting: int,
        *,
        waits_detached: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._socket = socket
        self._state = state
        self.caller = caller
        self._label = label
        self.id = random_id("sess-")
        resume = state.settings.resume
        journal = Journal(
            time.monotonic, token is not None, max_bytes=resume.journal_mb << 20, max_s=float(resume.journal_s)
        )
        self._outbox = Outbox(journal, max_waiting, waits_detached=waits_detached, on_overflow=self._overflowed)
        # `handle`, `ending`, `end_if_idle` and `wind_up` are the subclasses'.
        session: Any = self
        self.attachment = Attachment(session, self._outbox, token, resume.grace_s, stall_s=stall_s)
        # When the client last sent something, or was last sent something.
        self._active_s = time.monotonic()
        self._draining = False
        self._close_code, self._close_reason = CLOSE_NORMAL, ""
        self._entry = LiveEntry(caller, lambda: 0.0, self._drain, self.id)

    def _enter(self) -> None:
        """Count the session as live, and let it be found by clients that resume it."""
        metrics = self._state.metrics
        self._state.live.add(self._entry)
        if self.attachment.token:
            self._state.resumable[self.id] = self
            fields = {"session_id": self.id, "resume_token": self.attachment.token.renew()}
            self._outbox.put(Frame({"type": "session.created"} | fields, numbered=False))
        metrics.sessions.labels(self._label).inc()
        metrics.sessions_started.labels(self._label).inc()

    def _leave(self) -> None:
        """Undo `_enter`: the session is over."""
        self.attachment.over.set()
        if self._state.resumable.get(self.id) is self:
            del self._state.resumable[self.id]
        self._state.leave(self._entry)
        self._state.metrics.sessions.labels(self._label).dec()

    # --- AttachedSession ----------------------------------------------------------------------------------------------

    @property
    def idle_s(self) -> float | None:
        """Seconds until the client will have been idle for its limit; at least 1, or the limit if that is shorter.

        The lower bound keeps a stream that is over its limit, but not idle, from being asked without a pause.
        """
        limit_s = self._limit_s
        return max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())

    @property
    def _limit_s(self) -> float:
        """How long the client may be idle, in seconds."""
        raise NotImplementedError

    def control(self, data: str | bytes) -> Control | None:
        """Return the event if it is about the connection: an acknowledgement, or a resume that comes too late."""
        return control(data)

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Send the error in the shape of the resume protocol. Waits while the client does not read."""
        self._outbox.put(refused_frame(random_id, error, event_id if isinstance(event_id, str) else None))
        await self._outbox.wait_for_room()

    async def resumed(self, token: str) -> Frame:
        """Return the `session.resumed` frame: the new token, and how many frames of the client were handled.

        Does not wait: streams are not stored.
        """
        return resumed_frame(random_id, self.id, {}, resume_token=token, received_events=self.attachment.num_received)

    def replaced(self) -> Frame:
        """Return the `session.replaced` frame."""
        return replaced_frame(random_id, self.id)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._close_code, self._close_reason = CLOSE_GOING_AWAY, "server_shutting_down"
        self._draining = True
        self.attachment.stop_reading()

    def _overflowed(self) -> None:
        """End a session of which more was said while its client was away than the journal keeps."""
        self._state.mark_overflowed(self.id)
        self.attachment.over.set()

    def _put(self, frames: list[Frame]) -> bool:
        """Queue the frames; return whether there were any."""
        for frame in frames:
            self._outbox.put(frame)
        return bool(frames)

    def _finish(self, code: int, reason: str) -> None:
        """Have the transport closed after the last frame; without a transport, the session is over at once."""
        self._outbox.end(code, reason)
        if not self.attachment.attached:
            self.attachment.over.set()
