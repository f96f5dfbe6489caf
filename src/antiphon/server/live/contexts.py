"""One live WebSocket that speaks several texts, each in a context with a speech session of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio.lowlevel
from starlette.websockets import WebSocket

from antiphon.audio.encode import StreamEncoder, StreamEncoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import ConfigureSpeech, SentenceAudio
from antiphon.protocols.contexts import (
    CloseWhenSpoken,
    ContextCommand,
    ContextWire,
    EndContext,
    OpenContext,
    SpeakInContext,
)
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.wire import Frame, Received
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.live.handshake import accept, send_last
from antiphon.server.live.session import CLOSE_INTERNAL
from antiphon.server.live.speech import MAX_WAITING_FRAMES, STALL_S
from antiphon.server.live.speech_catalog import speech_catalog, with_sample
from antiphon.server.live.stream import LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.speech.session import SpeechSession
from antiphon.shares.threads import in_thread
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)


async def serve_contexts(
    websocket: WebSocket,
    make: Callable[[SpeechCatalog], ContextWire],
    refusal: Callable[[RemoteProtocolError], tuple[Frame, int]],
) -> None:
    """Serve one WebSocket until it is closed. `make` makes its dialect in a thread, and may refuse its URL.

    `refusal` returns the frame and the close code for that. A WebSocket without a valid key, or without a synthesizer,
    is refused before the upgrade.
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    state.admission.refuse_if_draining()
    if state.loaded().synthesizer is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.")
    with state.admission.admit(caller, "speech"):
        await accept(websocket)
        try:
            wire = await in_thread(make, speech_catalog(state, caller))
        except RemoteProtocolError as error:
            frame, code = refusal(error)
            await send_last(websocket, [frame], (code, error.code))
            return
        await LiveContexts(WebSocketTransport(websocket), state, caller, wire).run()


class AsyncEncoder:
    """A StreamEncoder that works in a thread if its encoding is slow."""

    def __init__(self, encoding: StreamEncoding) -> None:
        self._encoding = encoding
        self._encoder: StreamEncoder | None = None

    async def feed(self, data: bytes) -> bytes:
        """Encode PCM16 and return the bytes that are complete, as `StreamEncoder.feed` does."""
        return await self._run(lambda encoder: encoder.feed(data))

    async def finish(self) -> bytes:
        """Return the rest of the stream. Call it once."""
        return await self._run(StreamEncoder.finish)

    async def _run(self, work: Callable[[StreamEncoder], bytes]) -> bytes:
        def call() -> bytes:
            # The first encoder of a codec takes 60 ms to make, because it imports FFmpeg.
            self._encoder = self._encoder or StreamEncoder(self._encoding)
            return work(self._encoder)

        return await in_thread(call) if self._encoding.is_slow else call()


@dataclass(slots=True)
class _Speaking:
    """A context: its speech session, and the encoding of its stream."""

    session: SpeechSession
    encoding: StreamEncoding


