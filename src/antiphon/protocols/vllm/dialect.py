"""vLLM's dialect of /v1/realtime: streaming transcription with flat events. See docs/wire/vllm-realtime.md.

Audio is base64 PCM16, mono, 16 kHz. Each `commit` with `final: true` ends a transcript. Another transcript may follow
on the same connection. The joined deltas are exactly the text of `transcription.done`.

If `model` names a conversation model, each such commit ends a turn, and the text is the response's (answers.py).
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import from_pcm16
from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ConfigureConversation,
    ConversationConfig,
    CreateResponse,
)
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ConfigureTranscription,
    SessionEnding,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TurnCleared,
    TurnCommitted,
)
from antiphon.protocols.connection import Command, Context, Event
from antiphon.protocols.fields import Unread, warnings_of
from antiphon.protocols.realtime.input_fields import NO_SPEAKER_MODEL, known_voices
from antiphon.protocols.realtime.transcript_events import shown_words
from antiphon.protocols.vllm.answers import VllmResponses
from antiphon.protocols.vllm.messages import (
    VllmAppend,
    VllmCancel,
    VllmCommit,
    VllmUpdate,
    applied,
    has_tuning,
    read_tuning,
    read_vllm,
    usage_of,
)
from antiphon.protocols.wire import Frame, Received, message

# Duration of a segment of an unfinished request, in seconds. It is the same as in vLLM-Omni.
SEGMENT_S = 5.0
# Maximum number of responses that a connection waits for. At the limit, new audio extends the open segment.
MAX_ASKED = 4


class VllmDialect:
    """One connection that has chosen vLLM's dialect, after its `session.created` was sent (negotiation.py).

    An invalid frame is answered with a flat error and has no other effect. No method raises for a client's input.
    """

    name = "vllm"
    min_commit_ms = 0

    def __init__(self, context: Context) -> None:
        self._context = context
        # The configuration; None until the client names a model.
        self._config: TranscriptionConfig | None = None
        # The writer of responses; None unless the client has named a conversation model.
        self._responses: VllmResponses | None = None
        self._prompt = ""
        # The names of the known speakers.
        self.known_speakers: list[str] = []
        self._voice: str | None = None
        self._max_tokens: int | None = None
        # Number of samples since the last commit.
        self._num_samples = 0
        # Number of responses in the current request; None if the next commit begins a new request.
        self._num_segments: int | None = None

    def snapshot(self) -> TranscriptionConfig | None:
        """Return the configuration to store, without voices; None if there is none yet, or if a conversation model
        answers.
        """
        return replace(self._config, known_voices=()) if self._config and not self._responses else None

    def restore(self, config: TranscriptionConfig, known_speakers: list[str]) -> ConfigureTranscription:
        """Continue a stored transcription. Returns the command that begins its session."""
        known = known_voices(known_speakers, self._context, "known_speaker_names", leaves_out=True)
        self._config, self._prompt = replace(config, known_voices=known), config.prompt
        self.known_speakers = known_speakers
        return ConfigureTranscription(self._config)

    def feed(self, data: str | bytes) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised."""
        try:
            return self._received(data)
        except RemoteProtocolError as error:
            return Received([], self.refuse(error, None))

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have no frames.

        Raises LocalProtocolError for an event that cannot occur in this dialect.
        """
        if self._responses and not isinstance(event, SessionEnding | TranscriptFailed):
            return self._responses.frames(event)
        match event:
            case TranscriptDelta(_, text):
                if self._config and self._config.word_times:
                    return [message(type="transcription.delta", delta=text, words=shown_words(event.words))]
                return [message(type="transcription.delta", delta=text)]
            case TranscriptDone():
                return [self._done(event)]
            case TranscriptFailed(_, text):
                return [_error("processing_error", text)]
            case SessionEnding(code, text):
                return [_error(code, text)]
            case SpeechStarted() | SpeechStopped() | TurnCommitted() | TurnCleared():
                return []
            case _:
                raise LocalProtocolError(f"the vLLM dialect has no frame for {type(event).__name__}")

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return [_error("invalid_audio", f"Invalid audio data: over {max_bytes} bytes")]

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Ignores `event_id`, because messages have no ids in this dialect."""
        frames = [_error(error.code, error.message)]
        if self._responses and error.code == "memory_limit_exceeded":
            frames += self._responses.forget()
        return frames

    def _done(self, done: TranscriptDone) -> Frame:
        usage = usage_of(done.prompt_tokens, done.completion_tokens)
        words = {"words": shown_words(done.words)} if self._config and self._config.word_times else {}
        label = {"speaker_label": done.speaker_label} if done.speaker_label else {}
        return message(type="transcription.done", text=done.streamed, usage=usage, **words, **label)

    def _received(self, data: str | bytes) -> Received[Command]:
        match read_vllm(data):
            case VllmUpdate() as update:
                return Received([self._update(update)], self._updated(update, warnings_of(data, VllmUpdate)))
            case VllmAppend(audio):
                return Received(self._append(audio))
            case VllmCommit(final):
                self._require_config()
                if not self._responses or not (final or self._hears):
                    return Received([CommitAudio(final=final)])
                return self._commit(self._responses, final=final)
            case VllmCancel():
                self._require_config()
                if not self._responses:
                    raise RemoteProtocolError("response_cancel_not_active", "This model transcribes: nothing to cancel")
                return Received([CancelResponse()])

    @property
    def _hears(self) -> bool:
        models = self._context.conversation_models
        return self._responses is not None and models is not None and models.hears

    @property
    def _can_end_segment(self) -> bool:
        """Whether another segment of the current request may be answered. Only for a model that hears audio."""
        responses = self._responses if self._hears and self._num_segments is not None else None
        return responses is not None and responses.num_asked < MAX_ASKED

    def _commit(self, responses: VllmResponses, *, final: bool) -> Received[Command]:
        """End a segment of the request. `final`: it is the last segment."""
        if self._num_segments is None:
            self._num_segments = 0
        commands: list[Command] = []
        if not final and not self._can_end_segment:
            return Received([])
        if self._num_samples or (final and not self._num_segments):
            commands = self._end_segment(final=final)
            answers = list[Frame]()
        else:
            answers = responses.finish() if final else []
        if final:
            self._num_segments = None
        return Received(commands, answers)

    def _end_segment(self, *, final: bool) -> list[Command]:
        """Request a response to the audio that was appended since the last commit.

        The response waits for the request's earlier segments. It cuts off the response to an earlier request.
        """
        assert self._responses
        self._responses.ask(final=final)
        begins = not self._num_segments
        self._num_segments, self._num_samples = (self._num_segments or 0) + 1, 0
        return [CommitAudio(final=True), CreateResponse(when_busy="cut" if begins else "wait")]

    def _updated(self, update: VllmUpdate, warnings: list[Unread]) -> list[Frame]:
        """Return the answer to an update after it was applied.

        If the update had tuning, the answer reports the tuning that the session now uses. It also warns about unknown
        fields.
        """
        profile, config = self._context.transcriber, self._config
        followed: dict[str, float | bool | list[Unread]] = {}
        if profile and config and has_tuning(update):
            followed |= applied(profile, config.tuning)
            if self._responses and self._max_tokens is not None:
                followed["realtime_max_tokens"] = self._max_tokens
        language = config.language if config and self._responses else None
        if warned := [*warnings, *self._context.unspoken(language, "language")]:
            followed["warnings"] = warned
        return [message(type="session.updated", model=update.model, **followed)]

    def _update(self, update: VllmUpdate) -> Command:
        transcriber, conversation_model = self._find_model(update.model)
        previous = self._config or TranscriptionConfig()
        language = (previous.language if update.language is UNSET else update.language) or None
        if language and not self._context.knows_language(language):
            raise RemoteProtocolError("invalid_event", f"Unsupported language: {language}")
        words = previous.word_times if update.word_timestamps is UNSET else update.word_timestamps
        tuning = read_tuning(update, previous.tuning, self._context.tuning_caps)
        labels = previous.speaker_labels if update.speaker_labels is UNSET else update.speaker_labels
        if labels and not self._context.tells_voices:
            raise RemoteProtocolError("invalid_event", NO_SPEAKER_MODEL)
        known = previous.known_voices
        if update.known_speaker_names is not UNSET:
            known = known_voices(update.known_speaker_names or (), self._context, "known_speaker_names")
        self._context.check_voice(update.voice or "", "voice")
        if update.prompt is not UNSET:
            self._prompt = update.prompt or ""
        if update.voice is not UNSET:
            self._voice = update.voice or None
        if update.known_speaker_names is not UNSET:
            self.known_speakers = update.known_speaker_names or []
        if not conversation_model:
            self._config = TranscriptionConfig(
                *(transcriber or "", language, self._prompt, None, words),
                tuning=tuning,
                speaker_labels=labels,
                known_voices=known,
            )
            return ConfigureTranscription(self._config)
        # The prompt is for the conversation model. The transcriber that works for that model gets no prompt.
        self._responses = self._responses or VllmResponses()
        self._config = TranscriptionConfig(language=language, vad=None, word_times=words, tuning=tuning, partials=False)
        if update.realtime_max_tokens is not None:
            self._max_tokens = tuning.max_tokens
        speaks = bool(self._context.voices)
        return ConfigureConversation(
            ConversationConfig(self._config, self._prompt, speaks, self._voice, max_tokens=self._max_tokens)
        )

    def _find_model(self, name: object) -> tuple[str | None, str | None]:
        """Return the transcriber or the conversation model that an update names. The other one is None.

        A native model cannot be used in this dialect, because commits end the turns. Raises RemoteProtocolError for an
        unknown name, and for a change between the two kinds of model.
        """
        if not isinstance(name, str) or not name:
            raise RemoteProtocolError("invalid_event", "Missing required field: model")
        context = self._context
        transcriber, conversation_model = context.models.exact(name), None
        if not transcriber and context.conversation_models and not context.unit_ms:
            conversation_model = context.conversation_models.exact(name)
        if not transcriber and not conversation_model:
            raise RemoteProtocolError("model_not_found", f"The model `{name}` does not exist.")
        if self._config and bool(conversation_model) != bool(self._responses):
            raise RemoteProtocolError("invalid_event", f"The session has begun: its model cannot become `{name}`.")
        return transcriber, conversation_model

    def _append(self, audio: str) -> list[Command]:
        self._require_config()
        try:
            data = decode_base64(audio)
        except ValueError:
            raise RemoteProtocolError("invalid_audio", "Invalid audio data") from None
        if len(data) % 2 or len(data) > self._context.max_append_bytes:
            raise RemoteProtocolError("invalid_audio", "Invalid audio data")
        commands, pcm = list[Command](), from_pcm16(data)
        assert self._config
        size = int((self._config.tuning.segment_duration_s or SEGMENT_S) * SAMPLE_RATE_HZ)
        while self._can_end_segment and self._num_samples + len(pcm) >= size:
            room = max(1, size - self._num_samples)
            commands += [AppendAudio(pcm[:room]), *self._end_segment(final=False)]
            pcm = pcm[room:]
        self._num_samples += len(pcm)
        return [*commands, AppendAudio(pcm)] if len(pcm) else commands

    def _require_config(self) -> None:
        if self._config is None:
            raise RemoteProtocolError(
                "model_not_validated", "Model not validated. Send a session.update with a model first."
            )


def _error(code: str, text: str) -> Frame:
    return message(type="error", error=text, code=code)
