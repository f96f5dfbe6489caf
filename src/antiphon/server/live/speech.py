"""One live speech stream: text in, sentences of audio out (`/v1/audio/speech/stream`)."""

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
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.live.stream import CLOSE_INTERNAL, CLOSE_NORMAL, CLOSE_POLICY, LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.speech.session import SpeechSession
from antiphon.transports.attachment import ClientData
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "speech_stream"
# A client that reads nothing for this long is gone. Until then its synthesis waits.
STALL_S = 300.0
# Messages a second that a client may send on average; beyond, each next one is read later.
MESSAGES_PER_S = 1000.0
# Frames that may wait for the socket: what is sent after a cancel does not wait behind audio.
MAX_WAITING_FRAMES = 0


class LiveSpeech(LiveStream):
    """Serves one speech stream: `run` it once. The WebSocket is accepted before, and closed at the end.

    Raises Refused while models load, LookupError where no synthesizer is loaded.
    """

    def __init__(self, socket: WebSocketTransport, state: ServerState, caller: str, token: ResumeToken | None) -> None:
        super().__init__(socket, state, caller, token, LABEL, MAX_WAITING_FRAMES, waits_detached=True, stall_s=STALL_S)
        self._wire = SpeechDialect(speech_catalog(state))
        self._session = SpeechSession(
            state.loaded().required_synthesizer, state.metrics.measure, state.loaded().transcriber
        )
        self._began_s = time.monotonic()
        self._num_messages = 0

    async def run(self) -> None:
        """Serve until the stream is over: ended by either side, or not resumed within the grace period.

        Failures of the session end it alone and are logged; none is raised.
        """
        self._enter()
        log.info("a speech stream begins")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._run_session)
                group.start_soon(self._send_events)
                await self.attachment.serve(self._socket, group)
                group.cancel_scope.cancel()
        finally:
            self._leave()
            self._state.metrics.audio_s.labels("spoken").inc(self._session.audio_s)
            log.info("a speech stream ended after %.1f s of sound", self._session.audio_s)

    # --- AttachedSession ----------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """The server drains, or the client has closed the stream: no more messages are read."""
        return self._draining or self._wire.closing

    @property
    def _limit_s(self) -> float:
        speech = self._state.settings.speech
        return speech.idle_timeout_s if self._wire.configured else speech.config_timeout_s

    async def end_if_idle(self) -> bool:
        """End the stream if neither side has sent anything for the limit, and nothing is being synthesized."""
        if time.monotonic() < self._active_s + self._limit_s or not self._session.idle:
            return False
        self._put([self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)])
        self._finish(CLOSE_NORMAL, "timeout")
        return True

    async def handle(self, data: ClientData) -> None:
        """Give a message's commands to the session, and answer errors.

        Waits while the client does not read its errors, and slows down a client that sends more than MESSAGES_PER_S.
        """
        assert not isinstance(data, AppendAudio)
        self._active_s = time.monotonic()
        self._num_messages += 1
        received = self._wire.feed(data)
        errors = [*received.answers]
        for command in received.commands:
            try:
                self._session.handle(command)
            except RemoteProtocolError as error:
                errors.append(self._wire.refuse(error.message))
        # Errors wait for the socket: a client that causes them is read no faster than it reads.
        if self._put(errors):
            await self._outbox.wait_for_room()
        # Other tasks get their turn of the event loop, however fast one client sends.
        due_s = self._began_s + self._num_messages / MESSAGES_PER_S - 1.0
        await anyio.sleep(max(0.0, due_s - time.monotonic()))

    async def wind_up(self) -> None:
        """When the server drains, have all text spoken that has come; the stream closes after it.

        When the client has closed it, or its configuration was refused, close it now: the rest is not spoken.
        """
        if self._draining:
            self._session.close()
        else:
            self._finish(CLOSE_NORMAL if self._wire.configured else CLOSE_POLICY, self._close_reason)

    # --- the session --------------------------------------------------------------------------------------------------

    async def _run_session(self) -> None:
        try:
            await self._session.run()
        except Exception:
            # The session's edge: whatever failed in it ends this stream alone.
            log.exception("a speech stream failed")
            self._put([self._wire.refuse("The session failed.")])
            self._finish(CLOSE_INTERNAL, "server_error")

    async def _send_events(self) -> None:
        """Send the session's events as fast as the client reads them, until the session ends."""
        while event := await self._session.next_event():
            self._put(self._wire.send(event))
            await self._outbox.wait_for_room()
            self._active_s = time.monotonic()
            if isinstance(event, SentenceAudio):
                # A message of the client that waits is read before the next audio is sent.
                await anyio.lowlevel.checkpoint()
        self._finish(self._close_code, self._close_reason)
