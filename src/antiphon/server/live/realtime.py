"""One live session of `/v1/realtime`, `/v1/duplex` or a bridge, over any transport.

Connects a wire, which knows the protocol, to an inbox and a session. The parts that all live sessions share (the
lifecycle, the attached transport and resuming) are in `server/live/session.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import anyio
import anyio.lowlevel
import numpy as np

from antiphon.contracts.language import ToolServers
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events.conversation import ConfigureConversation, CreateItem, CreateResponse
from antiphon.events.transcription import AppendAudio, ConfigureTranscription, SessionEnding
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.resume import Control, DrainNotice, HowResumed
from antiphon.protocols.wire import Frame
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.persistence import Persistence
from antiphon.server.live.moving.stored_copy import Restored, StoredCopy
from antiphon.server.live.observers import SessionObservers
from antiphon.server.live.open_wire import is_slow, prepare_voices, read_slow
from antiphon.server.live.realtime_session import (
    CommandBounds,
    RealtimeConversation,
    RealtimeSession,
    goes_first,
    new_conversation,
    new_transcription,
)
from antiphon.server.live.session import (
    CLOSE_GOING_AWAY,
    CLOSE_INTERNAL,
    CLOSE_NORMAL,
    CLOSE_POLICY,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
    LiveSession,
    refusal_in,
)
from antiphon.server.live.sideband import Answer, Sidebands, is_error
from antiphon.server.state import ServerState
from antiphon.sessions.inbox import Inbox
from antiphon.transports.journal import ResumeToken
from antiphon.transports.transport import ClientData, Transport

log = logging.getLogger(__name__)

# Frames that may wait for a client that does not read. Beyond that the session waits, and after STALL_S the client
# counts as gone.
MAX_WAITING_FRAMES = 256


class LiveRealtime:
    """Serves one session over its first transport, and over later transports that resume it. Call `run` once.

    `wire` is open, and `first_frames` are the frames that opening it returned. `caller` opened the session. A client
    resumes it with `token`; without a token, it ends with its transport. `why_left` returns why the transport has
    ended, if that is known. `restored` is the stored state from which a restored conversation continues. The route that
    made `transport` also releases it. `copy` is the session's copy in the session store. A client that resumes attaches
    its transport to `attachment`. Programs beside the client have `sidebands`. `keeps_words`: the client of a new
    session keeps `resume_words`. `tools` has functions of this session alone, beside those of the server.
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
        restored: Restored | None = None,
        keeps_words: bool = False,
        why_left: Callable[[], str] = lambda: "",
        tools: ToolServers | None = None,
    ) -> None:
        self._state = state
        self._tools = tools
        self.caller = caller
        self.wire = wire
        self._transport = transport
        self._why_left = why_left
        self.sidebands = Sidebands()
        audio = state.settings.audio
        # None until the configuration arrives. If it is a conversation, `_conversation` is the same object.
        self._session: RealtimeSession | None = None
        self._conversation: RealtimeConversation | None = None
        self._live = LiveSession(self, state, caller, token, MAX_WAITING_FRAMES)
        self.attachment = attachment = self._live.attachment
        self._inbox = Inbox(
            audio.max_backlog_s, live=audio.overflow == "close", is_fed=lambda: attachment.state.has_transport
        )
        self._bounds = CommandBounds(self._live.memory, audio.max_events_per_s)
        self._observers = SessionObservers(state, wire, self._live.measure)
        persistence = Persistence(state, caller, wire, restored.row if restored else None)
        self.copy = StoredCopy(
            wire, self._live, self._inbox, persistence, self._send, first_frames, restored, keeps_words=keeps_words
        )
        # Set after a restored session has handled the work that the last host left. Frames of the client wait until
        # then.
        self._goes_on = anyio.Event()
        self._has_ended = False
        # Not set while a thread decodes a frame.
        self._wire_is_free = anyio.Event()
        self._wire_is_free.set()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the conversation, its configuration and the waiting commands take."""
        kept = self._conversation.history.num_bytes if self._conversation else 0
        return kept + self._bounds.config_bytes + self._inbox.num_bytes

    async def run(self) -> None:
        """Serve until either side ends the session, or it is not resumed within the grace period.

        A failure of the session ends only this session. It is logged, not raised.
        """
        self._state.sessions.shared[self.id] = self
        try:
            self.copy.send()
            tasks = self._expire, self._go_on, self.copy.store_regularly, self.copy.store_speech
            await self._live.serve(self._transport, *tasks)
        finally:
            self.leave()
            self.copy.close()
            self._observers.close()
            self._live.log_end(self._session.progress.audio_s if self._session else 0.0, **self._observers.units)
            if self._session:
                self._state.metrics.audio_s.labels("live").inc(self._session.progress.audio_s)

    def leave(self) -> None:
        """End the sidebands, since the session has ended, or will never run. Does not wait."""
        self._state.sessions.shared.pop(self.id, None)
        self._has_ended = True
        # Frames of sidebands may wait.
        self._goes_on.set()
        code, reason = self._live.closing
        self.sidebands.close(code, reason or self._why_left())

    async def _expire(self) -> None:
        await anyio.sleep(self._state.settings.server.session_s or math.inf)
        self._end("session_expired", "Your session hit the maximum duration.", CLOSE_GOING_AWAY)

    async def _go_on(self) -> None:
        """Begin a restored session at once. Reports the losses to its client, and handles what the last host left."""
        if self.copy.goes_on:
            # The client gets its first frame before the session is made.
            await anyio.lowlevel.checkpoint()
            await self._carry_out(await self._decoded(AppendAudio(np.zeros(0, np.float32))))
            await self.copy.go_on(self._emit)
        self._goes_on.set()

    # --- AttachedSession: called by the server ------------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that wait in the inbox. Each command without audio counts as 10 ms or more."""
        return self._inbox.backlog_s

    def drain(self, within_s: float) -> None:
        """End the session when neither side speaks, because the server stops. Before the end, and within `within_s`
        seconds, received audio is transcribed and the transcripts are sent. Does not wait.

        A conversation that another host can continue is handed over instead.
        """
        self.copy.send(self.wire.notice(DrainNotice(within_s)))
        if self.copy.can_move and self._live.lifecycle.reads_frames:
            self._live.start(partial(self.copy.move, within_s))
        else:
            end = partial(self._end, "server_shutting_down", "The server is shutting down.", CLOSE_GOING_AWAY)
            self._live.end_once(lambda: not self._session or self._session.progress.is_silent, within_s, end)

    def finish(self) -> None:
        self._live.finish()

    def hang_up(self) -> None:
        self._live.end(CLOSE_NORMAL, "hung_up")

    # --- AttachedSession: called by its attachment --------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.wire.id

    @property
    def idle_s(self) -> float | None:
        return self.wire.idle_s

    async def end_if_idle(self) -> None:
        """End the session with `idle_timeout`. Only frames of the client count as activity here."""
        self._end("idle_timeout", f"Nothing came for {self.wire.idle_s:.0f} s.", CLOSE_GOING_AWAY)

    def control(self, data: str | bytes) -> Control | None:
        return self.wire.control(data)

    async def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        await self._flush(self.wire.refuse(error, event_id))

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        """Return the dialect's first frame after a resume, with the new token and how much the server has received.

        Waits until the token is stored, if the session is stored. Raises RemoteProtocolError (`session_elsewhere`) if
        another host owns the session.
        """
        stored_events = await self.copy.store_token()
        facts = {} if stored_events is None else {"stored_events": stored_events}
        received_ms = round(((self._session.progress.audio_s if self._session else 0.0) + self._inbox.backlog_s) * 1000)
        num_received = self.attachment.num_received
        frame = self.wire.resumed(token, received_events=num_received, **facts, received_audio_ms=received_ms, how=how)
        return self._observers.sent(frame)

    def replaced(self) -> list[Frame]:
        return [self._observers.sent(frame) for frame in self.wire.notice("replaced")]

    async def handle(self, data: ClientData) -> None:
        """Decode a frame and pass its commands to the session. Errors are answered on the wire.

        Waits while the inbox is full (`--overflow block`), and while the client does not read. The first configuration
        starts the session.
        """
        await self._goes_on.wait()
        number = self.attachment.num_received
        if not self.copy.has(number):
            commands = self.copy.unheard(await self._decoded(data))
            await self._carry_out(commands)
            self.copy.received(number, commands)

    async def handle_beside(self, data: str | bytes, answer: Answer) -> None:
        """Handle a frame of a sideband, see SharedSession."""
        await self._goes_on.wait()
        if self._live.lifecycle.reads_frames and not self._has_ended:
            commands = await self._decoded(data, answer)
            if any(isinstance(command, AppendAudio) for command in commands):
                error = RemoteProtocolError("unsupported_event", "A sideband has no audio.", "type")
                answer(self.wire.refuse(error, None))
            await self._carry_out([command for command in commands if not isinstance(command, AppendAudio)])

    async def wind_up(self) -> None:
        """Close the inbox. The session still handles the commands in it, and the connection closes when it ends."""
        await self._flush()
        self._inbox.close()
        if self._session is None:
            self._finish()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _decoded(self, data: ClientData, answer: Answer | None = None) -> Sequence[Command]:
        """Return the commands of a frame, after the observers have seen them. Queues the wire's answers to the frame,
        of which the errors go to `answer`.

        A frame that `is_slow` is decoded in a thread. The session's events wait meanwhile, since the same wire encodes
        them.
        """
        commands: Sequence[Command] = ()
        max_bytes = self._state.settings.audio.max_frame_bytes
        while not self._wire_is_free.is_set():
            # A frame of another connection is decoded.
            await self._wire_is_free.wait()
        if isinstance(data, str | bytes) and len(data) > max_bytes:
            (answer or self.copy.send)(self.wire.too_large(data, max_bytes))
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
            if answer:
                answer([frame for frame in received.answers if is_error(frame)])
            self.copy.send([frame for frame in received.answers if not (answer and is_error(frame))])
            commands = received.commands
        return self._observers.came(data, commands)

    async def _carry_out(self, commands: Sequence[Command]) -> None:
        """Carry out the commands of a frame, or put them into the inbox."""
        # Audio is limited by the backlog, at whatever rate it arrives. Events without audio are limited by their rate.
        has_audio = self._bounds.have_audio(commands)
        if not has_audio and self._bounds.count_event():
            max_events_per_s = self._state.settings.audio.max_events_per_s
            self._end("rate_limit_exceeded", f"more than {max_events_per_s} events a second", CLOSE_POLICY)
            return
        for command in commands:
            conversation = self._conversation
            if isinstance(command, ConfigureTranscription | ConfigureConversation):
                self._bounds.configure(command)
                if self._session is None:
                    self._start(command)
                    continue
            if isinstance(command, CreateItem | CreateResponse):
                self._live.count_memory()
                try:
                    self._bounds.check(command, len(conversation.history.items) if conversation else 0)
                except RemoteProtocolError as error:
                    await self.reject(error, command.event_id)
                    continue
            if conversation and goes_first(command, conversation):
                await conversation.handle(command)
                continue
            if isinstance(command, ConfigureConversation | ConfigureTranscription):
                self.copy.write()
            try:
                await self._inbox.put(command)
            except Refused as refusal:
                self._end("input_audio_buffer_overflow", str(refusal), CLOSE_POLICY)
                return
        if commands and not has_audio:
            self._live.count_memory()
            if self._bounds.is_spent:
                self._end("memory_limit_exceeded", "Too many events could not be kept.", CLOSE_TOO_BIG)
        await self._flush()
        if self.wire.closing:
            self._close()
        elif self.wire.finishing:
            self._live.end(*self.wire.finishing)

    def _close(self) -> None:
        """End at once, since the client has closed the session. Pending transcripts are not sent."""
        if self._live.lifecycle.is_running:
            self.copy.send(self.wire.close(), at_once=True)
            self._live.close("session_closed")

    # --- the session --------------------------------------------------------------------------------------------------

    def _start(self, first: ConfigureTranscription | ConfigureConversation) -> None:
        inbox, emit, player = self._inbox, self._emit, self._transport.playback
        if isinstance(first, ConfigureConversation):
            self._session = self._conversation = new_conversation(
                self._state, self.caller, self.wire, first, inbox, emit, player, self._observers, self._tools
            )
        else:
            self._session = new_transcription(
                self._state,
                self.wire,
                first,
                inbox,
                emit,
                self._live.measure,
                keeps_state=self.copy.keeps_transcription,
                continued=self.copy.transcription,
            )
        self._live.count(self.wire.dialect)
        log.info("session %s begins (%s)", self.wire.id, self.wire.dialect)
        if player:
            player.attach(lambda event: self._live.start(partial(self._emit, event)))
        self.copy.begin(self._session)
        self._live.start(partial(self._run_session, self._session))

    async def _run_session(self, session: RealtimeSession) -> None:
        try:
            await session.run()
        except Exception as error:
            # The boundary of the session: any failure in it ends only this session.
            if refusal := refusal_in(error):
                log.info("session %s is refused: %s", self.wire.id, refusal)
                self._end("resource_exhausted", str(refusal), CLOSE_TRY_LATER)
            else:
                log.exception("session %s failed", self.wire.id)
                self._end("server_error", "The session failed.", CLOSE_INTERNAL)
        self._inbox.close()
        await self.copy.give_away()
        self._finish()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, code: str, message: str, close_code: int) -> None:
        """Send the reason that the session ends, and stop reading.

        Audio received so far is still transcribed, and its transcripts are sent. Only the first call counts.
        """
        if self._live.lifecycle.reads_frames:
            self.copy.send(self.wire.send(SessionEnding(code, message)))
            self._live.end(*(self.wire.finishing or (close_code, code)))

    def _finish(self) -> None:
        """Close the transport after the last results, and after the wire's own last frames if it ends the session."""
        if self.wire.finishing and self._live.lifecycle.is_running:
            self.copy.send(self.wire.close(), at_once=True)
        self._live.finish()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _emit(self, event: Event) -> None:
        if player := self._transport.playback:
            player.send(event)
        while not self._wire_is_free.is_set():
            await self._wire_is_free.wait()
        self._observers.sent_event(event)
        await self.copy.before_sending(event, self.wire.send(event))
        await self._flush()

    def _send(self, frame: Frame) -> None:
        self._live.outbox.put(self._observers.sent(frame))
        self.sidebands.put(frame)

    async def _flush(self, frames: Iterable[Frame] = ()) -> None:
        self.copy.send(frames)
        await self._live.outbox.wait_for_room()
