"""What the sessions of one socket and one configuration share (speech, video): how they are counted, resumed, drained and ended at their line."""

from __future__ import annotations

import time
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume.control import control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.resume.journal import Journal, ResumeToken
from antiphon.protocols.wire import BinaryFrame, frame, random_id
from antiphon.server.state import LiveEntry, ServerState
from antiphon.transports.attachment import Attachment
from antiphon.transports.outbox import Outbox
from antiphon.transports.transport import STALL_S
from antiphon.transports.websocket import WebSocketTransport

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_INTERNAL = 1000, 1001, 1008, 1011


class LiveStream:
    """A line.Session but for what is said over it. `label`: what metrics call it. `waits_detached`: see Outbox; without it, what nobody takes overflows."""

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
        self._outbox = Outbox(journal, max_waiting, waits_detached=waits_detached, overflowed=self._overflowed)
        self.line = Attachment(self, self._outbox, token, resume.grace_s, stall_s=stall_s)  # type: ignore[arg-type]
        self._active_s = time.monotonic()
        self._draining = False
        self._code, self._reason = CLOSE_NORMAL, ""
        self._live = LiveEntry(caller, lambda: 0.0, self._drain, self.id)

    def _enter(self) -> None:
        """It begins: it is counted, and can be found by who resumes it."""
        metrics = self._state.metrics
        self._state.live.add(self._live)
        if self.line.token:
            self._state.resumable[self.id] = self
            shown = {"session_id": self.id, "resume_token": self.line.token.renew()}
            self._outbox.put(frame(type="session.created", **shown))
        metrics.sessions.labels(self._label).inc()
        metrics.sessions_started.labels(self._label).inc()

    def _leave(self) -> None:
        """It is over."""
        self.line.over.set()
        if self._state.resumable.get(self.id) is self:
            del self._state.resumable[self.id]
        self._state.leave(self._live)
        self._state.metrics.sessions.labels(self._label).dec()

    # --- what the line asks -----------------------------------------------------------------------------------------------

    @property
    def idle_s(self) -> float | None:
        """See line.Session."""
        limit_s = self._limit_s
        return max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())

    @property
    def _limit_s(self) -> float:
        raise NotImplementedError

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """See line.Session."""
        return control(data)

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """See line.Session."""
        self._outbox.put(refused_frame(random_id, error, event_id if isinstance(event_id, str) else None))
        await self._outbox.room()

    async def resumed(self, token: str) -> str:
        """See line.Session."""
        return resumed_frame(random_id, self.id, {}, resume_token=token, received_events=self.line.num_received)

    def replaced(self) -> str:
        """See line.Session."""
        return replaced_frame(random_id, self.id)

    # --- its end ----------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._code, self._reason = CLOSE_GOING_AWAY, "server_shutting_down"
        self._draining = True
        self.line.stop_reading()

    def _overflowed(self) -> None:
        """More was said while nobody was attached than is kept: who comes back is told so."""
        self._state.forgo(self.id)
        self.line.over.set()

    def _put(self, frames: list[str | bytes]) -> bool:
        """Give on what the wire has; whether it had anything."""
        for made in frames:
            self._outbox.put(made if isinstance(made, str) else BinaryFrame.of(made))
        return bool(frames)

    def _finish(self, code: int, reason: str) -> None:
        self._outbox.end(code, reason)
        if not self.line.attached:
            self.line.over.set()
