"""One live session of `/v1/realtime`, `/v1/duplex` or a bridge, whatever transport carries it.

It connects a wire (the protocol), an inbox and a session. How far it has come, which transport is attached, and
resuming are those of every live session (`server/live/session.py`); what the messages mean is the wire's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConfigureConversation,
    CreateItem,
    CreateResponse,
    Item,
)
from antiphon.events.duplex import AcknowledgePlayback, BargeIn, CancelInput, EpochRaised
from antiphon.events.size import num_bytes
from antiphon.events.transcription import (
    AppendAudio,
    ConfigureTranscription,
    SessionEnding,
)
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.resume.control import Control, HowResumed, moving_frame, state_degraded_frame
from antiphon.protocols.resume.journal import ResumeToken, SentFrame
from antiphon.protocols.wire import Frame
from antiphon.server.live.command_bounds import CommandBounds
from antiphon.server.live.moving.boundary import wait_for_boundary
from antiphon.server.live.moving.continuation import MOVED, STORED_AFTER, Continuation, Progress, keeps_turn, recovered
from antiphon.server.live.moving.persistence import Kept, Persistence, session_elsewhere
from antiphon.server.live.moving.unsent import UnsentFrames
from antiphon.server.live.open_wire import is_slow, prepare_voices, read_slow
from antiphon.server.live.realtime_session import (
    RealtimeConversation,
    RealtimeSession,
    new_conversation,
    new_transcription,
)
from antiphon.server.live.session import (
    CLOSE_GOING_AWAY,
    CLOSE_INTERNAL,
    CLOSE_MOVED,
    CLOSE_NORMAL,
    CLOSE_POLICY,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
    LiveSession,
    refusal_in,
)
from antiphon.server.live.witness import Witness
from antiphon.server.state import Caller, ServerState
from antiphon.sessions.inbox import Inbox
from antiphon.store.sessions import StoredSession
from antiphon.transports.attachment import Attachment, ClientData
from antiphon.transports.lifecycle import Lifecycle
from antiphon.transports.transport import Transport

log = logging.getLogger(__name__)

# Frames that may wait for a client that does not read. The session waits then; after STALL_S the client is taken to be
# gone.
MAX_WAITING_FRAMES = 256
# 5 ms. A frame with less audio counts as an event without audio.
MIN_AUDIO_SAMPLES = SAMPLE_RATE_HZ // 200
# How often a conversation is stored again while nothing else stores it, in seconds.
STORE_EVERY_S = 5.0
# The frames that a client may lack go along with a session that moves, up to this size.
MAX_HANDED_OVER_BYTES = 2 << 20
# Of every other snapshot, without pieces of responses.
MAX_TOLD_BYTES = 32 << 10
# Commands that do not wait behind audio in the inbox.
URGENT = (BargeIn, CancelInput, AcknowledgePlayback, ClearOutputAudio)


class LiveRealtime:
    """Serves one connection, and what is resumed of it: `run` it once, with an open `wire` and its first transport.

    `first_frames`: what opening the wire gave. `caller`: what opened it. `token`: what resumes it;
    None: it ends with its transport. `row`, `items`, `continued` and `tail`: what a conversation was restored from, its
    history, where it stood, and what was being said. The transport is released by its own route.
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
        row: StoredSession | None = None,
        items: Sequence[Item] = (),
        continued: Continuation | None = None,
        tail: Sequence[tuple[int, Pcm]] = (),
    ) -> None:
        self._state = state
        self.caller = caller
        self.wire = wire
        # The history that another host has left, and what the client is told of what is missing there.
        self._items, self._recovered = recovered(items, continued or Continuation())
        self._continued, self._tail = continued, tail
        self._unsent = UnsentFrames(first_frames, self._send)
        self._persistence = Persistence(state, caller, wire, row)
        # Whether another host is to have the session.
        self._is_moving = False
        self._transport = transport
        self._playback = transport.playback
        settings = state.settings
        self._inbox = Inbox(
            settings.audio.max_backlog_s,
            live=settings.audio.overflow == "close",
            is_fed=lambda: self._live.attachment.state.has_transport,
        )
        # Begins with the configuration. Where it holds a conversation, `_conversation` is the same session.
        self._session: RealtimeSession | None = None
        self._conversation: RealtimeConversation | None = None
        self._live = LiveSession(self, state, token, MAX_WAITING_FRAMES)
        self._outbox = self._live.outbox
        self._bounds = CommandBounds(self._live.memory, settings.audio.max_events_per_s)
        self._progress = Progress(self._inbox, continued, self._persistence.speech)
        # Set once a session that was restored goes on; frames of its client wait until then.
        self._goes_on = anyio.Event()
        # Not set while a thread decodes a frame.
        self._wire_is_free = anyio.Event()
        self._wire_is_free.set()
        # The memory of its configuration.
        self._config_bytes = 0
        self._witness = Witness(state, wire, self._live.measure)

    @property
    def num_bytes(self) -> int:
        """The memory of the conversation, of its configuration, and of the commands that wait."""
        kept = self._conversation.history.num_bytes if self._conversation else 0
        return kept + self._config_bytes + self._inbox.num_bytes

    @property
    def audio_s(self) -> float:
        """Seconds of audio received from the client, those that wait in the inbox included."""
        return (self._session.progress.audio_s if self._session else 0.0) + self._inbox.backlog_s

    async def run(self) -> None:
        """Serve until the session is over: ended by either side, or not resumed within the grace period.

        Failures of the session end it alone and are logged; none is raised.
        """
        try:
            self._unsent.push()
            store_speech = partial(self._persistence.append_regularly, lambda: self._conversation)
            await self._live.serve(self._transport, self._expire, self._go_on, self._store_regularly, store_speech)
        finally:
            self._persistence.end()
            self._witness.close()
            self._live.log_end(self._session.progress.audio_s if self._session else 0.0)
            if self._session:
                self._state.metrics.audio_s.labels("live").inc(self._session.progress.audio_s)

    async def _expire(self) -> None:
        await anyio.sleep(self._state.settings.server.session_s or math.inf)
        self._end("session_expired", "Your session hit the maximum duration.", CLOSE_GOING_AWAY)

    async def _go_on(self) -> None:
        """Have a session that was restored begin at once, tell its client what was lost, and answer what is owed."""
        if self._continued:
            await self._handle(AppendAudio(np.zeros(0, np.float32)))
            for event in self._recovered:
                await self._emit(event)
            await self._progress.ask_again()
            await self._progress.hear_again(self._tail)
        self._goes_on.set()

    async def _store_regularly(self) -> None:
        """Store what of the client's audio needs not be sent again, and find out whether a store that failed works."""
        while True:
            await anyio.sleep(STORE_EVERY_S)
            if self._persistence.is_stored and self._live.lifecycle is Lifecycle.OPEN:
                await self.store()
                await self._flush()

    # --- LiveEntry ----------------------------------------------------------------------------------------------------

    @property
    def attachment(self) -> Attachment:
        """The place of its transport, where a client that resumes attaches another one. It has the session's token."""
        return self._live.attachment

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that wait in the inbox, where each command without audio counts as 10 ms or more."""
        return self._inbox.backlog_s

    def drain(self, within_s: float) -> None:
        """End the session since the server stops, once nobody speaks: what was heard is still transcribed and sent,
        within `within_s`. Does not wait.

        A conversation that another host can go on with is given away instead.
        """
        if self._persistence.can_move and self._conversation and self._live.lifecycle is Lifecycle.OPEN:
            self._live.start(partial(self._move, self._conversation, within_s))
        else:
            end = partial(self._end, "server_shutting_down", "The server is shutting down.", CLOSE_GOING_AWAY)
            self._live.end_once(lambda: not self._session or self._session.progress.is_silent, within_s, end)

    async def _move(self, conversation: RealtimeConversation, within_s: float) -> None:
        """Give the session away at a boundary; `_give_away` tells its client once it has ended here."""
        await wait_for_boundary(conversation, within_s)
        conversation.leave_open_turn()
        self._is_moving = True
        self._live.end(CLOSE_MOVED, MOVED)

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

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        """Return the dialect's first frame after a resume: the new token, and how much the server has received.

        Waits until the token is in the session store, if the session is stored. Raises RemoteProtocolError
        (`session_elsewhere`) where another host has the session by now.
        """
        await self.store()
        if self._persistence.kept is Kept.SUPERSEDED:
            raise session_elsewhere()
        facts = {} if self._persistence.stored_events is None else {"stored_events": self._persistence.stored_events}
        received_ms = round(self.audio_s * 1000)
        num_received = self.attachment.num_received
        frame = self.wire.resumed(token, received_events=num_received, **facts, received_audio_ms=received_ms, how=how)
        return self._witness.sent(frame)

    def replaced(self) -> Frame:
        """Return the dialect's last frame for a transport that another one replaces."""
        return self._witness.sent(self.wire.replaced())

    async def handle(self, data: ClientData) -> None:
        """Have the wire decode a frame, and give its commands to the session; errors are answered on the wire.

        Waits while the inbox is full (`--overflow wait`), and while the client does not read its answers. The first
        configuration starts the session.
        """
        await self._goes_on.wait()
        number = self.attachment.num_received
        if self._progress.is_applied(number):
            return
        commands = await self._handle(data)
        if self._persistence.is_on and (self._conversation or not self._session):
            self._progress.took(number, commands)

    async def _handle(self, data: ClientData) -> Sequence[Command]:
        """Carry out a frame, and return its commands."""
        audio = self._state.settings.audio
        commands = self._progress.unheard(await self._decoded(data, audio.max_frame_bytes))
        # Audio is bounded by the backlog, however fast it comes; events without audio are bounded by their rate.
        num_samples = sum(len(c.pcm) for c in commands if isinstance(c, AppendAudio))
        if num_samples < MIN_AUDIO_SAMPLES and self._bounds.count_event():
            self._end("rate_limit_exceeded", f"more than {audio.max_events_per_s} events a second", CLOSE_POLICY)
            return commands
        for command in commands:
            if isinstance(command, ConfigureTranscription | ConfigureConversation):
                self._config_bytes = num_bytes(command)
                if self._session is None:
                    self._start(command)
                    continue
            if isinstance(command, CreateItem | CreateResponse):
                self._live.count_memory()
                try:
                    self._bounds.check(command, len(self._conversation.history.items) if self._conversation else 0)
                except RemoteProtocolError as error:
                    await self.reject(error, command.event_id)
                    continue
            conversation = self._conversation
            if conversation and (
                isinstance(command, URGENT)
                or (isinstance(command, CancelResponse) and conversation.progress.can_cancel)
            ):
                await conversation.handle(command)
                continue
            if isinstance(command, ConfigureConversation):
                self._store()
            try:
                await self._inbox.put(command)
            except Refused as refusal:
                self._end("input_audio_buffer_overflow", str(refusal), CLOSE_POLICY)
                return commands
        if num_samples < MIN_AUDIO_SAMPLES:
            self._live.count_memory()
            if self._bounds.is_spent:
                self._end("memory_limit_exceeded", "Too much came that could not be kept.", CLOSE_TOO_BIG)
        await self._flush()
        if self.wire.closing:
            self._close()
        return commands

    async def wind_up(self) -> None:
        """Close the inbox: the session transcribes what is in it, and its end closes the connection."""
        await self._flush()
        self._inbox.close()
        if self._session is None:
            self._live.finish()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _decoded(self, data: ClientData, max_bytes: int) -> Sequence[Command]:
        """Return the commands of a frame, as they are to be handled, and record them. Its answers are queued.

        A frame that `is_slow` is decoded in a thread; the session's events wait meanwhile, since they are written
        by the same wire.
        """
        commands: Sequence[Command] = ()
        if isinstance(data, str | bytes) and len(data) > max_bytes:
            self._unsent.push(self.wire.too_large(data, max_bytes))
        else:
            if isinstance(data, str | bytes):
                await prepare_voices(self._state, self.caller, data)
            if isinstance(data, str | bytes) and is_slow(data):
                self._wire_is_free = anyio.Event()
                try:
                    received = await read_slow(partial(self.wire.feed, data), data)
                finally:
                    self._wire_is_free.set()
            else:
                received = self.wire.feed(data)
            self._unsent.push(received.answers)
            commands = received.commands
        return self._witness.came(data, commands)

    def _close(self) -> None:
        """End at once: the client has closed the session, and what is still to be transcribed is not sent."""
        if self._live.lifecycle.is_running:
            self._unsent.push(self.wire.close(), at_once=True)
            self._live.close("session_closed")

    # --- the session --------------------------------------------------------------------------------------------------

    def _start(self, first: ConfigureTranscription | ConfigureConversation) -> None:
        inbox, emit = self._inbox, self._emit
        if isinstance(first, ConfigureConversation):
            conversation = new_conversation(
                self._state, self.caller, self.wire, first, inbox, emit, self._playback, self._witness
            )
            conversation.history.restore(self._items)
            self._session = self._conversation = conversation
        else:
            self._session = new_transcription(self._state, self.wire, first, inbox, emit, self._live.measure)
        self._live.count(self.wire.dialect)
        log.info("session %s begins (%s)", self.wire.id, self.wire.dialect)
        if player := self._playback:
            player.attach(lambda event: self._live.start(partial(self._emit, event)))
        self._store()
        self._live.start(partial(self._run_session, self._session))

    async def _run_session(self, session: RealtimeSession) -> None:
        try:
            await session.run()
        except Exception as error:
            # The session's edge: whatever failed in it ends this session alone.
            if refusal := refusal_in(error):
                log.info("session %s is refused: %s", self.wire.id, refusal)
                self._end("resource_exhausted", str(refusal), CLOSE_TRY_LATER)
            else:
                log.exception("session %s failed", self.wire.id)
                self._end("server_error", "The session failed.", CLOSE_INTERNAL)
        self._inbox.close()
        if self._is_moving:
            await self._give_away()
        self._live.finish()

    async def _give_away(self) -> None:
        """Store where the session ends here, with the frames that its client may lack, and tell the client to go on
        at another host; where that is not possible, it is told that the server stops.
        """
        self._unsent.push()
        written = self._store(turn_kept=True, handed_over=self._outbox.hand_over(MAX_HANDED_OVER_BYTES))
        await self._persistence.wait(written)
        if await self._persistence.release():
            self._unsent.push([moving_frame(self.wire.context.new_id, self.wire.id)])
        else:
            self._unsent.push(self.wire.send(SessionEnding("server_shutting_down", "The server is shutting down.")))

    async def store(self, *, turn_kept: bool = False) -> None:
        """Store the conversation as it is now, and wait until it is written. Does nothing where it is not stored.

        Where that fails, or takes longer than STORE_S, and when it works again, the client is told before it gets any
        other frame. Where another host has the session by now, it ends here with `session.replaced`. `turn_kept`: as
        `Persistence.put`.
        """
        with self._unsent.held():
            changed = await self._persistence.wait(self._store(turn_kept=turn_kept))
        kept = self._persistence.kept
        if changed and kept is Kept.SUPERSEDED:
            self._give_up()
        elif changed:
            degraded = state_degraded_frame(self.wire.context.new_id, self.wire.id, degraded=kept is Kept.DEGRADED)
            self._unsent.frames.insert(0, degraded)
        self._unsent.push()

    def _store(self, *, turn_kept: bool = False, handed_over: Sequence[SentFrame] | None = None) -> Future[None] | None:
        """Store the conversation if its client may resume it; the future is done when it is written.

        `handed_over`: all frames that its client may lack; otherwise those that tell of what is stored go along.
        """
        items = self._conversation.history.items if self._conversation else self._items
        if not self._persistence.is_on or not (self._conversation or items):
            return None
        continued = (
            self._progress.now(self._conversation, empties_tail=turn_kept) if self._conversation else self._continued
        )
        is_whole, unsent = handed_over is not None, self._unsent.frames
        told = self._outbox.unacknowledged(unsent, MAX_TOLD_BYTES) if handed_over is None else list(handed_over)
        continued = msgspec.structs.replace(continued or Continuation(), journal=told, is_whole=is_whole)
        audio_ms = round(self.audio_s * 1000)
        return self._persistence.put(self.attachment.token, items, continued, audio_ms, turn_kept=turn_kept)

    def _give_up(self) -> None:
        """End the session here, since another host has it: frames that were not sent are not the truth any more."""
        log.warning("session %s is another host's by now", self.wire.id)
        is_running = self._live.lifecycle.is_running
        self._unsent.close_with([self.wire.replaced()] if is_running else ())
        if is_running:
            self._live.close("session_replaced")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, code: str, message: str, close_code: int) -> None:
        """Send why the session ends, and stop reading; what was heard is still transcribed and sent.

        Only the first reason to end counts.
        """
        if self._live.lifecycle.reads_frames:
            self._unsent.push(self.wire.send(SessionEnding(code, message)))
            self._live.end(close_code, code)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _emit(self, event: Event) -> None:
        if player := self._playback:
            player.send(event)
        while not self._wire_is_free.is_set():
            await self._wire_is_free.wait()
        self._witness.told(event)
        self._unsent.frames += self.wire.send(event)
        self._progress.follow(event)
        if isinstance(event, STORED_AFTER):
            # What the client is told of is stored before it is told, so that it is there after the server was killed.
            await self.store(turn_kept=keeps_turn(event))
            self._live.count_memory()
        if isinstance(event, EpochRaised):
            self._outbox.raise_epoch(event.epoch)
        await self._flush()

    def _send(self, frame: Frame) -> None:
        self._outbox.put(self._witness.sent(frame))

    async def _flush(self, frames: Iterable[Frame] = ()) -> None:
        self._unsent.push(frames)
        await self._outbox.wait_for_room()
