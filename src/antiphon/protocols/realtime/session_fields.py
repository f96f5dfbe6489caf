"""Reads, checks and shows the fields of a conversation's session, with GA (general availability) names.

docs/wire/openai-realtime.md describes the fields under "The session". `input_fields.py` checks the input fields, and
`beta_session.py` converts sessions with beta names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationConfig
from antiphon.protocols.connection import Context
from antiphon.protocols.fields import Text, decode, merged, number, unknown_parameter
from antiphon.protocols.realtime.call_fields import CallFields, CallSettings, call_settings
from antiphon.protocols.realtime.input_fields import (
    PCM_24K,
    AudioFormat,
    AudioInput,
    FormatFields,
    InputFields,
    SessionVoices,
    TranscriptionFields,
    check_format,
)
from antiphon.protocols.realtime.items import NamedTool, VoiceId, check_nothing_asked, tool_choice_from, tools_from
from antiphon.protocols.realtime.tool_servers import servers_from, shown_tool
from antiphon.protocols.realtime.transcript_events import check_include
from antiphon.protocols.realtime.turn_fields import TurnDetection

# A value that has no effect in this server. The session shows it as the client sent it.
Echoed = msgspec.Raw | UnsetType
_NULL = msgspec.Raw(b"null")


class Truncation(msgspec.Struct, forbid_unknown_fields=True):
    """The object form of `truncation`. `token_limits` is not supported."""

    type: str | UnsetType = UNSET
    retention_ratio: float | UnsetType = UNSET
    token_limits: Echoed = UNSET


class OutputFields(msgspec.Struct, forbid_unknown_fields=True):
    """Changes to `session.audio.output`, as a client sends them. Null changes nothing.

    `ducking` is an extension. It requests events that say when to pause playback.
    """

    format: FormatFields | Text | None = None
    voice: VoiceId | Text | None = None
    speed: float | None = None
    ducking: bool | None = None


class AudioFields(msgspec.Struct, forbid_unknown_fields=True):
    """`session.audio` as a client sends it."""

    input: InputFields | None = None
    output: OutputFields | None = None


class OwnFields(msgspec.Struct):
    """The session's fields other than audio input and output, as a client sends them."""

    output_modalities: list[Text] | Text | UnsetType | None = UNSET  # `["audio"]` or `["text"]`.
    instructions: Text | UnsetType | None = UNSET  # Instructions for the language model.
    tools: list[msgspec.Raw] | UnsetType | None = UNSET  # Functions that the model may call.
    tool_choice: Text | NamedTool | UnsetType | None = UNSET  # Which function the model may or must call.
    max_output_tokens: int | Text | UnsetType | None = UNSET  # Maximum number of tokens in a response, or "inf".
    truncation: Text | Truncation | UnsetType | None = UNSET  # How to shorten a history that exceeds the context.
    tracing: Echoed = UNSET  # Only null and `auto` are accepted, because the server makes no traces.
    prompt: Echoed = UNSET  # Only null is accepted, because the server stores no prompts.
    include: list[Text] | UnsetType | None = UNSET  # Additional facts about transcripts: values of INCLUDABLE.
    reasoning: Echoed = UNSET  # Only null is accepted.
    parallel_tool_calls: bool | UnsetType | None = UNSET  # Whether a response may contain several calls; null: yes.
    tool_calls: CallFields | UnsetType | None = UNSET  # What happens until results of calls are known; an extension.


class GaFields(OwnFields, forbid_unknown_fields=True):
    """A `session` with GA names. Fields that identify the session cannot be changed."""

    type: Text = "realtime"  # Must be `realtime`.
    object: Echoed = UNSET  # Accepted, but has no effect.
    id: Echoed = UNSET  # Accepted, but has no effect.
    model: Echoed = UNSET  # Accepted, but has no effect.
    expires_at: Echoed = UNSET  # Accepted, but has no effect.
    audio: AudioFields | None = None  # Input and output fields.
    # Additional events that clients of Hugging Face's speech-to-speech can read. This server sends none of them.
    extensions: list[Text] | None = None

    @property
    def is_speech_to_speech(self) -> bool:
        """Whether the client is one of speech-to-speech. Such a client gets 16 kHz and transcripts by default."""
        return any(name.startswith("speech_to_speech.") for name in self.extensions or ())


