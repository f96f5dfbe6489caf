"""The common part of all live sessions: lifecycle, outbox, attachment, and the entry in the server's registry.

`LiveRealtime` and `LiveStream` each have one. They decide what is sent and when the session ends.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any

import anyio
import anyio.abc

from antiphon.admission.certificate import Kind
from antiphon.errors import Refused
from antiphon.protocols.connection import TRY_LATER
from antiphon.server.access_log import Fields, current_request, log_fields
from antiphon.server.admission import current_place
from antiphon.server.credentials import Caller
from antiphon.server.state import ServerState
from antiphon.signals import become
from antiphon.transports.attachment import AttachedSession, Attachment
from antiphon.transports.journal import Journal, ResumeToken
from antiphon.transports.lifecycle import Lifecycle, LifecycleEvent, new_lifecycle
from antiphon.transports.outbox import Outbox
from antiphon.transports.transport import STALL_S, Transport

log = logging.getLogger(__name__)
CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY = 1000, 1001, 1008
# The kind of session for a dialect's label in the metrics. The label is more precise than the upgrade request.
KINDS_OF: dict[str, Kind] = {
    "assemblyai": "captions",
    "cartesia": "captions",
    "cartesia_turns": "captions",
    "deepgram": "captions",
    "deepgram_agent": "conversation",
    "elevenlabs_agent": "conversation",
    "flux": "captions",
    "openai": "captions",
    "scribe": "captions",
    "vllm": "captions",
    "duplex": "duplex",
}
CLOSE_TOO_BIG, CLOSE_INTERNAL, CLOSE_MOVED, CLOSE_TRY_LATER = 1009, 1011, 1012, TRY_LATER
# Latencies in a session's last log line. Each kind of measurement maps to the names of its count and its median.
TOLD_LATENCIES = {
    "final": ("turns", "final_ms"),
    "first_answer_sound": ("answers", "first_sound_ms"),
    "first_sound": ("sentences", "first_sound_ms"),
    "first_video_text": ("answers", "first_text_ms"),
    "unit": ("units", "unit_ms"),
}
# Maximum number of latencies kept of each kind; older ones are dropped.
MAX_LATENCIES = 1000
# The time of a drain that is reserved for a session's last transcripts: a fraction of the drain, and at most FINALS_S.
FINALS_PART, FINALS_S = 0.25, 5.0
# Polling interval, in seconds, for a session that is to end. Polls because no event reports the end of playback.
POLL_S = 0.05


class LiveSession:
    """The common part of a live session. Call `serve` once; `outbox` takes frames before that, too.

    This object is a part of `session`, which `caller` opened. A client resumes the session with `token`; without a
    token, it ends with its transport. For `max_waiting`, `waits_detached` and `stall_s` see Outbox and Attachment.
    `memory` is the session's account, which `serve` closes at the end.
    """

    def __init__(
        self,
        session: AttachedSession,
        state: ServerState,
        caller: Caller,
        token: ResumeToken | None,
        max_waiting: int,
        *,
        waits_detached: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._session = session
        self._state = state
        self._caller = caller
        self._lifecycle = new_lifecycle()
        self.memory = state.memory.open(caller.key)
        resume = state.settings.resume
        journal = Journal(
            time.monotonic, token is not None, max_bytes=resume.journal_mb << 20, max_s=float(resume.journal_s)
        )
        self.outbox = Outbox(journal, max_waiting, waits_detached=waits_detached, on_overflow=self._overflowed)
        self.attachment = Attachment(session, self.outbox, self._lifecycle, token, resume.grace_s, stall_s=stall_s)
        self._group: anyio.abc.TaskGroup
        # Dialects under which the session is counted in `antiphon_sessions`.
        self._labels: list[str] = []
        self._begun_s = time.monotonic()
        self._request = current_request()
        # Default code and reason with which `finish` closes the transport.
        self._close_code, self._close_reason = CLOSE_NORMAL, ""
        self._has_finished = False
        self._latencies_s: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=MAX_LATENCIES))

    @property
    def lifecycle(self) -> Lifecycle:
        """The session's state. `end`, `finish`, `close` and the attachment change it."""
        return self._lifecycle.state

    @property
    def closing(self) -> tuple[int, str]:
        """The code and the reason with which the transport is closed, or was."""
        return self._close_code, self._close_reason

    async def serve(self, transport: Transport, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Serve `transport`, and later transports that resume the session, until the session is CLOSED.

        Runs `tasks` concurrently, and cancels them at the end. Meanwhile the session is in the server's registry.
        """
        self._state.sessions.enter(self._session)
        self._request.session = self._session.id
        try:
            async with anyio.create_task_group() as self._group:
                for task in tasks:
                    self._group.start_soon(task)
                await self.attachment.serve(transport, self._group)
                self._group.cancel_scope.cancel()
        finally:
            self.attachment.abandon()
            self._state.sessions.leave(self._session)
            self.memory.close()
            for label in self._labels:
                self._state.metrics.sessions.labels(label).dec()

    def measure(self, kind: str, seconds: float) -> None:
        """Record a latency of the session, for the server's metrics and for the session's last log line."""
        self._state.metrics.measure(kind, seconds)
        if kind in TOLD_LATENCIES:
            self._latencies_s[kind].append(seconds)

    def log_end(self, audio_s: float = 0.0, **counts: int) -> None:
        """Log the end of the session in one line: its id, kind, key's hash, close code and reason, duration and median
        latencies.

        `audio_s` is the seconds of audio that it received or made. `counts` are further counts of its kind.
        """
        fields: Fields = {
            "session": self._session.id,
            "request": self._request.id,
            "key": self._caller.label,
            "kind": "+".join(self._labels),
            "code": self._close_code,
            "reason": self._close_reason or ("finished" if self._has_finished else "client_left"),
            "ms": round((time.monotonic() - self._begun_s) * 1000, 1),
            "audio_s": round(audio_s, 2),
        }
        for kind, latencies_s in self._latencies_s.items():
            number, milliseconds = TOLD_LATENCIES[kind]
            fields |= {number: len(latencies_s), milliseconds: round(median(latencies_s) * 1000, 1)}
        log_fields(log, logging.INFO, "session ended", fields | counts)

    def start(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task of the session, which is cancelled at the session's end. Call it only while `serve` runs."""
        self._group.start_soon(task)

    def count_memory(self) -> None:
        """Update the session's memory account. Call it whenever the data that the session holds has changed."""
        self.memory.hold(self._session.num_bytes + self.outbox.journal.num_bytes)

    def count(self, label: str) -> None:
        """Count the session in the metrics under this dialect: as started now, and as live until it ends."""
        self._labels.append(label)
        if label in KINDS_OF and (place := current_place()):
            # Only the first message, or the stored row, shows what a session is for.
            place.becomes(self._state.kind_of(KINDS_OF[label]))
        self._state.metrics.sessions.labels(label).inc()
        self._state.metrics.sessions_started.labels(label).inc()

    # --- the lifecycle ------------------------------------------------------------------------------------------------

    def end_once(self, silent: Callable[[], bool], within_s: float, end: Callable[[], None]) -> None:
        """Call `end` when the session is `silent`, or early enough to send its finals within `within_s` seconds.

        Does not wait. Call it only while `serve` runs.
        """

        async def wait() -> None:
            with anyio.move_on_after(within_s - min(FINALS_S, FINALS_PART * within_s)):
                # A client without a transport sends nothing more.
                await become(lambda: silent() or not self.attachment.state.has_transport, POLL_S)
            end()

        self.start(wait)

    def end(self, code: int, reason: str) -> None:
        """Stop reading, and call the session's `wind_up`. `finish` then closes its transport with this code and reason.

        Does nothing unless the session is OPEN, so only the first call counts. Does not wait.
        """
        if self.lifecycle is Lifecycle.OPEN:
            self._close_code, self._close_reason = code, reason
            self._apply(LifecycleEvent.ENDED)

    def finish(self, code: int | None = None, reason: str | None = None) -> None:
        """Close the transport after the last frame. Without a transport, the session is CLOSED at once.

        `code` and `reason` default to those of `end`, or to 1000 and no reason. Does nothing after the first call, or
        after `close`. Does not wait.
        """
        if self.lifecycle.is_running:
            self._close_code = self._close_code if code is None else code
            self._close_reason = self._close_reason if reason is None else reason
            self._has_finished = True
            self.outbox.end(self._close_code, self._close_reason)
            self._apply(LifecycleEvent.FINISHED)
            if not self.attachment.state.expects_client:
                self.attachment.abandon()

    def close(self, reason: str) -> None:
        """Close the transport with 1000 after the last frame. Without a transport, the session is CLOSED at once.

        Call it for a session that cannot be resumed here, because its client has closed it or another host owns it.
        Does nothing after the first call, or after `finish`. Does not wait.
        """
        if self.lifecycle.is_running:
            self._close_reason = reason
            self.outbox.end(CLOSE_NORMAL, reason)
            self._apply(LifecycleEvent.CLIENT_CLOSED)
            if not self.attachment.state.expects_client:
                self.attachment.abandon()

    def _apply(self, event: LifecycleEvent) -> None:
        self._lifecycle.apply(event)
        self.attachment.stop_reading()

    def _overflowed(self) -> None:
        """Close a session whose output for an absent client exceeds what the journal keeps."""
        log.info("session %s: more waits for its client than the journal keeps", self._session.id)
        self._state.sessions.overflowed.put(self._caller.key, self._session.id, True)
        self.attachment.abandon()


def refusal_in(error: Exception) -> Refused | None:
    """Return the refusal that ended a session, unwrapped from its task groups; None for any other error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Refused) else None
