"""One speech stream that is being served."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.abc
import anyio.lowlevel

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SentenceAudio
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.speech.stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, SpeechDialect
from antiphon.server.live.speech_catalog import speech_facts
from antiphon.server.live.stream import CLOSE_INTERNAL, CLOSE_NORMAL, CLOSE_POLICY, LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.speech.session import SpeechSession
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "speech_stream"
# A client that takes nothing for this long is gone. Until then its synthesis waits.
STALL_S = 300.0
# Messages a second a client may send on average before each next one is taken more slowly.
MESSAGES_PER_S = 1000.0
# Frames that may wait for the socket: what is said after a cancel does not wait behind sound.
MAX_WAITING_FRAMES = 0


class LiveSpeech(LiveStream):
    """One session; see line.Session."""

    def __init__(self, socket: WebSocketTransport, state: ServerState, caller: str, token: ResumeToken | None) -> None:
        super().__init__(socket, state, caller, token, LABEL, MAX_WAITING_FRAMES, waits_detached=True, stall_s=STALL_S)
        self._wire = SpeechDialect(speech_facts(state))
        self._session = SpeechSession(
            state.loaded().required_synthesizer, state.metrics.measure, state.loaded().transcriber
        )
        self._began_s = time.monotonic()
        self._taken = 0

    async def run(self) -> None:
        """Until it is over."""
        self._enter()
        log.info("a speech stream begins")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._speak)
                group.start_soon(self._tell)
                await self.line.serve(self._socket, group)
                group.cancel_scope.cancel()
        finally:
            self._leave()
            self._state.metrics.audio_s.labels("spoken").inc(self._session.audio_s)
            log.info("a speech stream ended after %.1f s of sound", self._session.audio_s)

    # --- what the line asks -----------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """See line.Session."""
        return self._draining or self._wire.closing

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

    async def take(self, data: str | bytes | AppendAudio) -> None:
        """See line.Session."""
        assert not isinstance(data, AppendAudio)
        self._active_s = time.monotonic()
        self._taken += 1
        self._wire.receive(data)
        for item in self._wire.commands():
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
            if isinstance(output, SentenceAudio):
                # A message that waits is read before the next sound goes out.
                await anyio.lowlevel.checkpoint()
        self._finish(self._code, self._reason)

    def _push(self) -> bool:
        return self._put(list(self._wire.frames()))