# For each beta name of a field: its GA name. If an update has a name of the first group, it uses beta names, unless it
# also has a name that exists only in GA.
_GA_NAMES = {
    "modalities": "output_modalities",
    "voice": "audio.output.voice",
    "input_audio_format": "audio.input.format",
    "input_audio_transcription": "audio.input.transcription",
    "input_audio_noise_reduction": "audio.input.noise_reduction",
    "output_audio_format": "audio.output.format",
    "turn_detection": "audio.input.turn_detection",
}
_MORE_GA_NAMES = {"speed": "audio.output.speed", "max_response_output_tokens": "max_output_tokens"}
# For each name that exists only in GA: its beta name.
BETA_NAMES = {"output_modalities": "modalities", "max_output_tokens": "max_response_output_tokens", "audio": "voice"}


class SessionChanges(msgspec.Struct):
    """The changes in an update, under GA names: the session's own fields, its input and its output."""

    own: OwnFields
    input: InputFields
    output: OutputFields


class SessionOutput(msgspec.Struct):
    """`session.audio.output` as the client sees it. `speed` 1.0 is the normal speed. `ducking` is shown if set."""

    format: AudioFormat = PCM_24K
    voice: VoiceId | str = ""
    speed: float = 1.0
    ducking: bool | UnsetType = UNSET

    @property
    def voice_name(self) -> str | None:
        """The voice's name as the client spells it."""
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class SessionFields(msgspec.Struct):
    """The session's fields except its input, as the client sees them with GA names.

    They are stored with a conversation under these names.
    """

    output_modalities: list[str]  # `["audio"]` or `["text"]`.
    instructions: str = ""  # Instructions for the language model.
    tools: list[msgspec.Raw] = []  # Functions that the model may call, and tool servers, without their headers.
    tool_choice: str | NamedTool = "auto"  # Which function the model may or must call.
    max_output_tokens: int | Literal["inf"] = "inf"  # Maximum number of tokens in a response.
    truncation: str | Truncation = "auto"  # How to shorten a history that exceeds the context.
    tracing: msgspec.Raw = _NULL  # Always null, because the server makes no traces.
    prompt: msgspec.Raw = _NULL  # Always null, because the server stores no prompts.
    include: list[str] | None = None  # Additional facts about transcripts: values of INCLUDABLE.
    parallel_tool_calls: bool | UnsetType | None = UNSET  # Whether a response may contain several calls.
    tool_calls: CallSettings | UnsetType = UNSET  # What happens until results of calls are known.
    # Format, voice and speed of the responses' audio.
    output: SessionOutput = msgspec.field(default_factory=SessionOutput)

    @property
    def speaks(self) -> bool:
        """Whether responses are spoken. If not, they are text."""
        return self.output_modalities == ["audio"]

    @property
    def included(self) -> tuple[str, ...]:
        """The additional facts about the user's transcripts that the client has requested."""
        return tuple(self.include or ())


class SessionHead(msgspec.Struct, kw_only=True):
    """The fields of every session object."""

    id: str
    object: str = "realtime.session"
    expires_at: int


class _Audio(msgspec.Struct):
    input: AudioInput
    output: SessionOutput


class GaSession(SessionHead, kw_only=True):
    """A session as the client sees it with GA names."""

    type: str = "realtime"  # Type of the session.
    model: str  # The model's name as the client spells it.
    output_modalities: list[str]  # `["audio"]` or `["text"]`.
    instructions: str  # Instructions for the language model.
    tools: list[msgspec.Raw]  # Functions that the model may call.
    tool_choice: str | NamedTool  # Which function the model may or must call.
    max_output_tokens: int | str  # Maximum number of tokens in a response, or "inf".
    truncation: str | Truncation  # How to shorten a history that exceeds the context.
    tracing: Echoed  # Always null.
    prompt: Echoed  # Always null.
    include: list[str] | None  # Additional facts about transcripts.
    parallel_tool_calls: bool | UnsetType | None  # Whether a response may contain several calls.
    tool_calls: CallSettings | UnsetType  # What happens until results of calls are known.
    audio: _Audio  # Input and output fields.


def uses_beta_names(session: msgspec.Raw) -> bool:
    """Whether an update has a field that exists only in the beta API, and none that exists only in GA."""
    names = decode(session, dict[str, msgspec.Raw], "session").keys()
    return bool(names & _GA_NAMES.keys()) and not uses_ga_names(session)


def uses_ga_names(session: msgspec.Raw) -> bool:
    """Whether an update has a field that exists only in GA. This includes `type`, which no beta client sends."""
    return bool(decode(session, dict[str, msgspec.Raw], "session").keys() & {"type", *BETA_NAMES})


