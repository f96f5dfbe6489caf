"""A synthesis over Wyoming: a text, or the pieces of a text that is still being written, in; audio out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from antiphon.admission.certificate import Kind
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    ConfigureSpeech,
    FlushText,
    Granularity,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechConfig,
)
from antiphon.protocols.speech.fields import SpeechCatalog, SpeechFields, read_config
from antiphon.protocols.wyoming.messages import Synthesize, Text, code_of
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.sessions.speech.session import SpeechSession
from antiphon.shares.threads import in_thread
from antiphon.wyoming import WyomingAudio, WyomingEvent

if TYPE_CHECKING:
    from antiphon.server.wyoming.connection import WyomingJobs

# Samples of one `audio-chunk`.
CHUNK_SAMPLES = 2048


class SpeakJob:
    """One synthesis: of a `synthesize`, or of the chunks from `synthesize-start` to `synthesize-stop`.

    Home Assistant sends the whole text once more, as `synthesize`, before `synthesize-stop`. It is ignored.
    """

    kind: Kind = "speech"

    def __init__(self, connection: WyomingJobs) -> None:
        self._connection, self._state = connection, connection.state
        self.has_input, self.done = False, anyio.Event()
        self._session: SpeechSession | None = None
        self._is_stream = False
        # The configuration, when it is known; None if the job was refused.
        self._begins = anyio.Event()

    # --- Job ----------------------------------------------------------------------------------------------------------

    def takes(self, event: WyomingEvent) -> bool:
        return not self.has_input and event.kind in ("synthesize", "synthesize-chunk", "synthesize-stop")

    async def feed(self, event: WyomingEvent) -> None:
        match event.kind:
            case "synthesize" if self._session is None:
                asked: Synthesize = event.read(Synthesize)
                session = await self._open(asked, "sentence")
                session.handle(AppendText(asked.text))
                self._end(session)
            case "synthesize-start":
                self._is_stream = True
                await self._open(event.read(Synthesize), "clause")
            case "synthesize-chunk" if self._session:
                self._session.handle(AppendText(event.read(Text).text))
            case "synthesize-stop" if self._session:
                self._end(self._session)
            case "synthesize":
                # The text that was already streamed.
                pass
            case _:
                raise ValueError(f"{event.kind} without synthesize-start")

    async def run(self) -> None:
        await self._begins.wait()
        assert self._session
        send = self._connection.send
        rate_hz = self._state.loaded().required_synthesizer.profile.sample_rate_hz
        began = False
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._session.run)
                while event := await self._session.next_event():
                    match event:
                        case SentenceStarted(rate_hz=rate) if not began:
                            began, rate_hz = True, rate
                            await send("audio-start", WyomingAudio(rate_hz, 2, 1))
                        case SentenceAudio(data=data):
                            for at in range(0, len(data), 2 * CHUNK_SAMPLES):
                                chunk = data[at : at + 2 * CHUNK_SAMPLES]
                                await send("audio-chunk", WyomingAudio(rate_hz, 2, 1), chunk)
                        case SentenceDone(error=error) if error:
                            raise RemoteProtocolError("not_spoken", f"The text could not be spoken: {error}.")
                        case _:
                            pass
        finally:
            self._state.metrics.audio_s.labels("spoken").inc(self._session.audio_s)
        if not began:
            await send("audio-start", WyomingAudio(rate_hz, 2, 1))
        await send("audio-stop")
        if self._is_stream:
            await send("synthesize-stopped")

    # --- text ---------------------------------------------------------------------------------------------------------

    async def _open(self, asked: Synthesize, granularity: Granularity) -> SpeechSession:
        if asked.text_format not in (None, "text"):
            raise RemoteProtocolError("unsupported_text", "text_format is text; SSML is not spoken.", "text_format")
        models = self._state.loaded()
        if models.synthesizer is None:
            raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.")
        catalog = speech_catalog(self._state, self._connection.caller)
        # The catalog reads the files of uploaded voices.
        config = await in_thread(partial(_config, asked, catalog))
        session = self._session = SpeechSession(models.synthesizer, self._state.metrics.measure)
        session.handle(ConfigureSpeech(replace(config, granularity=granularity, stream=True)))
        self._begins.set()
        return session

    def _end(self, session: SpeechSession) -> None:
        self.has_input = True
        session.handle(FlushText())
        session.close()


def _config(asked: Synthesize, catalog: SpeechCatalog) -> SpeechConfig:
    """Return the configuration of a synthesis. Raises RemoteProtocolError for an unknown voice or language."""
    voice = asked.voice
    if voice is None:
        return read_config(SpeechFields(), catalog, "pcm")
    return read_config(SpeechFields(voice=voice.name, language=code_of(voice.language)), catalog, "pcm")