class LiveContexts:
    """Serves one such WebSocket, which is accepted, and closes it at the end. Call `run` once.

    `wire` is the dialect. Raises Refused while models load, and LookupError if no synthesizer is loaded.
    """

    def __init__(self, socket: WebSocketTransport, state: ServerState, caller: Caller, wire: ContextWire) -> None:
        self._state = state
        self._wire = wire
        self._stream = LiveStream(self, socket, state, caller, None, wire.name, MAX_WAITING_FRAMES, stall_s=STALL_S)
        self._synthesizer = state.loaded().required_synthesizer
        self._aligner = state.loaded().transcriber
        # The contexts that have not ended, by their names.
        self._contexts: dict[str, _Speaking] = {}
        # How to close the connection after its last context; None if it goes on.
        self._closes: CloseWhenSpoken | None = None
        self._winds_up = False
        self._audio_s = 0.0

    async def run(self) -> None:
        """Serve until either side ends the connection. A failure of a session ends it. It is logged, not raised."""
        log.info("a connection with contexts begins (%s)", self._wire.name)
        try:
            await self._stream.serve()
        finally:
            self._audio_s += sum(context.session.audio_s for context in self._contexts.values())
            self._state.metrics.audio_s.labels("spoken").inc(self._audio_s)
            self._stream.live.log_end(self._audio_s)

    # --- StreamedSession ----------------------------------------------------------------------------------------------

    @property
    def idle_limit_s(self) -> float:
        return self._wire.idle_s

    @property
    def num_bytes(self) -> int:
        return sum(context.session.num_bytes for context in self._contexts.values())

    @property
    def idle(self) -> bool:
        """True if no context speaks, or has anything to say or to send."""
        return all(context.session.idle for context in self._contexts.values())

    @property
    def is_silent(self) -> bool:
        """True if no context has an open utterance."""
        return not any(context.session.num_utterances for context in self._contexts.values())

    def refuse_idle(self) -> None:
        received = self._wire.idled()
        self._stream.put(received.answers)
        for command in received.commands:
            if isinstance(command, CloseWhenSpoken):
                self._stream.finish(command.code, command.reason)

    async def handle(self, data: str | bytes) -> None:
        """Carry out the commands of a message, and send its answers to the client.

        Waits while the client does not read its errors, and delays a client that sends messages too fast.
        """
        received = self._wire.feed(data)
        refusals = self._stream.put(received.answers)
        for command in received.commands:
            try:
                await self._carry_out(command)
            except RemoteProtocolError as error:
                context = "" if isinstance(command, CloseWhenSpoken) else command.context
                refusals = self._refuse(self._wire.refuse(error, context)) or refusals
        if refusals:
            await self._stream.live.outbox.wait_for_room()
        await self._stream.pace()
        self._close_if_spoken()

    async def wind_up(self) -> None:
        """Have all flushed text spoken. The connection is closed after the last context has ended."""
        self._winds_up = True
        for context in self._contexts.values():
            context.session.close()
        self._close_if_spoken()

    # --- contexts -----------------------------------------------------------------------------------------------------

    async def _carry_out(self, command: ContextCommand) -> None:
        match command:
            case OpenContext(name, config, encoding):
                config = await with_sample(self._state, config)
                session = SpeechSession(self._synthesizer, self._stream.live.measure, self._aligner)
                session.handle(ConfigureSpeech(config))
                self._contexts[name] = context = _Speaking(session, encoding)
                self._stream.live.start(partial(self._run_session, session))
                self._stream.live.start(partial(self._send_events, name, context))
            case SpeakInContext(name, speech):
                if opened := self._contexts.get(name):
                    opened.session.handle(speech)
            case EndContext(name):
                if opened := self._contexts.get(name):
                    opened.session.close()
            case CloseWhenSpoken():
                self._closes = self._closes or command

    async def _run_session(self, session: SpeechSession) -> None:
        try:
            await session.run()
        except Exception:
            # The boundary of the session: any failure in it ends only this connection.
            log.exception("a context failed")
            self._refuse(self._wire.refuse(RemoteProtocolError("server_error", "The session failed."), ""))
            self._stream.finish(CLOSE_INTERNAL, "server_error")

    async def _send_events(self, name: str, context: _Speaking) -> None:
        """Send a context's events as fast as the client reads them, until its session ends."""
        session, encoder = context.session, AsyncEncoder(context.encoding)
        while event := await session.next_event():
            audio = await encoder.feed(event.data) if isinstance(event, SentenceAudio) else b""
            self._stream.put(self._wire.send(name, event, audio))
            await self._stream.live.outbox.wait_for_room()
            self._stream.mark_active()
            # Lets a waiting message of the client be read before the next audio is sent.
            await anyio.lowlevel.checkpoint()
        rest = await encoder.finish()
        del self._contexts[name]
        self._audio_s += session.audio_s
        self._stream.put(self._wire.ended(name, rest))
        self._close_if_spoken()

    def _refuse(self, refusal: Received[ContextCommand]) -> bool:
        """Send a refusal, and note whether it closes the connection. Returns whether it has frames."""
        closes = (command for command in refusal.commands if isinstance(command, CloseWhenSpoken))
        self._closes = self._closes or next(closes, None)
        return self._stream.put(refusal.answers)

    def _close_if_spoken(self) -> None:
        if self._contexts:
            return
        if self._closes:
            self._stream.finish(self._closes.code, self._closes.reason)
        elif self._winds_up:
            self._stream.finish()
