"""One live speech stream: text in, sentences of audio out (`/v1/audio/speech/stream`, and those of other vendors)."""

from __future__ import annotations

import logging

import anyio.lowlevel

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import ConfigureSpeech, SentenceAudio, SpeechCommand
from antiphon.protocols.connection import SpeechStreamWire
from antiphon.protocols.speech.stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, SpeechDialect
from antiphon.protocols.wire import Received
from antiphon.server.credentials import Caller
from antiphon.server.live.session import CLOSE_INTERNAL, CLOSE_NORMAL, CLOSE_POLICY
from antiphon.server.live.speech_catalog import speech_catalog, with_sample
from antiphon.server.live.stream import LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.speech.session import SpeechSession
from antiphon.shares.threads import in_thread
from antiphon.transports.journal import ResumeToken
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "speech_stream"
# Seconds after which a client that reads nothing is considered gone. Until then its synthesis waits.
STALL_S = 300.0
# Number of frames that may wait for the socket. It is 0 so that no frame waits behind old audio after a cancel.
MAX_WAITING_FRAMES = 0


class LiveSpeech:
    """Serves one speech stream over an accepted WebSocket, and closes the WebSocket at the end. Call `run` once.

    `wire` is another vendor's dialect, `label` its name in the metrics, and `opened` the commands and frames with which
    it begins. Raises Refused while models load, and LookupError if no synthesizer is loaded.
    """

    def __init__(
        self,
        socket: WebSocketTransport,
        state: ServerState,
        caller: Caller,
        token: ResumeToken | None,
        wire: SpeechStreamWire | None = None,
        label: str = LABEL,
        opened: Received[SpeechCommand] | None = None,
    ) -> None:
        self._state = state
        self._stream = LiveStream(
            self, socket, state, caller, token, label, MAX_WAITING_FRAMES, waits_detached=True, stall_s=STALL_S
        )
        self._wire: SpeechStreamWire = wire or SpeechDialect(speech_catalog(state, caller))
        self._opened: Received[SpeechCommand] = opened or Received()
        self._session = SpeechSession(
            state.loaded().required_synthesizer, self._stream.live.measure, state.loaded().transcriber
        )

    async def run(self) -> None:
        """Serve until either side ends the stream, or it is not resumed within the grace period.

        A failure of the session ends only this stream. It is logged, not raised.
        """
        log.info("a speech stream begins")
        self._stream.put(self._opened.answers)
        for command in self._opened.commands:
            self._session.handle(command)
        try:
            await self._stream.serve(self._run_session, self._send_events)
        finally:
            self._state.metrics.audio_s.labels("spoken").inc(self._session.audio_s)
            self._stream.live.log_end(self._session.audio_s)

    # --- StreamedSession ----------------------------------------------------------------------------------------------

    @property
    def idle_limit_s(self) -> float:
        """The idle timeout in seconds, which is longer after the stream is configured."""
        if self._wire.idle_s is not None:
            return self._wire.idle_s
        speech = self._state.settings.speech
        return speech.idle_timeout_s if self._wire.configured else speech.config_timeout_s

    @property
    def num_bytes(self) -> int:
        return self._session.num_bytes

    @property
    def idle(self) -> bool:
        """True if no speech is made, or waits to be made or sent. A client that still receives is not idle."""
        return self._session.idle

    @property
    def is_silent(self) -> bool:
        """True if no utterance is open. The client may still add text to an open utterance."""
        return self._session.num_utterances == 0

    def refuse_idle(self) -> None:
        self._stream.put([self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)])

    async def handle(self, data: str | bytes) -> None:
        """Pass the commands of a message to the session, and send the resulting errors to the client.

        Waits while the client does not read its errors, and delays a client that sends too fast (`LiveStream.pace`).
        After the client has closed the stream, or if its configuration was refused, the stream finishes.
        """
        if self._wire.configured:
            received = self._wire.feed(data)
        else:
            # The configuration may name an uploaded voice, which is read from files.
            received = await in_thread(self._wire.feed, data)
        errors = [*received.answers]
        for command in received.commands:
            try:
                if isinstance(command, ConfigureSpeech):
                    command = ConfigureSpeech(await with_sample(self._state, command.config))
                self._session.handle(command)
            except RemoteProtocolError as error:
                errors.append(self._wire.refuse(error.message))
        # If a client causes errors, its messages are read no faster than it reads the errors.
        if self._stream.put(errors):
            await self._stream.live.outbox.wait_for_room()
        await self._stream.pace()
        if self._wire.finishing:
            self._stream.live.end(*self._wire.finishing)
        elif self._wire.closing and self._stream.live.lifecycle.reads_frames:
            self._stream.finish(CLOSE_NORMAL if self._wire.configured else CLOSE_POLICY)

    async def wind_up(self) -> None:
        """Have all received text spoken. The stream finishes after its last event is sent (`_send_events`)."""
        self._session.close()

    # --- the session --------------------------------------------------------------------------------------------------

    async def _run_session(self) -> None:
        try:
            await self._session.run()
        except Exception:
            # The boundary of the session: any failure in it ends only this stream.
            log.exception("a speech stream failed")
            self._stream.put([self._wire.refuse("The session failed.")])
            self._stream.finish(CLOSE_INTERNAL, "server_error")

    async def _send_events(self) -> None:
        """Send the session's events as fast as the client reads them, until the session ends."""
        while event := await self._session.next_event():
            self._stream.put(self._wire.send(event))
            await self._stream.live.outbox.wait_for_room()
            self._stream.mark_active()
            if isinstance(event, SentenceAudio):
                # Lets a waiting message of the client be read before the next audio is sent.
                await anyio.lowlevel.checkpoint()
        self._stream.finish()
