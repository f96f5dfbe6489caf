"""One live connection of /v1/realtime, whatever carries it: one reader, one writer, one session, in one task group."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from antiphon.answering import Playback
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.blackbox import Recorder
from antiphon.errors import Refused, StoreError
from antiphon.events import AudioAppended, Configured, Input, Output, SessionEnding
from antiphon.inbox import Inbox
from antiphon.protocols.realtime import RealtimeConnection
from antiphon.server.state import Live, ServerState
from antiphon.session import TranscriptionSession
from antiphon.talk import TalkSession
from antiphon.talk_events import (
    PlaybackStarted,
    PlaybackStopped,
    ResponseStopped,
    SilenceAsked,
    SoundSaid,
    TalkConfigured,
    TalkInput,
    TalkOutput,
)

log = logging.getLogger(__name__)

# Frames that may wait for a client that does not read; then the session waits too, and after STALL_S it ends.
MAX_WAITING_FRAMES = 256
STALL_S = 30.0
CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_TRY_LATER, CLOSE_INTERNAL = 1001, 1008, 1013, 1011
RATE_WINDOW_S = 2.0
# 5 ms: an append with less is no sound.
MIN_SOUND_SAMPLES = SAMPLE_RATE_HZ // 200


class Gone(Exception):
    """The client is not there any more."""


class Player(Playback, Protocol):
    """Sound goes to the client by itself, not in events."""

    def attach(self, tell: Callable[[PlaybackStarted | PlaybackStopped], object]) -> None:
        """`tell` what begins and ends to be heard."""
        ...

    def take(self, output: Output | TalkOutput) -> None:
        """Everything the session says, in order: sound is to be played."""
        ...


class Transport(Protocol):
    """What carries a connection."""

    @property
    def playback(self) -> Player | None: ...

    async def receive(self) -> str | bytes | AudioAppended | None:
        """The next frame, or sound that came beside the frames; None: the client left."""
        ...

    async def send(self, frame: str) -> None:
        """Raises Gone."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Raises Gone."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing the writer does."""

    code: int
    reason: str


class Connection:
    """`run()` it until its client or the server ends it. `wire` is open."""

    def __init__(self, state: ServerState, who: str, wire: RealtimeConnection, transport: Transport) -> None:
        self._transport = transport
        self._state = state
        self._who = who
        self._wire = wire
        settings = state.settings
        self._inbox = Inbox(settings.audio.max_backlog_s, live=settings.audio.overflow == "close")
        self._session: TranscriptionSession | TalkSession | None = None
        self._send: MemoryObjectSendStream[str | _End]
        self._frames: MemoryObjectReceiveStream[str | _End]
        # Bound: MAX_WAITING_FRAMES; when full, whoever emits waits, so the session stops making more.
        self._send, self._frames = anyio.create_memory_object_stream(MAX_WAITING_FRAMES)
        self._pending: deque[str] = deque()
        self._sending = anyio.Lock()
        self._reading = anyio.CancelScope()
        self._ending: SessionEnding | None = None
        self._end_code = 1000
        self._arrivals: deque[float] = deque()
        self._box = self._recorder()

    def _recorder(self) -> Recorder | None:
        folder = self._state.settings.server.record
        if not folder:
            return None
        facts = {"began": int(time.time()), "opening": asdict(self._wire.opening), "models": self._state.loaded().names}
        try:
            return Recorder(Path(folder).expanduser(), self._wire.id, facts)
        except StoreError as error:
            # What is to be remembered is not worth more than what is going on.
            log.error("session %s is not recorded: %s", self._wire.id, error)
            return None

    async def run(self) -> None:
        """Until it is over."""
        live = Live(self._who, lambda: self._inbox.backlog_s, self._drain, self._wire.id)
        self._state.live.add(live)
        labels: list[str] = []
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write, group.cancel_scope)
                await self._flush()
                await self._read(group, labels)
                await self._wind_up()
        finally:
            self._state.leave(live)
            if self._box:
                self._box.close()
            for label in labels:
                self._state.metrics.sessions.labels(label).dec()
            if self._session:
                self._state.metrics.audio_s.labels("live").inc(self._session.audio_s)
                log.info("session %s ended after %.1f s of audio", self._wire.id, self._session.audio_s)

    # --- reading -------------------------------------------------------------------------------------------------

    async def _read(self, group: anyio.abc.TaskGroup, labels: list[str]) -> None:
        expires_s = self._state.settings.server.session_s or None
        with anyio.move_on_after(expires_s) as expiry, self._reading:
            while not self._ending and (data := await self._transport.receive()) is not None:
                await self._hand_over(data, group, labels)
            if not self._ending:
                # The client left: nothing that is still to come has a reader.
                group.cancel_scope.cancel()
        if expiry.cancelled_caught:
            self._end("session_expired", "Your session hit the maximum duration.", CLOSE_GOING_AWAY)

    async def _hand_over(
        self, data: str | bytes | AudioAppended, group: anyio.abc.TaskGroup, labels: list[str]
    ) -> None:
        audio = self._state.settings.audio
        if isinstance(data, AudioAppended):
            inputs: list[Input | TalkInput] = [*self._wire.inputs(), data]
        elif len(data) > audio.max_frame_bytes:
            self._wire.too_large(audio.max_frame_bytes)
            inputs = []
        else:
            self._wire.receive(data)
            inputs = self._wire.inputs()
        if self._box:
            inputs = [self._boxed(i) for i in inputs]
            if not isinstance(data, AudioAppended):
                self._box.event_in(data)
        # Sound is bounded by the backlog, however fast it comes; what brings none is bounded here.
        num_samples = sum(len(i.pcm) for i in inputs if isinstance(i, AudioAppended))
        if num_samples < MIN_SOUND_SAMPLES and self._too_many():
            self._end("rate_limit_exceeded", f"more than {audio.max_events_per_s} events a second", CLOSE_POLICY)
            return
        for item in inputs:
            if isinstance(item, Configured | TalkConfigured) and self._session is None:
                self._start(item, group, labels)
                continue
            if isinstance(self._session, TalkSession) and (
                isinstance(item, SilenceAsked) or (isinstance(item, ResponseStopped) and self._session.answering)
            ):
                # A cancel does not wait behind sound; all else keeps its place among it.
                await self._session.handle(item)
                continue
            try:
                await self._inbox.put(item)
            except Refused as refusal:
                self._end("input_audio_buffer_overflow", str(refusal), CLOSE_POLICY)
                return
        await self._flush()

    def _start(self, first: Configured | TalkConfigured, group: anyio.abc.TaskGroup, labels: list[str]) -> None:
        models, metrics = self._state.loaded(), self._state.metrics
        partner = models.partner
        if isinstance(first, TalkConfigured):
            assert partner
            self._session = TalkSession(
                first.config,
                models.transcriber,
                models.detector,
                partner,
                self._inbox,
                self._emit,
                new_id=self._wire.new_id,
                min_commit_ms=self._wire.min_commit_ms,
                measure=metrics.measure,
                judge=models.judges,
                reader=models.reads,
                playback=self._transport.playback,
            )
        else:
            self._session = TranscriptionSession(
                first.config,
                models.transcriber,
                models.detector,
                self._inbox,
                self._emit,
                min_commit_ms=self._wire.min_commit_ms,
                measure=metrics.measure,
            )
        labels.append(self._wire.dialect)
        metrics.sessions.labels(self._wire.dialect).inc()
        metrics.sessions_started.labels(self._wire.dialect).inc()
        log.info("session %s begins (%s)", self._wire.id, self._wire.dialect)
        if player := self._transport.playback:
            player.attach(lambda output: group.start_soon(self._emit, output))
        group.start_soon(self._run_session, self._session)

    def _boxed(self, item: Input | TalkInput) -> Input | TalkInput:
        assert self._box
        return AudioAppended(self._box.sound_in(item.pcm)) if isinstance(item, AudioAppended) else item

    def _too_many(self) -> bool:
        """Events without sound, averaged over RATE_WINDOW_S."""
        now = time.monotonic()
        self._arrivals.append(now)
        while self._arrivals[0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        return len(self._arrivals) > self._state.settings.audio.max_events_per_s * RATE_WINDOW_S

    # --- the session and its end ---------------------------------------------------------------------------------

    async def _run_session(self, session: TranscriptionSession | TalkSession) -> None:
        try:
            await session.run()
        except Exception:
            # The session's edge: whatever failed in it ends it alone.
            log.exception("session %s failed", self._wire.id)
            self._end("server_error", "The session failed.", CLOSE_INTERNAL)
        await self._flush()
        await self._send.send(_End(self._end_code, self._ending.code if self._ending else ""))

    def _drain(self) -> None:
        self._end("server_shutting_down", "The server is shutting down.", CLOSE_GOING_AWAY)

    def _end(self, code: str, message: str, close_code: int) -> None:
        """Say why, stop reading; what was heard is still transcribed and sent."""
        if self._ending is None:
            self._ending = SessionEnding(code, message)
            self._end_code = close_code
            self._wire.refuse(code, message)
            self._reading.cancel()

    async def _wind_up(self) -> None:
        await self._flush()
        if self._session is None:
            await self._send.send(_End(self._end_code, self._ending.code if self._ending else ""))
            return
        # The session transcribes what it has, and its end is the connection's.
        self._inbox.close()

    # --- writing -------------------------------------------------------------------------------------------------

    async def _emit(self, output: Output | TalkOutput) -> None:
        if player := self._transport.playback:
            player.take(output)
        if self._box and isinstance(output, SoundSaid):
            self._box.sound_out(output.at.item_id, output.pcm, output.rate_hz)
        self._wire.send(output)
        await self._flush()

    async def _flush(self) -> None:
        for frame in self._wire.frames():
            if self._box:
                self._box.event_out(frame)
            self._pending.append(frame)
        async with self._sending:
            while self._pending:
                # Who is cancelled here leaves the frame to whoever flushes next: none is lost, and none is out of order.
                await self._send.send(self._pending[0])
                self._pending.popleft()

    async def _write(self, scope: anyio.CancelScope) -> None:
        """Send frames until the end. A client that is gone or has stopped reading ends the connection's tasks."""
        try:
            async for item in self._frames:
                with anyio.fail_after(STALL_S):
                    if isinstance(item, _End):
                        await self._transport.close(item.code, item.reason)
                        break
                    await self._transport.send(item)
        except TimeoutError:
            log.info("session %s: the client has not read for %.0f s", self._wire.id, STALL_S)
        except Gone:
            log.info("session %s: the client is gone", self._wire.id)
        scope.cancel()
