"""One live session of `/v1/realtime`, `/v1/duplex` or a bridge, whatever transport carries it.

It connects a wire (the protocol), an inbox and a session. How far it has come, which transport is attached, and
resuming are those of every live session (`server/live/session.py`); what the messages mean is the wire's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.errors import Refused, RemoteProtocolError, StoreError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConfigureConversation,
    CreateItem,
    CreateResponse,
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
from antiphon.events.size import num_bytes
from antiphon.events.transcription import (
    AppendAudio,
    ConfigureTranscription,
    SessionEnding,
    TranscriptDone,
)
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.resume.control import Control, state_degraded_frame
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.wire import Frame
from antiphon.recording.recorder import Recorder
from antiphon.recording.tape import SessionFacts
from antiphon.server.live.command_bounds import CommandBounds
from antiphon.server.live.persistence import stored_session
from antiphon.server.live.realtime_session import RealtimeConversation, RealtimeSession
from antiphon.server.live.session import (
    CLOSE_GOING_AWAY,
    CLOSE_INTERNAL,
    CLOSE_NORMAL,
    CLOSE_POLICY,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
    LiveSession,
)
from antiphon.server.state import Caller, ServerState
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.transports.attachment import Attachment, ClientData
from antiphon.transports.transport import Transport

log = logging.getLogger(__name__)

# Frames that may wait for a client that does not read. The session waits then; after STALL_S the client is taken to be
# gone.
MAX_WAITING_FRAMES = 256
# How long a write to the store may hold a session's frames back, and how long once its client is told of the failure.
STORE_S, STORE_DEGRADED_S = 3.0, 0.1
# A frame of this size is decoded in a thread: base64 and resampling of less take some 3 ms.
LARGE_FRAME_BYTES = 256 << 10
# 5 ms. A frame with less audio counts as an event without audio.
MIN_AUDIO_SAMPLES = SAMPLE_RATE_HZ // 200
# Commands that do not wait behind audio in the inbox.
URGENT = (BargeIn, CancelInput, AcknowledgePlayback, ClearOutputAudio)
# Events after which a conversation is stored again, since its configuration or its history has changed.
STORED_AFTER = (
    UserTurnCommitted,
    TranscriptDone,
    ItemDone,
    ItemDeleted,
    ItemTruncated,
    ResponseCreated,
    ResponseDone,
)


class LiveRealtime:
    """Serves one connection, and what is resumed of it: `run` it once, with an open `wire` and its first transport.

    `first_frames`: what opening the wire gave. `caller`: what opened it. `token`: what resumes it;
    None: it ends with its transport. `items`: the history of a conversation that was restored from the store. The
    transport is released by its own route.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        wire: WireConnection,
        transport: Transport,
        *,
        first_frames: Sequence[Frame] = (),
        token: ResumeToken | None = None,
        items: Sequence[Item] = (),
    ) -> None:
        self._state = state
        self.caller = caller
        self.wire = wire
        self._items = items
        # Frames of events whose effect is being stored, before those that were written after them.
        self._unsent = list(first_frames)
        self._is_stored = False
        # Whether the client was told that its conversation cannot be stored.
        self._is_degraded = False
        self._transport = transport
        self._playback = transport.playback
        settings = state.settings
        self._inbox = Inbox(settings.audio.max_backlog_s, live=settings.audio.overflow == "close")
        # Begins with the configuration. Where it holds a conversation, `_conversation` is the same session.
        self._session: RealtimeSession | None = None
        self._conversation: RealtimeConversation | None = None
        self._live = LiveSession(self, state, token, MAX_WAITING_FRAMES)
        self._outbox = self._live.outbox
        self._bounds = CommandBounds(self._live.memory, settings.audio.max_events_per_s)
        # Not set while a thread decodes a frame.
        self._wire_is_free = anyio.Event()
        self._wire_is_free.set()
        # The memory of its configuration.
        self._config_bytes = 0
        self._recorder = self._open_recorder()

    def _open_recorder(self) -> Recorder | None:
        folder = self._state.settings.server.record
        if not folder:
            return None
        facts = SessionFacts(
            id=self.wire.id,
            began=int(time.time()),
            opening=msgspec.Raw(msgspec.json.encode(self.wire.opening)),
            models=tuple(self._state.loaded().names),
        )
        try:
            return Recorder(Path(folder).expanduser(), facts, max_bytes=self._state.settings.server.record_mb << 20)
        except StoreError as error:
            # A session that cannot be recorded is still served.
            log.error("session %s is not recorded: %s", self.wire.id, error)
            return None

    @property
    def num_bytes(self) -> int:
        """The memory of the conversation, of its configuration, and of the commands that wait."""
        kept = self._conversation.conversation.num_bytes if self._conversation else 0
        return kept + self._config_bytes + self._inbox.num_bytes

    @property
    def audio_s(self) -> float:
        """Seconds of audio received from the client, those that wait in the inbox included."""
        return (self._session.audio_s if self._session else 0.0) + self._inbox.backlog_s

    async def run(self) -> None:
        """Serve until the session is over: ended by either side, or not resumed within the grace period.

        Failures of the session end it alone and are logged; none is raised.
        """
        try:
            self._push()
            await self._live.serve(self._transport, self._expire)
        finally:
            if self._is_stored and self._state.session_store and not self._state.draining:
                self._state.session_store.forget(self.wire.id)
            if self._recorder:
                self._recorder.close()
            self._live.log_end(self._session.audio_s if self._session else 0.0)
            if self._session:
                self._state.metrics.audio_s.labels("live").inc(self._session.audio_s)

    async def _expire(self) -> None:
        await anyio.sleep(self._state.settings.server.session_s or math.inf)
        self._end("session_expired", "Your session hit the maximum duration.", CLOSE_GOING_AWAY)

    # --- LiveEntry ----------------------------------------------------------------------------------------------------

    @property
    def attachment(self) -> Attachment:
        """The place of its transport, where a client that resumes attaches another one. It has the session's token."""
        return self._live.attachment

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that wait in the inbox, where each command without audio counts as 10 ms or more."""
        return self._inbox.backlog_s

    def drain(self) -> None:
        """End the session since the server stops: what was heard is still transcribed and sent. Does not wait."""
        self._end("server_shutting_down", "The server is shutting down.", CLOSE_GOING_AWAY)

    def finish(self) -> None:
        """Send what waits, and close as the drain says; what was asked for is not finished. Does not wait."""
        self._live.finish()

    def hang_up(self) -> None:
        """End a call normally: what was heard is still transcribed and sent. Does not wait."""
        self._live.end(CLOSE_NORMAL, "hung_up")

    # --- AttachedSession ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The session's id, as the client knows it."""
        return self.wire.id

    @property
    def idle_s(self) -> float | None:
        """Seconds without a frame after which the session ends: the dialect's own limit; None: never."""
        return self.wire.idle_s

    async def end_if_idle(self) -> None:
        """End the session with `idle_timeout`: nothing but frames counts as activity here."""
        self._end("idle_timeout", f"Nothing came for {self.wire.idle_s:.0f} s.", CLOSE_GOING_AWAY)

    def control(self, data: str | bytes) -> Control | None:
        """Return the message if it is about the connection, by the dialect's own names."""
        return self.wire.control(data)

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Send an error in the dialect. Waits while the client does not read."""
        await self._flush(self.wire.refuse(error, event_id if isinstance(event_id, str) else None))

    async def resumed(self, token: str) -> Frame:
        """Return the dialect's first frame after a resume: the new token, and how much the server has received.

        Waits until the token is in the session store, if the session is stored.
        """
        await self.store()
        received_ms = round(self.audio_s * 1000)
        return self.wire.resumed(token, received_events=self.attachment.num_received, received_audio_ms=received_ms)

    def replaced(self) -> Frame:
        """Return the dialect's last frame for a transport that another one replaces."""
        return self.wire.replaced()

    async def handle(self, data: ClientData) -> None:
        """Have the wire decode a frame, and give its commands to the session; errors are answered on the wire.

        Waits while the inbox is full (`--overflow wait`), and while the client does not read its answers. The first
        configuration starts the session.
        """
        audio = self._state.settings.audio
        commands = await self._decoded(data, audio.max_frame_bytes)
        # Audio is bounded by the backlog, however fast it comes; events without audio are bounded by their rate.
        num_samples = sum(len(c.pcm) for c in commands if isinstance(c, AppendAudio))
        if num_samples < MIN_AUDIO_SAMPLES and self._bounds.count_event():
            self._end("rate_limit_exceeded", f"more than {audio.max_events_per_s} events a second", CLOSE_POLICY)
            return
        for command in commands:
            if isinstance(command, ConfigureTranscription | ConfigureConversation):
                self._config_bytes = num_bytes(command)
                if self._session is None:
                    self._start(command)
                    continue
            if isinstance(command, CreateItem | CreateResponse):
                try:
                    self._bounds.check(command, len(self._conversation.conversation.items) if self._conversation else 0)
                except RemoteProtocolError as error:
                    await self.reject(error, command.event_id)
                    continue
            conversation = self._conversation
            if conversation and (
                isinstance(command, URGENT) or (isinstance(command, CancelResponse) and conversation.answering)
            ):
                await conversation.handle(command)
                continue
            if isinstance(command, ConfigureConversation):
                self._store()
            try:
                await self._inbox.put(command)
            except Refused as refusal:
                self._end("input_audio_buffer_overflow", str(refusal), CLOSE_POLICY)
                return
        if num_samples < MIN_AUDIO_SAMPLES:
            self._live.count_memory()
            if self._bounds.is_spent:
                self._end("memory_limit_exceeded", "Too much came that could not be kept.", CLOSE_TOO_BIG)
        await self._flush()
        if self.wire.closing:
            self._close()

    async def wind_up(self) -> None:
        """Close the inbox: the session transcribes what is in it, and its end closes the connection."""
        await self._flush()
        self._inbox.close()
        if self._session is None:
            self._live.finish()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _decoded(self, data: ClientData, max_bytes: int) -> Sequence[Command]:
        """Return the commands of a frame, as they are to be handled, and record them. Its answers are queued.

        A frame of LARGE_FRAME_BYTES is decoded in a thread; the session's events wait meanwhile, since they are written
        by the same wire.
        """
        commands: Sequence[Command] = ()
        if isinstance(data, str | bytes) and len(data) > max_bytes:
            self._push(self.wire.too_large(max_bytes))
        else:
            if isinstance(data, str | bytes) and len(data) >= LARGE_FRAME_BYTES:
                self._wire_is_free = anyio.Event()
                try:
                    received = await anyio.to_thread.run_sync(self.wire.feed, data)
                finally:
                    self._wire_is_free.set()
            else:
                received = self.wire.feed(data)
            self._push(received.answers)
            commands = received.commands
        if recorder := self._recorder:
            # The recorder rounds audio to 16 bits; the session gets the same, so that a replay hears what it heard.
            commands = [AppendAudio(recorder.audio_in(c.pcm)) if isinstance(c, AppendAudio) else c for c in commands]
            if not isinstance(data, AppendAudio):
                recorder.event_in(data)
        return commands

    def _close(self) -> None:
        """End at once: the client has closed the session, and what is still to be transcribed is not sent."""
        if self._live.lifecycle.is_running:
            self._push(self.wire.close())
            self._live.close("session_closed")

    # --- the session --------------------------------------------------------------------------------------------------

    def _start(self, first: ConfigureTranscription | ConfigureConversation) -> None:
        metrics = self._state.metrics
        if isinstance(first, ConfigureConversation):
            self._session = self._conversation = self._begin_conversation(first)
        else:
            models = self._state.loaded()
            self._session = TranscriptionSession(
                first.config,
                models.required_transcriber,
                models.required_vad,
                self._inbox,
                self._emit,
                min_commit_ms=self.wire.min_commit_ms,
                measure=metrics.measure,
                turn_detector=models.turn_detector,
            )
        self._live.count(self.wire.dialect)
        log.info("session %s begins (%s)", self.wire.id, self.wire.dialect)
        if player := self._playback:
            player.attach(lambda event: self._live.start(partial(self._emit, event)))
        self._store()
        self._live.start(partial(self._run_session, self._session))

    def _begin_conversation(self, first: ConfigureConversation) -> ConversationSession | DuplexSession:
        models = self._state.loaded()
        assert models.conversation_model
        context = ConversationContext(
            transcriber=models.required_transcriber,
            detector=models.required_vad,
            model=models.conversation_model,
            new_id=self.wire.context.new_id,
            turn_detector=models.turn_detector,
            image_reader=models.image_reader,
            speaker_model=models.speaker_model,
            measure=self._state.metrics.measure,
            count=self._state.metrics.count,
            min_commit_ms=self.wire.min_commit_ms,
            owner=self.caller.key,
        )
        make = partial(ConversationSession, first.config, context, self._inbox)
        session: ConversationSession | DuplexSession
        if first.config.duplex:
            session = DuplexSession(first.config.duplex, make, self._emit, epoch=self.wire.epoch)
        else:
            session = make(emit=self._emit, playback=self._playback)
        session.conversation.restore(self._items)
        return session

    async def _run_session(self, session: RealtimeSession) -> None:
        try:
            await session.run()
        except Exception as error:
            # The session's edge: whatever failed in it ends this session alone.
            if refusal := _refusal(error):
                log.info("session %s is refused: %s", self.wire.id, refusal)
                self._end("resource_exhausted", str(refusal), CLOSE_TRY_LATER)
            else:
                log.exception("session %s failed", self.wire.id)
                self._end("server_error", "The session failed.", CLOSE_INTERNAL)
        self._inbox.close()
        self._live.finish()

    async def store(self) -> None:
        """Store the conversation as it is now, and wait until it is written. Does nothing where it is not stored.

        Where that fails, or takes longer than STORE_S, and when it works again, the client is told before it gets any
        other frame.
        """
        written = self._store()
        if written is None:
            return
        degraded = True
        with anyio.move_on_after(STORE_DEGRADED_S if self._is_degraded else STORE_S), suppress(StoreError):
            await asyncio.wrap_future(written)
            degraded = False
        if degraded != self._is_degraded:
            self._is_degraded = degraded
            told = state_degraded_frame(self.wire.context.new_id, self.wire.id, degraded=degraded)
            self._unsent.insert(0, told)

    def _store(self) -> Future[None] | None:
        """Store the conversation if its client may resume it; the future is done when it is written."""
        store, token = self._state.session_store, self.attachment.token
        if token is None or store is None:
            return None
        items = self._items
        if self._conversation:
            items = self._conversation.conversation.items
        elif not items:
            return None
        row = stored_session(self.caller, self.wire, token, items)
        if row is None:
            return None
        self._is_stored = True
        return store.put(row)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, code: str, message: str, close_code: int) -> None:
        """Send why the session ends, and stop reading; what was heard is still transcribed and sent.

        Only the first reason to end counts.
        """
        if self._live.lifecycle.reads_frames:
            self._push(self.wire.send(SessionEnding(code, message)))
            self._live.end(close_code, code)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _emit(self, event: Event) -> None:
        if player := self._playback:
            player.send(event)
        if self._recorder and isinstance(event, ResponseAudioDelta):
            self._recorder.audio_out(event.at.item_id, event.pcm, event.rate_hz)
        while not self._wire_is_free.is_set():
            await self._wire_is_free.wait()
        self._unsent += self.wire.send(event)
        if isinstance(event, STORED_AFTER):
            # What the client is told of is stored before it is told, so that it is there after the server was killed.
            await self.store()
            self._live.count_memory()
        if isinstance(event, EpochRaised):
            self._outbox.raise_epoch(event.epoch)
        await self._flush()

    def _push(self, frames: Iterable[Frame] = ()) -> None:
        unsent, self._unsent = [*self._unsent, *frames], []
        for frame in unsent:
            if self._recorder and isinstance(text := frame.encode(), str):
                self._recorder.event_out(text)
            self._outbox.put(frame)

    async def _flush(self, frames: Iterable[Frame] = ()) -> None:
        self._push(frames)
        await self._outbox.wait_for_room()


def _refusal(error: Exception) -> Refused | None:
    """The refusal that ended a session, whose task groups have wrapped it; None where anything else did."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Refused) else None
