"""A transcription over Wyoming: audio in, events of speech and text out, and one transcript at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from antiphon.admission.certificate import Kind
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, from_frames
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.conversation import ConversationEvent
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.protocols.model_names import unknown_language
from antiphon.protocols.wyoming.messages import Text, Timestamp, Transcribe, Transcript, code_of
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.end_of_turn import semantic_vad
from antiphon.wyoming import WyomingAudio, WyomingEvent

if TYPE_CHECKING:
    from antiphon.server.wyoming.connection import WyomingJobs

# If this server finds the end of the speech: seconds without speech after which the transcript is empty, and seconds
# of audio after which the speech so far is transcribed. A client that waits for the end would wait forever.
NO_SPEECH_S, MAX_SPEECH_S = 10.0, 60.0


class TranscribeJob:
    """One transcription. It ends with the first turn that has words, or with the client's `audio-stop`.

    With `--wyoming-endpointing client`, only `audio-stop` ends it. Audio after the end is ignored.
    """

    kind: Kind = "captions"

    def __init__(self, connection: WyomingJobs) -> None:
        self._connection, self._state = connection, connection.state
        self.has_input, self.done = False, anyio.Event()
        self._finds_end = self._state.settings.wyoming.wyoming_endpointing == "server"
        self._asked = Transcribe()
        self._inbox = Inbox(self._state.settings.audio.max_backlog_s, is_fed=lambda: not self.has_input)
        # Set with the first event, or with the first audio if a `transcribe` came first.
        self._begins = anyio.Event()
        self._format: WyomingAudio | None = None
        self._resampler: Resampler | None = None
        self._num_samples = 0
        self._has_started = self._has_speech = False
        # The text of each turn that has ended, and the language of the last.
        self._texts: list[str] = []
        self._language = ""
        self._scope = anyio.CancelScope()
        # The turn of the last `transcript-chunk`; None before the first.
        self._streamed: int | None = None

    # --- Job ----------------------------------------------------------------------------------------------------------

    def takes(self, event: WyomingEvent) -> bool:
        if self.has_input:
            # The rest of a stream whose end this server has found.
            return self._is_early and event.kind in ("audio-chunk", "audio-stop")
        if event.kind == "transcribe":
            return False
        return event.kind in ("audio-chunk", "audio-stop") or (event.kind == "audio-start" and not self._has_started)

    _is_early = False

    async def feed(self, event: WyomingEvent) -> None:
        if self.has_input:
            self._is_early = event.kind != "audio-stop"
            return
        match event.kind:
            case "transcribe":
                self._asked = event.read(Transcribe)
                self._check(self._asked)
            case "audio-start":
                self._has_started = True
                self._take_format(event.read(WyomingAudio))
            case "audio-chunk":
                self._has_started = True
                await self._append(event)
            case _:
                await self._end()
        if event.kind != "transcribe":
            self._begins.set()

    async def run(self) -> None:
        await self._begins.wait()
        models = self._state.loaded()
        config = TranscriptionConfig(
            language=code_of(self._asked.language),
            vad=semantic_vad(self._asked.eagerness) if self._finds_end else None,
            keyterms=self._asked.keyterms,
            preflight=self._finds_end,
        )
        session = TranscriptionSession(
            config,
            models.required_transcriber,
            models.required_vad,
            self._inbox,
            self._emit,
            measure=self._state.metrics.measure,
            turn_detector=models.turn_detector,
        )
        try:
            with self._scope:
                await session.run()
        finally:
            self._state.metrics.audio_s.labels("live").inc(session.audio_s)
            self._inbox.close()
        self._is_early = not self.has_input
        self.has_input = True
        if self._streamed is not None:
            await self._connection.send("transcript-stop")
        text = " ".join(self._texts)
        await self._connection.send("transcript", Transcript(text, self._language or None))

    # --- audio --------------------------------------------------------------------------------------------------------

    def _check(self, asked: Transcribe) -> None:
        """Raise RemoteProtocolError for an unknown model, language or sensitivity."""
        names, profile = self._state.transcriber_names, self._state.loaded().required_transcriber.profile
        if asked.name and names.lenient(asked.name) is None:
            raise RemoteProtocolError("model_not_found", f"The model `{asked.name[:100]}` does not exist.", "name")
        language = code_of(asked.language)
        if language and language not in profile.languages:
            raise unknown_language(language, profile.languages.__contains__, "language")
        _ = asked.eagerness

    def _take_format(self, asked: WyomingAudio) -> None:
        """Use a format for the audio that follows. Raises RemoteProtocolError if it is not supported."""
        if asked != self._format:
            try:
                from_frames(b"", asked.width, asked.channels)
                self._resampler = Resampler(asked.rate, SAMPLE_RATE_HZ)
            except ValueError as error:
                raise RemoteProtocolError("unsupported_audio", f"Unsupported audio: {error}.", "rate") from None
            self._format = asked

    async def _append(self, event: WyomingEvent) -> None:
        asked: WyomingAudio = event.read(WyomingAudio)
        if asked != self._format and self._resampler:
            await self._put(AppendAudio(self._resampler.flush()))
        self._take_format(asked)
        assert self._resampler
        pcm = self._resampler.feed(from_frames(event.payload, asked.width, asked.channels))
        self._num_samples += len(pcm)
        await self._put(AppendAudio(pcm))
        limit_s = MAX_SPEECH_S if self._has_speech else NO_SPEECH_S
        if self._finds_end and self._num_samples > limit_s * SAMPLE_RATE_HZ:
            self._is_early = True
            await self._end()

    async def _end(self) -> None:
        """Commit the audio so far. The session ends when it is transcribed."""
        self.has_input = True
        if self._resampler:
            await self._put(AppendAudio(self._resampler.flush()))
        if self._num_samples:
            await self._put(CommitAudio())
        self._inbox.close()

    async def _put(self, command: AppendAudio | CommitAudio) -> None:
        await self._inbox.put(command)

    # --- the session's events -----------------------------------------------------------------------------------------

    async def _emit(self, event: TranscriptionEvent | ConversationEvent) -> None:
        send = self._connection.send
        match event:
            case SpeechStarted(_, at_ms):
                self._has_speech = True
                await send("voice-started", Timestamp(at_ms))
            case SpeechStopped(_, at_ms):
                await send("voice-stopped", Timestamp(at_ms))
            case TranscriptDelta(turn, text) if text:
                if self._streamed is None:
                    await send("transcript-start")
                elif self._streamed != turn:
                    text = f" {text}"
                self._streamed = turn
                await send("transcript-chunk", Text(text))
            case TranscriptDone(_, text, language=language):
                self._language = language or code_of(self._asked.language) or ""
                if text:
                    self._texts.append(text)
                    if self._finds_end and not self.has_input:
                        self._scope.cancel()
            case TranscriptFailed(_, message):
                raise ModelError(message)