def refuse_names(session: msgspec.Raw, others: Mapping[str, str]) -> None:
    """Raise RemoteProtocolError for a field with one of these names. The error suggests its other name."""
    for name in decode(session, dict[str, msgspec.Raw], "session"):
        if name in others:
            raise unknown_parameter(f"session.{name}", others[name])


def read_ga_update(session: msgspec.Raw) -> SessionChanges:
    """Read an update with GA names. Checks types, but not values.

    Raises RemoteProtocolError for an unknown field, including beta names, and for a `type` other than `realtime`.
    """
    refuse_names(session, _GA_NAMES | _MORE_GA_NAMES)
    given = decode(session, GaFields, "session")
    if given.type != "realtime":
        raise RemoteProtocolError("invalid_value", "A session's type cannot be changed.", "session.type")
    audio = given.audio or AudioFields()
    inputs, outputs = audio.input or InputFields(), audio.output or OutputFields()
    if given.is_speech_to_speech:
        pcm = FormatFields(type="audio/pcm", rate=16_000)
        inputs = msgspec.structs.replace(
            inputs,
            format=pcm if inputs.format is UNSET else inputs.format,
            transcription=TranscriptionFields() if inputs.transcription is UNSET else inputs.transcription,
        )
        outputs = msgspec.structs.replace(outputs, format=outputs.format or pcm)
    return SessionChanges(given, inputs, outputs)


def apply_own(
    fields: SessionFields, given: OwnFields, context: Context, *, knows_servers: bool = False
) -> SessionFields:
    """Return the session's own fields after applying the changes in `given`. Null selects the default.

    `knows_servers`: the dialect has events for tool servers, so `tools` may name some. Their headers are left out. If
    no voice is loaded, `output_modalities` is always text. Raises RemoteProtocolError for an invalid field.
    """
    changed = msgspec.structs.replace(fields)
    if given.output_modalities is not UNSET:
        if given.output_modalities not in (["audio"], ["text"]):
            raise RemoteProtocolError(
                "invalid_value",
                "Invalid modalities: supported are ['audio'] and ['text'].",
                "session.output_modalities",
            )
        changed.output_modalities = given.output_modalities if context.voices else ["text"]
    if given.instructions is not UNSET:
        changed.instructions = given.instructions or ""
    if given.tools is not UNSET:
        tools_from(given.tools, "session.tools", context.check_tools, knows_servers=knows_servers)
        servers_from(given.tools or (), "session.tools", {}, context.check_server)
        changed.tools = [shown_tool(tool) for tool in given.tools or ()]
    if given.tool_choice is not UNSET:
        choice = given.tool_choice
        choice = merged(choice, fields.tool_choice) if isinstance(choice, NamedTool) else choice
        tool_choice_from(choice, "session.tool_choice")
        changed.tool_choice = choice or "auto"
    if given.max_output_tokens is not UNSET:
        changed.max_output_tokens = _max_tokens(given.max_output_tokens)
    if given.truncation is not UNSET:
        cut = given.truncation
        cut = merged(cut, fields.truncation) if isinstance(cut, Truncation) else cut
        truncation_from(cut, "session.truncation")
        changed.truncation = cut or "auto"
    if given.include is not UNSET:
        changed.include = check_include(given.include)
    if given.parallel_tool_calls is not UNSET:
        changed.parallel_tool_calls = given.parallel_tool_calls is not False
    if given.tool_calls is not UNSET:
        changed.tool_calls = call_settings(given.tool_calls)
    # Accept `auto` for traces, because several released clients send it by default. The session still shows null.
    for name, defaults in (("tracing", ("auto",)), ("prompt", ()), ("reasoning", ())):
        if (value := getattr(given, name)) is not UNSET:
            check_nothing_asked(value, f"session.{name}", *defaults)
    return changed


def apply_output(output: SessionOutput, given: OutputFields, context: Context, *, has_spoken: bool) -> SessionOutput:
    """Return the output after applying the changes in `given`. `has_spoken`: audio was sent to the client.

    Raises RemoteProtocolError for an invalid field, an unknown voice, and a change of voice after audio was sent.
    """
    changed = msgspec.structs.replace(output)
    if given.format is not None:
        changed.format = check_format(given.format, output.format, "session.audio.output.format")
    if given.speed is not None:
        changed.speed = number(given.speed, "session.audio.output.speed", 0.25, 1.5)
    if given.ducking is not None:
        changed.ducking = given.ducking
    if given.voice is not None and given.voice != output.voice:
        changed.voice = given.voice
        # Voice names are compared without case.
        if has_spoken and (changed.voice_name or "").lower() != (output.voice_name or "").lower():
            raise RemoteProtocolError(
                "cannot_update_voice",
                "Cannot update a conversation's voice if assistant audio is present.",
                "session.audio.output.voice",
            )
        context.check_voice(changed.voice_name or "", "session.audio.output.voice")
    return changed


