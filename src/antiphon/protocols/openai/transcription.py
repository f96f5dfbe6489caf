"""OpenAI's Realtime transcription session, with GA or beta names: docs/wire/openai-transcription.md.

With server VAD, the server detects turns. With `turn_detection: null`, the client ends each turn with a commit. Each
turn is an item. The deltas of an item may be sent before the item is committed. `completed.transcript` is the final of
the whole turn. It may differ from the joined deltas in words that the model first decoded differently.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio import Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationEvent
from antiphon.events.transcription import (
    ClearAudio,
    CommitAudio,
    ConfigureTranscription,
    TranscriptionEvent,
)
from antiphon.protocols.connection import Command, Context
from antiphon.protocols.fields import Reader, Text, decode
from antiphon.protocols.realtime.audio_buffer import AudioBuffer, appended, openai_audio
from antiphon.protocols.realtime.commands import FrameReader
from antiphon.protocols.realtime.input_fields import (
    PCM_24K,
    AudioInput,
    FormatFields,
    InputFields,
    NoiseReduction,
    SessionVoices,
    Transcription,
    TranscriptionFields,
    apply_input,
    beta_format_name,
    format_of_beta,
    session_voices,
)
from antiphon.protocols.realtime.messages import (
    ClientMessage,
    InputAudioBufferAppend,
    InputAudioBufferClear,
    InputAudioBufferCommit,
    read_message,
)
from antiphon.protocols.realtime.transcript_events import (
    KeptItems,
    TranscriptEvents,
    check_include,
)
from antiphon.protocols.realtime.turn_fields import SERVER_VAD, TurnDetectionFields
from antiphon.protocols.realtime.writer import EventWriter, beta_paths
from antiphon.protocols.wire import Frame

# Minimum new audio in a commit, in milliseconds. It is the same as OpenAI's.
MIN_COMMIT_MS = 100


class TranscriptionUpdate(ClientMessage, tag="session.update", kw_only=True, forbid_unknown_fields=True):
    """An update under its GA name. `session` has GA names, or beta names if they are in use."""

    session: msgspec.Raw


class BetaTranscriptionUpdate(TranscriptionUpdate, tag="transcription_session.update", forbid_unknown_fields=True):
    """An update under its beta name. `session` has beta names."""


TranscriptionMessage = (
    TranscriptionUpdate
    | BetaTranscriptionUpdate
    | InputAudioBufferAppend
    | InputAudioBufferCommit
    | InputAudioBufferClear
)
_MESSAGE: Reader[TranscriptionMessage] = Reader(TranscriptionMessage)


class _AudioFields(msgspec.Struct, forbid_unknown_fields=True):
    input: InputFields = msgspec.field(default_factory=InputFields)


class _GaFields(msgspec.Struct, forbid_unknown_fields=True):
    type: Text = "transcription"
    audio: _AudioFields = msgspec.field(default_factory=_AudioFields)
    include: list[Text] | UnsetType | None = UNSET


class _BetaFields(msgspec.Struct, forbid_unknown_fields=True):
    # Name of a format.
    input_audio_format: FormatFields | Text | UnsetType = UNSET
    # The settings of the transcriber; null changes nothing.
    input_audio_transcription: TranscriptionFields | UnsetType | None = UNSET
    # Shown to the client; has no effect.
    input_audio_noise_reduction: NoiseReduction | UnsetType | None = UNSET
    # Turn detection; if null, the client ends turns by committing its audio.
    turn_detection: TurnDetectionFields | UnsetType | None = UNSET
    # Additional facts about transcripts: values of INCLUDABLE.
    include: list[Text] | UnsetType | None = UNSET
    # Accepted, but has no effect.
    modalities: object = None
    # Accepted, but has no effect.
    client_secret: object = None
    # Accepted, but has no effect.
    type: object = None


class _GaNames(msgspec.Struct):
    """The fields that exist only in a GA update."""

    audio: msgspec.Raw | UnsetType = UNSET
    type: msgspec.Raw | UnsetType = UNSET


class _Shown(msgspec.Struct, kw_only=True):
    id: str
    object: str = "realtime.transcription_session"
    expires_at: int


class _ShownAudio(msgspec.Struct):
    input: AudioInput


class GaTranscriptionSession(_Shown, kw_only=True):
    """A session as the client sees it with GA names."""

    type: str = "transcription"
    audio: _ShownAudio
    include: list[str] | None


class BetaTranscriptionSession(_Shown, kw_only=True):
    """A session as the client sees it with beta names."""

    input_audio_format: str
    input_audio_transcription: object
    input_audio_noise_reduction: NoiseReduction | None
    turn_detection: object
    include: list[str] | None


class TranscriptionSnapshot(msgspec.Struct):
    """The stored form of a session. Never rename a field. `expires_at`: Unix seconds."""

    audio: AudioInput
    include: list[str] | None
    beta: bool
    expires_at: int
    items: KeptItems


class OpenAITranscription(FrameReader[TranscriptionMessage]):
    """The dialect of one connection, after its `session.created` was sent (negotiation.py).

    `model`: the name in the URL, shown as the client spells it. `beta`: events and sessions have beta names. A whole
    update is checked before any of it is applied.
    """

    name = "openai"
    min_commit_ms = MIN_COMMIT_MS

    def __init__(self, context: Context, session_id: str, expires_at: int, model: str, *, beta: bool) -> None:
        self._context = context
        self._session_id = session_id
        self._expires_at = expires_at
        super().__init__(EventWriter(context.new_id))
        self._writer.beta = beta
        self._transcripts = TranscriptEvents(self._writer, context.new_id)
        self._buffer = AudioBuffer(PCM_24K, openai_audio(context.max_append_bytes))
        self._audio = AudioInput(PCM_24K, Transcription(model), None, SERVER_VAD)
        self._voices = SessionVoices()
        self._include: list[str] | None = None

    # --- the session

    def preset(self, session: msgspec.Raw) -> None:
        """Apply the session of a client secret or a call, before the session begins. Sends nothing to the client.

        Raises RemoteProtocolError for an invalid field, and then changes nothing.
        """
        self._apply(session, beta_names=False)

    def snapshot(self) -> TranscriptionSnapshot:
        """Return the session's state to store."""
        items = self._transcripts.snapshot()
        return TranscriptionSnapshot(self._audio, self._include, self._writer.beta, self._expires_at, items)

    def restore(self, session_id: str, kept: TranscriptionSnapshot) -> None:
        """Continue the session `session_id` of another host from its stored state."""
        self._voices = session_voices(SessionVoices(), InputFields(), kept.audio, self._context)
        self._session_id, self._expires_at = session_id, kept.expires_at
        self._audio, self._include, self._writer.beta = kept.audio, kept.include, kept.beta
        self._transcripts.include = kept.include or []
        self._transcripts.restore(kept.items)
        self._buffer.set_format(kept.audio.format)

    def configured(self) -> ConfigureTranscription:
        """Return the command that begins the session or changes its configuration. It names the loaded model."""
        asked, vad = self._audio.transcription or Transcription(), self._audio.turn_detection
        models = self._context.models
        config = replace(
            self._audio.config(self._transcripts.include, self._voices.known),
            model=models.lenient(asked.model or "") or models.loaded[0],
            idle_timeout_ms=(vad.idle_timeout_ms or None) if vad else None,
        )
        return ConfigureTranscription(config)

    def session(self) -> GaTranscriptionSession | BetaTranscriptionSession:
        """Return the session as the client sees it, with the names in use: beta or GA."""
        audio = self._audio
        if not self._writer.beta:
            return GaTranscriptionSession(
                id=self._session_id, expires_at=self._expires_at, audio=_ShownAudio(audio), include=self._include
            )
        return BetaTranscriptionSession(
            id=self._session_id,
            expires_at=self._expires_at,
            input_audio_format=beta_format_name(audio.format),
            input_audio_transcription=audio.transcription,
            input_audio_noise_reduction=audio.noise_reduction,
            turn_detection=audio.turn_detection,
            include=self._include,
        )

    # --- from the client

    def _read(self, data: str | bytes) -> TranscriptionMessage:
        return read_message(data, _MESSAGE, _MESSAGE.tags)

    def _commands(self, message: TranscriptionMessage, data: str | bytes | msgspec.Raw) -> list[Command]:
        match message:
            case InputAudioBufferAppend(audio=audio):
                return [*appended(self._buffer.feed(audio))]
            case InputAudioBufferCommit():
                return [*appended(self._buffer.flush()), CommitAudio(event_id=message.own_id)]
            case InputAudioBufferClear():
                self._buffer.flush()
                return [ClearAudio()]
            case _:
                return self._update(message)

    def _update(self, message: TranscriptionUpdate) -> list[Command]:
        held_back = self._apply(message.session, beta_names=isinstance(message, BetaTranscriptionUpdate))
        name = "transcription_session.updated" if self._writer.beta else "session.updated"
        self._writer.event(name, session=self.session())
        return [*appended(held_back), self.configured()]

    def _apply(self, session: msgspec.Raw, *, beta_names: bool) -> Pcm:
        """Check a whole update, then apply it. If one field is invalid, the whole update is refused.

        Returns the audio that was held back in the previous format.
        """
        names = decode(session, _GaNames, "session")
        beta = beta_names or (self._writer.beta and names.audio is UNSET and names.type is UNSET)
        changes, include = _beta_changes(session) if beta else _ga_changes(session)
        with beta_paths(beta):
            audio = apply_input(self._audio, changes, self._context, "session.audio.input.", responds=False)
            voices = session_voices(self._voices, changes, audio, self._context)
        self._audio, self._voices, self._writer.beta = audio, voices, beta
        if include is not UNSET:
            self._include = include or []
            self._transcripts.include = self._include
        return self._buffer.change_format(audio.format)

    # --- to the client

    def send(self, event: TranscriptionEvent | ConversationEvent) -> list[Frame]:
        """Return the frames of an event. Raises LocalProtocolError if it cannot occur in a transcription session."""
        self._transcripts.write(event)  # type: ignore[arg-type]
        return self._writer.take()


def _ga_changes(session: msgspec.Raw) -> tuple[InputFields, list[str] | UnsetType | None]:
    given = decode(session, _GaFields, "session")
    if given.type != "transcription":
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value: '{given.type}'. Supported values are: 'transcription'.", "session.type"
        )
    return given.audio.input, check_include(given.include)


def _beta_changes(session: msgspec.Raw) -> tuple[InputFields, list[str] | UnsetType | None]:
    given = decode(session, _BetaFields, "session")
    changes = InputFields(
        format_of_beta(given.input_audio_format),
        given.input_audio_transcription,
        given.input_audio_noise_reduction,
        given.turn_detection,
    )
    return changes, check_include(given.include)
