"""One live session of /v1/realtime, whatever carries it: its protocol, its inbox, its tasks. Who is attached to it is the line's (line.py)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.errors import Refused, RemoteProtocolError, StoreError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConfigureConversation,
    ConversationCommand,
    ConversationEvent,
    Item,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    UserTurnCommitted,
)
from antiphon.events.duplex import AcknowledgePlayback, BargeIn, CancelInput, EpochRaised
from antiphon.events.transcription import (
    AppendAudio,
    ConfigureTranscription,
    SessionEnding,
    TranscriptDone,
    TranscriptionCommand,
    TranscriptionEvent,
)
from antiphon.protocols.bridges.base import Bridge
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.resume.journal import Journal, ResumeToken
from antiphon.protocols.wire import BinaryFrame
from antiphon.recording.recorder import Recorder
from antiphon.server.live.persistence import kept
from antiphon.server.state import LiveEntry, ServerState
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.transports.attachment import Attachment
from antiphon.transports.outbox import Outbox
from antiphon.transports.transport import Transport

log = logging.getLogger(__name__)

# Frames that may wait for a client that does not read; then the session waits too, and after STALL_S the client is taken to be gone.
MAX_WAITING_FRAMES = 256
CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_TRY_LATER, CLOSE_INTERNAL = 1001, 1008, 1013, 1011
RATE_WINDOW_S = 2.0
# 5 ms: an append with less is no sound.
MIN_SOUND_SAMPLES = SAMPLE_RATE_HZ // 200
# What does not wait behind sound.
URGENT = (BargeIn, CancelInput, AcknowledgePlayback, ClearOutputAudio)

# After what a conversation is another than it was.
KEPT = (UserTurnCommitted, TranscriptDone, ItemDone, ItemDeleted, ItemTruncated, ResponseCreated, ResponseDone)

RealtimeSession = TranscriptionSession | ConversationSession | DuplexSession


class LiveRealtime:
    """`run()` it with its first transport until the session is over. `wire` is open."""

    def __init__(
        self,
        state: ServerState,
        caller: str,
        wire: RealtimeConnection | DuplexConnection | Bridge,
        transport: Transport,
        *,
        token: ResumeToken | None = None,
        items: Sequence[Item] = (),
    ) -> None:
        self._state = state
        self.caller = caller
        self.wire = wire
        # A conversation of before a restart.
        self._items = items
        self._is_kept = False
        self._first = transport
        self._playback = transport.playback
        settings = state.settings
        self._inbox = Inbox(settings.audio.max_backlog_s, live=settings.audio.overflow == "close")
        self._session: RealtimeSession | None = None
        resume = settings.resume
        journal = Journal(
            time.monotonic, token is not None, max_bytes=resume.journal_mb << 20, max_s=float(resume.journal_s)
        )
        self._outbox = Outbox(journal, MAX_WAITING_FRAMES, overflowed=self._overflowed)
        self.line = Attachment(self, self._outbox, token, resume.grace_s)
        self._group: anyio.abc.TaskGroup
        self._ending: SessionEnding | None = None
        self._end_code = 1000
        self._arrivals: deque[float] = deque()
        self._labels: list[str] = []
        self._box = self._recorder()

    def _recorder(self) -> Recorder | None:
        folder = self._state.settings.server.record
        if not folder:
            return None
        facts = {"began": int(time.time()), "opening": asdict(self.wire.opening), "models": self._state.loaded().names}
        try:
            return Recorder(Path(folder).expanduser(), self.wire.id, facts)
        except StoreError as error:
            # What is to be remembered is not worth more than what is going on.
            log.error("session %s is not recorded: %s", self.wire.id, error)
            return None

    @property
    def audio_s(self) -> float:
        """Seconds of sound that came."""
        return (self._session.audio_s if self._session else 0.0) + self._inbox.backlog_s

    async def run(self) -> None:
        """Until it is over."""
        live = LiveEntry(self.caller, lambda: self._inbox.backlog_s, self._drain, self.wire.id)
        self._state.live.add(live)
        if self.line.token:
            self._state.resumable[self.wire.id] = self
        try:
            async with anyio.create_task_group() as self._group:
                self._push()
                self._group.start_soon(self._expire)
                await self.line.serve(self._first, self._group)
                self._group.cancel_scope.cancel()
        finally:
            self.line.over.set()
            if self._state.resumable.get(self.wire.id) is self:
                del self._state.resumable[self.wire.id]
            if self._is_kept and self._state.kept and not self._state.draining:
                self._state.kept.forget(self.wire.id)
            self._state.leave(live)
            if self._box:
                self._box.close()
            for label in self._labels:
                self._state.metrics.sessions.labels(label).dec()
            if self._session:
                self._state.metrics.audio_s.labels("live").inc(self._session.audio_s)
                log.info("session %s ended after %.1f s of audio", self.wire.id, self._session.audio_s)

    async def _expire(self) -> None:
        await anyio.sleep(self._state.settings.server.session_s or math.inf)
        self._end("session_expired", "Your session hit the maximum duration.", CLOSE_GOING_AWAY)

    # --- what the line asks -----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The session's id, as the client was told."""
        return self.wire.id

    @property
    def ending(self) -> bool:
        """See line.Session."""
        return self._ending is not None

    @property
    def idle_s(self) -> float | None:
        """See line.Session."""
        return self.wire.idle_s

    async def idle(self) -> bool:
        """See line.Session."""
        self._end("idle_timeout", f"Nothing came for {self.wire.idle_s:.0f} s.", CLOSE_GOING_AWAY)
        return True

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """See line.Session."""
        return self.wire.control(data)

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """See line.Session."""
        self.wire.reject(error, event_id)
        await self._flush()

    async def resumed(self, token: str) -> str:
        """See line.Session."""
        await self.keep()
        received_ms = round(self.audio_s * 1000)
        return self.wire.resumed(token, received_events=self.line.num_received, received_audio_ms=received_ms)

    def replaced(self) -> str:
        """See line.Session."""
        return self.wire.replaced()

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def take(self, data: str | bytes | AppendAudio) -> None:
        """See line.Session."""
        audio = self._state.settings.audio
        if isinstance(data, AppendAudio):
            commands: list[TranscriptionCommand | ConversationCommand] = [*self.wire.commands(), data]
        elif len(data) > audio.max_frame_bytes:
            self.wire.too_large(audio.max_frame_bytes)
            commands = []
        else:
            self.wire.receive(data)
            commands = self.wire.commands()
        if self._box:
            commands = [self._boxed(i) for i in commands]
            if not isinstance(data, AppendAudio):
                self._box.event_in(data)
        # Sound is bounded by the backlog, however fast it comes; what brings none is bounded here.
        num_samples = sum(len(i.pcm) for i in commands if isinstance(i, AppendAudio))
        if num_samples < MIN_SOUND_SAMPLES and self._too_many():
            self._end("rate_limit_exceeded", f"more than {audio.max_events_per_s} events a second", CLOSE_POLICY)
            return
        for item in commands:
            if isinstance(item, ConfigureTranscription | ConfigureConversation) and self._session is None:
                self._start(item)
                continue
            if isinstance(self._session, ConversationSession | DuplexSession) and (
                isinstance(item, URGENT) or (isinstance(item, CancelResponse) and self._session.answering)
            ):
                await self._session.handle(item)
                continue
            if isinstance(item, ConfigureConversation):
                self._keep()
            try:
                await self._inbox.put(item)
            except Refused as refusal:
                self._end("input_audio_buffer_overflow", str(refusal), CLOSE_POLICY)
                return
        await self._flush()
        if self.wire.closing:
            self._close()

    def _close(self) -> None:
        """The client wants to go, at once."""
        self.wire.closed()
        self._push()
        self.line.token = None
        self._outbox.end(1000, "session_closed")

    def _start(self, first: ConfigureTranscription | ConfigureConversation) -> None:
        models, metrics = self._state.loaded(), self._state.metrics
        if isinstance(first, ConfigureConversation):
            assert models.conversation_model
            make = partial(
                ConversationSession,
                first.config,
                models.required_transcriber,
                models.required_vad,
                models.conversation_model,
                self._inbox,
                new_id=self.wire.new_id,
                min_commit_ms=self.wire.min_commit_ms,
                measure=metrics.measure,
                judge=models.turn_detector,
                reader=models.image_reader,
            )
            if first.config.duplex:
                self._session = DuplexSession(first.config.duplex, make, self._emit, epoch=self.wire.epoch)
            else:
                self._session = make(emit=self._emit, playback=self._playback)
            self._session.conversation.restore(self._items)
        else:
            self._session = TranscriptionSession(
                first.config,
                models.required_transcriber,
                models.required_vad,
                self._inbox,
                self._emit,
                min_commit_ms=self.wire.min_commit_ms,
                measure=metrics.measure,
            )
        self._labels.append(self.wire.dialect)
        metrics.sessions.labels(self.wire.dialect).inc()
        metrics.sessions_started.labels(self.wire.dialect).inc()
        log.info("session %s begins (%s)", self.wire.id, self.wire.dialect)
        if player := self._playback:
            player.attach(lambda output: self._group.start_soon(self._emit, output))
        self._keep()
        self._group.start_soon(self._run_session, self._session)

    async def keep(self) -> None:
        """Have it kept as it is now."""
        if written := self._keep():
            await asyncio.wrap_future(written)

    def _keep(self) -> Future[None] | None:
        """What is said and heard outlives the server, if its client may come back. The result is there when it is written."""
        talks = isinstance(self._session, ConversationSession | DuplexSession)
        if self.line.token and self._state.kept and (talks or self._items):
            items = self._session.conversation.items if talks else self._items  # type: ignore[union-attr]
            if row := kept(self.caller, self.wire, self.line.token, items):
                self._is_kept = True
                return self._state.kept.put(row)
        return None

    def _boxed(self, item: TranscriptionCommand | ConversationCommand) -> TranscriptionCommand | ConversationCommand:
        assert self._box
        return AppendAudio(self._box.audio_in(item.pcm)) if isinstance(item, AppendAudio) else item

    def _too_many(self) -> bool:
        """Events without sound, averaged over RATE_WINDOW_S."""
        now = time.monotonic()
        self._arrivals.append(now)
        while self._arrivals[0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        return len(self._arrivals) > self._state.settings.audio.max_events_per_s * RATE_WINDOW_S

    # --- the session and its end ------------------------------------------------------------------------------------------

    async def _run_session(self, session: RealtimeSession) -> None:
        try:
            await session.run()
        except Exception:
            # The session's edge: whatever failed in it ends it alone.
            log.exception("session %s failed", self.wire.id)
            self._end("server_error", "The session failed.", CLOSE_INTERNAL)
        self._inbox.close()
        self._push()
        self._outbox.end(self._end_code, self._ending.code if self._ending else "")
        if not self.line.attached:
            self.line.over.set()

    def _overflowed(self) -> None:
        """More was said while nobody was attached than is kept: who comes back is told so."""
        log.info("session %s: what nobody takes is too much", self.wire.id)
        self._state.forgo(self.wire.id)
        self.line.over.set()

    def _drain(self) -> None:
        self._end("server_shutting_down", "The server is shutting down.", CLOSE_GOING_AWAY)

    def _end(self, code: str, message: str, close_code: int) -> None:
        """Say why, stop reading; what was heard is still transcribed and sent."""
        if self._ending is None:
            self._ending = SessionEnding(code, message)
            self._end_code = close_code
            self.wire.refuse(code, message)
            self._push()
            self.line.stop_reading()

    async def wind_up(self) -> None:
        """See line.Session."""
        await self._flush()
        # The session transcribes what it has, and its end is the connection's.
        self._inbox.close()
        if self._session is None:
            self._outbox.end(self._end_code, self._ending.code if self._ending else "")
            if not self.line.attached:
                self.line.over.set()

    # --- writing ----------------------------------------------------------------------------------------------------------

    async def _emit(self, output: TranscriptionEvent | ConversationEvent) -> None:
        if player := self._playback:
            player.take(output)
        if self._box and isinstance(output, ResponseAudioDelta):
            self._box.audio_out(output.at.item_id, output.pcm, output.rate_hz)
        self.wire.send(output)
        if isinstance(output, KEPT) and (written := self._keep()):
            # What the client is told is there after the server was killed.
            await asyncio.wrap_future(written)
        if isinstance(output, EpochRaised):
            self._outbox.raise_epoch(output.epoch)
        await self._flush()

    def _push(self) -> None:
        for frame in self.wire.frames():
            if self._box and not isinstance(frame, BinaryFrame):
                self._box.event_out(frame)
            self._outbox.put(frame)

    async def _flush(self) -> None:
        self._push()
        await self._outbox.room()
