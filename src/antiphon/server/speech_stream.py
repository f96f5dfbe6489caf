"""The WebSocket of /v1/audio/speech/stream: one speech session over whichever socket is attached to it (line.py)."""

from __future__ import annotations

import logging
import time
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
from starlette.websockets import WebSocket

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events import AudioAppended, UnitSound
from antiphon.protocols.journal import Journal, ResumeToken
from antiphon.protocols.resuming import control, refused_frame, replaced_frame, resumed_frame
from antiphon.protocols.speech_stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, SpeechStream
from antiphon.protocols.wire import BinaryFrame, frame, random_id
from antiphon.server.auth import bearer
from antiphon.server.errors import deny
from antiphon.server.facts import speech_facts
from antiphon.server.line import Line
from antiphon.server.outbox import Outbox
from antiphon.server.realtime import YES, Socket, by_resume
from antiphon.server.state import Live, ServerState
from antiphon.speech import SpeechSession

log = logging.getLogger(__name__)

LABEL = "speech_stream"
# A client that takes nothing for this long is gone. Until then its synthesis waits.
STALL_S = 300.0
CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_INTERNAL = 1000, 1001, 1008, 1011
# Messages a second a client may send on average before each next one is taken more slowly.
MESSAGES_PER_S = 1000.0
# Frames that may wait for the socket: what is said after a cancel does not wait behind sound.
MAX_WAITING_FRAMES = 0


async def speech_stream(websocket: WebSocket) -> None:
    """GET /v1/audio/speech/stream, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    who = state.who(bearer(websocket.headers))
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    resume = websocket.query_params.get("resume", "")
    try:
        if state.loaded().speaks is None:
            await deny(websocket, 404, "No speech synthesizer is loaded.", "model_not_found")
            return
        if resume and resume not in YES:
            await by_resume(state, who, websocket)
            return
        with state.admit(who):
            await websocket.accept()
            await _Stream(Socket(websocket), state, who, ResumeToken() if resume else None).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)


class _Stream:
    """One session; see line.Session."""

    def __init__(self, socket: Socket, state: ServerState, who: str, token: ResumeToken | None) -> None:
        self._socket = socket
        self._state = state
        self.who = who
        self.id = random_id("sess-")
        self._wire = SpeechStream(speech_facts(state))
        self._session = SpeechSession(state.loaded().synthesizer, state.metrics.measure, state.loaded().hears)
        resume = state.settings.resume
        journal = Journal(
            time.monotonic, token is not None, max_bytes=resume.journal_mb << 20, max_s=float(resume.journal_s)
        )
        self._outbox = Outbox(journal, MAX_WAITING_FRAMES, waits_detached=True)
        self.line = Line(self, self._outbox, token, resume.grace_s, stall_s=STALL_S)
        self._active_s = self._began_s = time.monotonic()
        self._taken = 0
        self._draining = False
        self._code, self._reason = CLOSE_NORMAL, ""

    async def run(self) -> None:
        """Until it is over."""
        metrics, live = self._state.metrics, Live(self.who, lambda: 0.0, self._drain, self.id)
        self._state.live.add(live)
        if self.line.token:
            self._state.resumable[self.id] = self
            shown = {"session_id": self.id, "resume_token": self.line.token.renew()}
            self._outbox.put(frame(type="session.created", **shown))
        metrics.sessions.labels(LABEL).inc()
        metrics.sessions_started.labels(LABEL).inc()
        log.info("a speech stream begins")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._speak)
                group.start_soon(self._tell)
                await self.line.serve(self._socket, group)
                group.cancel_scope.cancel()
        finally:
            self.line.over.set()
            if self._state.resumable.get(self.id) is self:
                del self._state.resumable[self.id]
            self._state.leave(live)
            metrics.sessions.labels(LABEL).dec()
            metrics.audio_s.labels("spoken").inc(self._session.audio_s)
            log.info("a speech stream ended after %.1f s of sound", self._session.audio_s)

    # --- what the line asks -----------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """See line.Session."""
        return self._draining or self._wire.closing

    @property
    def idle_s(self) -> float | None:
        """See line.Session."""
        limit_s = self._limit_s
        return max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())

    @property
    def _limit_s(self) -> float:
        speech = self._state.settings.speech
        return speech.idle_timeout_s if self._wire.configured else speech.config_timeout_s

    async def idle(self) -> bool:
        """See line.Session. Silence on both sides counts, and what is still being said."""
        if time.monotonic() < self._active_s + self._limit_s or not self._session.idle:
            return False
        self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)
        self._push()
        self._finish(CLOSE_NORMAL, "timeout")
        return True

    async def take(self, data: str | bytes | AudioAppended) -> None:
        """See line.Session."""
        assert not isinstance(data, AudioAppended)
        self._active_s = time.monotonic()
        self._taken += 1
        self._wire.receive(data)
        for item in self._wire.inputs():
            try:
                self._session.receive(item)
            except RemoteProtocolError as error:
                self._wire.refuse(error.message)
        # Errors wait for the socket: who causes them is read no faster than they are taken.
        if self._push():
            await self._outbox.room()
        # Others get their turn of the event loop however fast one client types.
        await anyio.sleep(max(0.0, self._taken / MESSAGES_PER_S - 1.0 - (time.monotonic() - self._began_s)))

    async def wind_up(self) -> None:
        """See line.Session."""
        if self._draining:
            # What was said is spoken, then the writer closes.
            self._session.close()
        else:
            # Closed by the client, or by a handshake that failed: what is still to be said is not.
            self._finish(CLOSE_NORMAL if self._wire.configured else CLOSE_POLICY, self._reason)

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

    def _drain(self) -> None:
        self._code, self._reason = CLOSE_GOING_AWAY, "server_shutting_down"
        self._draining = True
        self.line.stop_reading()

    # --- speaking and telling -----------------------------------------------------------------------------------------------

    async def _speak(self) -> None:
        try:
            await self._session.run()
        except Exception:
            # The session's edge: whatever failed in it ends it alone.
            log.exception("a speech stream failed")
            self._wire.refuse("The session failed.")
            self._push()
            self._finish(CLOSE_INTERNAL, "server_error")

    async def _tell(self) -> None:
        """What is spoken, as fast as it is taken, until the session ends."""
        while output := await self._session.next_output():
            self._wire.send(output)
            self._push()
            await self._outbox.room()
            self._active_s = time.monotonic()
            if isinstance(output, UnitSound):
                # A message that waits is read before the next sound goes out.
                await anyio.lowlevel.checkpoint()
        self._finish(self._code, self._reason)

    def _push(self) -> bool:
        """Give on what the wire has; whether it had anything."""
        frames = self._wire.frames()
        for made in frames:
            self._outbox.put(made if isinstance(made, str) else BinaryFrame.of(made))
        return bool(frames)

    def _finish(self, code: int, reason: str) -> None:
        self._outbox.end(code, reason)
        if not self.line.attached:
            self.line.over.set()
