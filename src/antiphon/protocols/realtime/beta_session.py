"""A conversation's session with the names of OpenAI's beta API: read into GA names, and shown with beta names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.protocols.fields import Text, decode
from antiphon.protocols.realtime.input_fields import (
    AudioInput,
    FormatFields,
    InputFields,
    NoiseReduction,
    TranscriptionFields,
    beta_format_name,
    format_of_beta,
)
from antiphon.protocols.realtime.items import NamedTool, VoiceId
from antiphon.protocols.realtime.session_fields import (
    BETA_NAMES,
    Echoed,
    OutputFields,
    OwnFields,
    SessionChanges,
    SessionFields,
    SessionHead,
    refuse_names,
)
from antiphon.protocols.realtime.turn_fields import TurnDetectionFields


class BetaFields(msgspec.Struct, forbid_unknown_fields=True):
    """A `session` with beta names. `temperature` and fields that cannot be changed have no effect."""

    modalities: list[Text] | Text | UnsetType | None = UNSET  # `["text"]` or `["audio", "text"]`.
    instructions: Text | UnsetType | None = UNSET  # Instructions for the language model.
    tools: list[msgspec.Raw] | UnsetType | None = UNSET  # Functions that the model may call.
    tool_choice: Text | NamedTool | UnsetType | None = UNSET  # Which function the model may or must call.
    max_response_output_tokens: int | Text | UnsetType | None = UNSET  # Maximum tokens of a response, or "inf".
    input_audio_format: FormatFields | Text | UnsetType = UNSET  # Format of the client's audio.
    input_audio_transcription: TranscriptionFields | UnsetType | None = UNSET  # Transcripts; null turns them off.
    input_audio_noise_reduction: NoiseReduction | UnsetType | None = UNSET  # Shown to the client; has no effect.
    # Turn detection; if null, the client ends turns by committing its audio.
    turn_detection: TurnDetectionFields | UnsetType | None = UNSET
    voice: VoiceId | Text | None = None  # Voice of the responses.
    output_audio_format: FormatFields | Text | None = None  # Format of the server's audio.
    speed: float | None = None  # Speaking rate; 1 is the voice's normal speed.
    temperature: Echoed = UNSET  # Accepted, but has no effect.
    model: Echoed = UNSET  # Accepted, but has no effect.
    type: Echoed = UNSET  # Accepted, but has no effect.
    tracing: Echoed = UNSET  # Only null and `auto` are accepted.
    include: list[Text] | UnsetType | None = UNSET  # Additional facts about transcripts: values of INCLUDABLE.
    client_secret: Echoed = UNSET  # Accepted, but has no effect.


class BetaSession(SessionHead, kw_only=True):
    """A session as the client sees it with beta names."""

    model: str  # The model's name as the client spells it.
    modalities: list[str]  # `["text"]` or `["audio", "text"]`.
    instructions: str  # Instructions for the language model.
    voice: VoiceId | str  # Voice of the responses.
    input_audio_format: str  # Format of the client's audio, as a beta name.
    output_audio_format: str  # Format of the server's audio, as a beta name.
    input_audio_transcription: object  # Transcripts of the user's turns; null if they are off.
    input_audio_noise_reduction: NoiseReduction | None  # Has no effect.
    turn_detection: object  # Turn detection; null if the client ends its turns.
    tools: list[msgspec.Raw]  # Functions that the model may call.
    tool_choice: str | NamedTool  # Which function the model may or must call.
    temperature: float = 0.8  # The hosted service's default, without effect.
    max_response_output_tokens: int | str  # Maximum number of tokens in a response, or "inf".


def read_beta_update(session: msgspec.Raw) -> SessionChanges:
    """Read an update with beta names, and convert its modalities into their GA form. Checks types, but not values.

    Raises RemoteProtocolError for an unknown field, including GA names.
    """
    refuse_names(session, BETA_NAMES)
    given = decode(session, BetaFields, "session")
    own = OwnFields(
        output_modalities=modalities_of_beta(given.modalities),
        instructions=given.instructions,
        tools=given.tools,
        tool_choice=given.tool_choice,
        max_output_tokens=given.max_response_output_tokens,
        tracing=given.tracing,
        include=given.include,
    )
    inputs = InputFields(
        format_of_beta(given.input_audio_format),
        given.input_audio_transcription,
        given.input_audio_noise_reduction,
        given.turn_detection,
    )
    output = OutputFields(format_of_beta(given.output_audio_format), given.voice, given.speed)
    return SessionChanges(own, inputs, output)


def modalities_of_beta(given: Sequence[object] | UnsetType | None) -> list[str] | UnsetType:
    """Return `["audio"]` if the modalities include audio, else `["text"]`. The beta API sends `["audio", "text"]`."""
    if given is UNSET:
        return UNSET
    return ["audio"] if "audio" in (given or ()) else ["text"]


def beta_session(head: tuple[str, int, str], fields: SessionFields, audio: AudioInput) -> BetaSession:
    """Return the session with beta names. The arguments are the same as for `ga_session`."""
    session_id, expires_at, model = head
    return BetaSession(
        id=session_id,
        expires_at=expires_at,
        model=model,
        modalities=["audio", "text"] if fields.speaks else ["text"],
        instructions=fields.instructions,
        voice=fields.output.voice,
        input_audio_format=beta_format_name(audio.format),
        output_audio_format=beta_format_name(fields.output.format),
        input_audio_transcription=audio.transcription,
        input_audio_noise_reduction=audio.noise_reduction,
        turn_detection=audio.turn_detection,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        max_response_output_tokens=fields.max_output_tokens,
    )
