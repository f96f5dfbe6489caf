"""vLLM's dialect of /v1/realtime, streaming transcription with flat events: docs/wire/vllm-realtime.md.

Audio is base64 PCM16, mono, 16 kHz. Every `commit` with `final` true ends a transcript; more may follow on the same
connection. Joined deltas equal the text of `transcription.done`, to the character.

Where `model` names a conversation model, each such commit ends a turn, and the text is that of the response
(answers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from antiphon.audio.pcm import from_pcm16
from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.conversation import ConfigureConversation, ConversationConfig, ConversationEvent, CreateResponse
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ConfigureTranscription,
    SessionEnding,
    SpeechStarted,
    SpeechStopped,
    StreamTuning,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.protocols.fields import number
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.vllm.answers import VllmResponses
from antiphon.protocols.wire import Dialect, decode_event

# (field of a session.update, field of StreamTuning, least value, greatest value, whether it is a whole number)
TUNING: tuple[tuple[str, str, float, float, bool], ...] = (
    ("segment_duration_s", "segment_duration_s", 0.1, 30.0, False),
    ("rollback_tokens", "rollback_tokens", 0, 64, True),
    ("unfixed_chunks", "unfixed_chunks", 0, 64, True),
    ("max_prefix_tokens", "max_prefix_tokens", 1, 65536, True),
    ("max_audio_s", "max_audio_s", 5.0, 3600.0, False),
    ("realtime_max_tokens", "max_tokens", 1, 4096, True),
)
EVENTS = ("session.update", "input_audio_buffer.append", "input_audio_buffer.commit")


@dataclass(slots=True)
class VllmDialect(Dialect):
    """One connection that has chosen vLLM's dialect. Its `session.created` has been sent before (negotiation.py).

    Errors are queued as flat frames and change nothing; no method raises for what a client sends.
    """

    # None until the client has named a model.
    config: TranscriptionConfig | None = None
    # The names of the conversation model, None where none is loaded, and its voices.
    conversation_models: ModelNames | None = None
    voices: tuple[str, ...] = ()
    # Set where the client has named a conversation model.
    responses: VllmResponses | None = None
    _prompt: str = ""
    _voice: str | None = None
    _max_tokens: int | None = None
    # Whether the transcriber knows a language.
    language_check: Callable[[str], bool] = lambda _: True

    def receive(self, data: str | bytes) -> None:
        """Read one frame from the client: commands, or an error for the client, are queued.

        Never raises, whatever the frame is.
        """
        try:
            self._receive_event(data)
        except RemoteProtocolError as error:
            self._add_frame(type="error", error=error.message, code=error.code)

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event; several events have none.

        Raises LocalProtocolError for an event that no session of this dialect reports.
        """
        if self.responses and not isinstance(output, SessionEnding | TranscriptFailed):
            for fields in self.responses.frames(output):
                self._add_frame(**fields)
            return
        match output:
            case TranscriptDelta(_, text):
                self._add_frame(type="transcription.delta", delta=text)
            case TranscriptDone():
                self._done(output)
            case TranscriptFailed(_, message):
                self._add_frame(type="error", error=message, code="processing_error")
            case SessionEnding(code, message):
                self._add_frame(type="error", error=message, code=code)
            case SpeechStarted() | SpeechStopped() | TurnCommitted() | TurnCleared():
                pass
            case _:
                raise LocalProtocolError(f"the vLLM dialect has no frame for {type(output).__name__}")

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self._add_frame(type="error", error=f"Invalid audio data: over {max_bytes} bytes", code="invalid_audio")

    def _done(self, done: TranscriptDone) -> None:
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }
        extra: dict[str, Any] = {}
        if self.config and self.config.word_times:
            extra["words"] = [
                {"word": w.text, "start": round(w.start_s, 3), "end": round(w.end_s, 3)} for w in done.words
            ]
        self._add_frame(type="transcription.done", text=done.streamed, usage=usage, **extra)

    def _receive_event(self, data: str | bytes) -> None:
        event = decode_event(data, ("invalid_json", "Invalid JSON"), ("invalid_event", "An event is a JSON object"))
        match event.get("type"):
            case "session.update":
                self._update(event)
            case "input_audio_buffer.append":
                self._append(event)
            case "input_audio_buffer.commit":
                self._commit(event)
            case kind:
                raise RemoteProtocolError("unknown_event", f"Unknown event type: {kind}")

    def _update(self, event: dict[str, Any]) -> None:
        transcriber, conversation_model = self._find_model(event)
        previous = self.config or TranscriptionConfig()
        language = _text(event, "language", previous.language or "") or None
        if language and not self.language_check(language):
            raise RemoteProtocolError("invalid_event", f"Unsupported language: {language}")
        words = event.get("word_timestamps", previous.word_times)
        if not isinstance(words, bool):
            raise RemoteProtocolError("invalid_event", "Invalid field: word_timestamps")
        prompt = _text(event, "prompt", self._prompt)
        voice = _text(event, "voice", self._voice or "") or None
        tuning = _tuning(event, previous.tuning)
        self._prompt, self._voice = prompt, voice
        if not conversation_model:
            self.config = TranscriptionConfig(
                model=transcriber or "", language=language, prompt=prompt, vad=None, word_times=words, tuning=tuning
            )
            self._add_commands(ConfigureTranscription(self.config))
            return
        # The prompt is the conversation model's instructions; the transcriber that listens for it gets none.
        self.responses = self.responses or VllmResponses()
        self.config = TranscriptionConfig(language=language, vad=None, word_times=words, tuning=tuning, partials=False)
        if event.get("realtime_max_tokens") is not None:
            self._max_tokens = tuning.max_tokens
        config = ConversationConfig(self.config, prompt, bool(self.voices), voice, max_tokens=self._max_tokens)
        self._add_commands(ConfigureConversation(config))

    def _find_model(self, event: dict[str, Any]) -> tuple[str | None, str | None]:
        """The transcriber and the conversation model that an update names: one of them, the other is None.

        A native model is not served: this dialect's commits end the turns. Raises RemoteProtocolError for another name,
        and for the other kind of model after the session has begun with one.
        """
        name = event.get("model")
        if not isinstance(name, str) or not name:
            raise RemoteProtocolError("invalid_event", "Missing required field: model")
        transcriber, conversation_model = self.models.exact(name), None
        if not transcriber and self.conversation_models and not self.conversation_models.unit_ms:
            conversation_model = self.conversation_models.exact(name)
        if not transcriber and not conversation_model:
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.")
        if self.config and bool(conversation_model) != bool(self.responses):
            raise RemoteProtocolError("invalid_event", f"The session has begun: its model cannot become `{name}`.")
        return transcriber, conversation_model

    def _append(self, event: dict[str, Any]) -> None:
        self._require_config()
        audio = event.get("audio")
        if not isinstance(audio, str):
            raise RemoteProtocolError("invalid_audio", "Invalid audio data")
        try:
            data = decode_base64(audio)
        except ValueError:
            raise RemoteProtocolError("invalid_audio", "Invalid audio data") from None
        if len(data) % 2 or len(data) > self.max_append_bytes:
            raise RemoteProtocolError("invalid_audio", "Invalid audio data")
        if data:
            self._add_commands(AppendAudio(from_pcm16(data)))

    def _commit(self, event: dict[str, Any]) -> None:
        self._require_config()
        final = event.get("final", False)
        if not isinstance(final, bool):
            raise RemoteProtocolError("invalid_event", "Invalid field: final")
        self._add_commands(CommitAudio(final=final))
        if self.responses and final:
            self._add_commands(CreateResponse())

    def _require_config(self) -> None:
        if self.config is None:
            raise RemoteProtocolError(
                "model_not_validated", "Model not validated. Send a session.update with a model first."
            )


def _text(event: dict[str, Any], key: str, unset: str) -> str:
    value = event.get(key, unset)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RemoteProtocolError("invalid_event", f"Invalid field: {key}")
    return value


def _tuning(event: dict[str, Any], previous: StreamTuning) -> StreamTuning:
    values = {name: getattr(previous, name) for _, name, *_ in TUNING}
    for key, name, least, greatest, is_whole in TUNING:
        if event.get(key) is None:
            continue
        try:
            value = number(event[key], key, least, greatest)
        except RemoteProtocolError as error:
            raise RemoteProtocolError("invalid_event", error.message) from None
        if is_whole and value != int(value):
            raise RemoteProtocolError("invalid_event", f"Invalid value for '{key}': expected a whole number.")
        values[name] = int(value) if is_whole else value
    return StreamTuning(**values)