def conversation_config(
    fields: SessionFields,
    audio: AudioInput,
    voice: str | None,
    voices: SessionVoices | None = None,
    headers: Mapping[str, Mapping[str, str]] | None = None,
) -> ConversationConfig:
    """Convert the session's fields into the configuration of the conversation.

    `voice`: a loaded voice; None for the default voice. `voices`: the voices that the fields name. `headers`: the
    headers for the tool servers that the fields name, by their labels.
    """
    voices = voices or SessionVoices()
    vad = audio.turn_detection or TurnDetection()
    # Request additional facts only if the client receives transcripts.
    heard = audio.config(fields.included if audio.transcription else (), voices.known)
    idle_ms = vad.idle_timeout_ms
    most = fields.max_output_tokens
    return ConversationConfig(
        replace(
            heard,
            # With semantic_vad, the server needs partials: an overlap's first words decide whether it is a barge-in.
            partials=audio.transcription is not None or bool(heard.vad and heard.vad.eagerness),
            preflight=True,
            primary_speaker=audio.primary_speaker or "off",
            enrolled_voices=voices.enrolled,
        ),
        instructions=fields.instructions,
        audio_output=fields.speaks,
        voice=voice,
        speed=fields.output.speed,
        tools=tools_from(fields.tools),
        servers=servers_from(fields.tools, "session.tools", headers or {}),
        tool_choice=tool_choice_from(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        calls=None if fields.tool_calls is UNSET else fields.tool_calls.options(),
        max_tokens=None if most == "inf" else most,
        create_response=vad.responds,
        interrupt_response=vad.interrupts,
        reports_transcripts=audio.transcription is not None,
        idle_timeout_ms=idle_ms or None,
        false_start_ms=vad.forgiven_ms,
        truncation=truncation_from(fields.truncation),
        allows_backchannels=vad.type == "semantic_vad",
        reports_ducking=fields.output.ducking is True,
    )


def _max_tokens(given: int | str | None) -> int | Literal["inf"]:
    if given is None or given == "inf":
        return "inf"
    if isinstance(given, str):
        raise RemoteProtocolError(
            "invalid_type", "Invalid type for 'session.max_output_tokens': expected int.", "session.max_output_tokens"
        )
    return int(number(given, "session.max_output_tokens", 1, 4096))


def truncation_from(given: str | Truncation | None, param: str = "truncation") -> Literal["auto", "disabled"] | float:
    """Read a `truncation`: `auto`, `disabled`, or the fraction of the context to keep, in [0, 1].

    Raises RemoteProtocolError for any other value.
    """
    if isinstance(given, Truncation) and given.token_limits is not UNSET:
        check_nothing_asked(given.token_limits, f"{param}.token_limits")
    match given:
        case None | "auto":
            return "auto"
        case "disabled":
            return "disabled"
        case Truncation("retention_ratio", float() as ratio):
            return number(ratio, f"{param}.retention_ratio", 0.0, 1.0)
        case Truncation("retention_ratio" | msgspec.UNSET as kind):
            missing = f"{param}.{'type' if kind is UNSET else 'retention_ratio'}"
            raise RemoteProtocolError(
                "missing_required_parameter", f"Missing required parameter: '{missing}'.", missing
            )
    where = f"{param}.type" if isinstance(given, Truncation) else param
    raise RemoteProtocolError(
        "invalid_value", "Supported are 'auto', 'disabled' and {'type': 'retention_ratio'}.", where
    )


def ga_session(head: tuple[str, int, str], fields: SessionFields, audio: AudioInput) -> GaSession:
    """Return the session with GA names. `head`: its id, `expires_at` in Unix seconds, and its model."""
    own = {name: getattr(fields, name) for name in SessionFields.__struct_fields__ if name != "output"}
    session_id, expires_at, model = head
    return GaSession(id=session_id, expires_at=expires_at, model=model, **own, audio=_Audio(audio, fields.output))
