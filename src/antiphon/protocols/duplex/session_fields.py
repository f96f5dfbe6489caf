"""The fields of a full-duplex session that a conversation does not have, its audio formats and its capabilities.

docs/wire/duplex.md describes them. What is read is checked: a wrong field raises RemoteProtocolError.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.duplex import DuplexConfig, NativeSampling, OverlapPolicy
from antiphon.events.transcription import PrimarySpeakerMode
from antiphon.protocols.fields import Text, audio_file, decode, json_object, number
from antiphon.protocols.opening import NULL
from antiphon.protocols.realtime.input_fields import (
    VAD_LEAVES,
    AudioFormat,
    AudioInput,
    InputFields,
    NoiseReduction,
    Transcription,
    TranscriptionFields,
    TurnDetection,
    TurnDetectionFields,
)
from antiphon.protocols.realtime.items import NamedTool, VoiceId
from antiphon.protocols.realtime.session_fields import (
    OutputFields,
    OwnFields,
    SessionChanges,
    SessionOutput,
    Truncation,
    modalities_of_beta,
)

# Error codes of a conversation, and what they are called here.
DUPLEX_CODES = {
    "invalid_type": "bad_event",
    "invalid_value": "bad_event",
    "unknown_parameter": "bad_event",
    "missing_required_parameter": "bad_event",
    "input_audio_buffer_commit_empty": "input_audio_buffer_empty",
    "conversation_already_has_active_response": "response_already_active",
    "item_retrieve_invalid_item_id": "item_not_found",
    "item_delete_invalid_item_id": "item_not_found",
    "item_truncate_invalid_item_id": "item_not_found",
    "input_audio_buffer_overflow": "input_backpressure",
    "rate_limit_exceeded": "resource_exhausted",
}
# Errors after which the same message may be accepted later.
RETRYABLE = frozenset({"resource_exhausted", "input_backpressure"})

OVERLAP_POLICIES = ("listen_only", "barge_in_on_speech", "auto")
COMMIT_POLICIES = ("commit_all_on_done", "ack_only")
_INPUT_FORMATS = ("pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw")
_OUTPUT_FORMATS = (*_INPUT_FORMATS, "wav")
# Other names of formats.
_FORMAT_ALIASES = {
    "pcm": "pcm16",
    "pcm_s16le": "pcm16",
    "s16le": "pcm16",
    "audio/pcm": "pcm16",
    "pcm_f32": "pcm_f32le",
    "f32le": "pcm_f32le",
    "float32": "pcm_f32le",
    "audio/pcmu": "g711_ulaw",
    "audio/pcma": "g711_alaw",
    "audio/wav": "wav",
}
MIN_RATE_HZ, MAX_RATE_HZ = 8000, 192_000
# What `capabilities` tells: how often a cascade is best sent audio, and how soon a barge-in silences a response.
CHUNK_PERIOD_MS = 100
TARGET_BARGE_IN_MS = 300
# Of a recording of the voice to speak with, as a file.
MAX_REFERENCE_BYTES = 10 << 20
# The lowest and highest values of the numbers in `extra_body`.
EXTRA_RANGES: dict[str, tuple[float, float]] = {
    "force_listen_count": (0, 3600),
    "top_k": (0, 1000),
    "top_p": (0, 1),
    "text_repetition_penalty": (0.1, 10),
    "length_penalty": (0.1, 10),
    "listen_prob_scale": (0, 10),
    "listen_top_k": (0, 1000),
    "tts_temperature": (0.01, 2),
    "tts_repetition_penalty": (0.1, 10),
    "seed": (0, 2**53),
}


_ANSWERS = frozenset(("auto_response", "full_duplex"))


class DuplexTurnDetection(TurnDetectionFields, forbid_unknown_fields=True):
    """Turn detection as a client gives it. `min_speech_duration_ms` is shown and has no effect."""

    min_speech_duration_ms: object = UNSET

    @property
    def least_speech_ms(self) -> object:
        """`min_speech_duration_ms`."""
        return 96 if self.min_speech_duration_ms in (UNSET, None) else self.min_speech_duration_ms


class DuplexInput(msgspec.Struct):
    """`session.audio.input` as a client gives it. The format is checked where it is used."""

    transcription: TranscriptionFields | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET
    turn_detection: DuplexTurnDetection | UnsetType | None = UNSET
    primary_speaker: Text | UnsetType | None = UNSET
    enrolled_voice: Text | UnsetType | None = UNSET
    format: object = None
    sample_rate_hz: object = None


class DuplexOutput(msgspec.Struct):
    """`session.audio.output` as a client gives it. The format is checked where it is used."""

    voice: VoiceId | Text | None = None
    speed: float | None = None
    format: object = None
    sample_rate_hz: object = None


class DuplexAudio(msgspec.Struct):
    """`session.audio` as a client gives it."""

    input: DuplexInput | None = None
    output: DuplexOutput | None = None


class ReferenceAudio(msgspec.Struct):
    """A recording of a voice. `data`: a file, in base64 or as a `data:` URI."""

    data: str


class ExtraFields(msgspec.Struct):
    """The fields of `extra_body` that have an effect. `auto_response` false: a turn is not answered unless asked;
    `full_duplex` is another name of it. The others are for a native model, by the names that MiniCPM-o's makers use.
    """

    auto_response: object = None
    full_duplex: object = None
    force_listen_count: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    text_repetition_penalty: float | None = None
    length_penalty: float | None = None
    listen_prob_scale: float | None = None
    listen_top_k: int | None = None
    tts_temperature: float | None = None
    tts_repetition_penalty: float | None = None
    seed: int | None = None

    def sampling(self, temperature: float | None) -> NativeSampling:
        """How the model is to choose."""
        return NativeSampling(
            temperature,
            self.top_k,
            self.top_p,
            self.text_repetition_penalty,
            self.length_penalty,
            self.listen_prob_scale,
            self.listen_top_k,
            self.tts_temperature,
            self.tts_repetition_penalty,
            self.seed,
        )


class DuplexUpdateFields(msgspec.Struct):
    """A `session` as a client gives it, flat or nested: unknown fields are ignored, null changes nothing of its own."""

    overlap_policy: Text | None = None
    overlap_short_ack_ms: float | None = None
    overlap_barge_in_ms: float | None = None
    overlap_silence_rms: float | None = None
    playback_commit_policy: Text | None = None
    idle_timeout_s: float | None = None
    temperature: float | None = None
    ref_audio: ReferenceAudio | str | None = None
    metadata: msgspec.Raw = NULL
    extra_body: msgspec.Raw = NULL
    instructions: Text | UnsetType | None = UNSET
    tools: list[msgspec.Raw] | UnsetType | None = UNSET
    tool_choice: Text | NamedTool | UnsetType | None = UNSET
    truncation: Text | Truncation | UnsetType | None = UNSET
    modalities: list[object] | UnsetType | None = UNSET
    output_modalities: list[object] | None = None
    max_response_output_tokens: int | Text | UnsetType | None = UNSET
    max_output_tokens: int | Text | UnsetType | None = UNSET
    audio: DuplexAudio | None = None
    input_audio_transcription: TranscriptionFields | UnsetType | None = UNSET
    turn_detection: DuplexTurnDetection | UnsetType | None = UNSET
    voice: VoiceId | Text | None = None
    speed: float | None = None
    input_audio_format: object = UNSET
    output_audio_format: object = UNSET
    sample_rate_hz: object = UNSET
    model: object = None

    @property
    def inputs(self) -> DuplexInput:
        """`audio.input`; empty where it is missing."""
        return (self.audio and self.audio.input) or DuplexInput()

    @property
    def outputs(self) -> DuplexOutput:
        """`audio.output`; empty where it is missing."""
        return (self.audio and self.audio.output) or DuplexOutput()


class DuplexFields(msgspec.Struct):
    """The fields that a full-duplex session has beside a conversation's, as the client is shown them.

    They are stored with the session, by these names, without `ref_audio`: a file of the voice to speak with.
    `metadata` and `extra_body` are objects of the client's own, shown as they were given.
    """

    overlap_policy: OverlapPolicy = "auto"
    overlap_short_ack_ms: int | float = 700
    overlap_barge_in_ms: int | float = 1200
    overlap_silence_rms: float = 0.003
    playback_commit_policy: str = "commit_all_on_done"
    idle_timeout_s: float = 300.0
    temperature: float | None = None
    ref_audio: bytes | None = None
    metadata: msgspec.Raw = NULL
    extra_body: msgspec.Raw = msgspec.Raw(b'{"auto_response":true}')

    @property
    def extra(self) -> ExtraFields:
        """What of `extra_body` has an effect."""
        return decode(self.extra_body, ExtraFields, "session.extra_body")


class ShownCapabilities(msgspec.Struct):
    """`session.capabilities`."""

    implementation_level: str
    input_modes: list[str]
    chunk_period_ms: int
    required_modalities: list[str]
    optional_modalities: list[str]
    output_modalities: list[str]
    supports_barge_in: bool
    supports_session_resume: bool
    supports_audio_truncate: bool
    supports_kv_lease: bool
    target_barge_in_latency_ms: int


class ShownInput(msgspec.Struct):
    """`session.audio.input` as a client is shown it."""

    format: str
    sample_rate_hz: int
    primary_speaker: PrimarySpeakerMode | UnsetType = UNSET
    enrolled_voice: str | UnsetType = UNSET


class ShownOutputAudio(msgspec.Struct):
    """`session.audio.output` as a client is shown it."""

    format: str
    sample_rate_hz: int
    voice: VoiceId | str
    speed: float


class ShownSessionAudio(msgspec.Struct):
    """`session.audio` as a client is shown it."""

    input: ShownInput
    output: ShownOutputAudio


class ShownSession(msgspec.Struct, kw_only=True):
    """A session as a client is shown it, in the flat names of this dialect and without `ref_audio`."""

    id: str
    session_id: str
    object: str = "realtime.session"
    type: str = "realtime"
    model: str
    expires_at: int
    modalities: list[str]
    instructions: str
    voice: VoiceId | str
    input_audio_format: str
    output_audio_format: str
    sample_rate_hz: int
    audio: ShownSessionAudio
    turn_detection: TurnDetection | None
    input_audio_transcription: Transcription | None
    tools: list[msgspec.Raw]
    tool_choice: str | NamedTool
    max_response_output_tokens: int | str
    overlap_policy: str
    overlap_short_ack_ms: float
    overlap_barge_in_ms: float
    overlap_silence_rms: float
    playback_commit_policy: str
    idle_timeout_s: float
    temperature: float | None
    metadata: msgspec.Raw
    extra_body: msgspec.Raw
    epoch: int
    capabilities: ShownCapabilities


def capabilities(*, unit_ms: int, speaks: bool, resumes: bool) -> ShownCapabilities:
    """What the session can do. `unit_ms`: the length of a native model's unit, 0 for a cascade.

    `speaks`: there is a voice. `resumes`: the session outlives its connection.
    """
    return ShownCapabilities(
        implementation_level="model_native_duplex" if unit_ms else "turn_based_duplex",
        input_modes=["audio", "video"] if unit_ms else ["audio", "text"],
        chunk_period_ms=unit_ms or CHUNK_PERIOD_MS,
        required_modalities=["audio"],
        optional_modalities=["video"] if unit_ms else ["text"],
        output_modalities=["audio", "text"] if speaks else ["text"],
        supports_barge_in=True,
        supports_session_resume=resumes,
        supports_audio_truncate=True,
        supports_kv_lease=True,
        target_barge_in_latency_ms=TARGET_BARGE_IN_MS,
    )


def audio_json(audio: AudioInput, output: SessionOutput) -> ShownSessionAudio:
    """The session's `audio`."""
    shown = ShownInput(audio.format.type, audio.format.rate_hz, audio.primary_speaker, audio.enrolled_voice)
    form = output.format
    return ShownSessionAudio(shown, ShownOutputAudio(form.type, form.rate_hz, output.voice, output.speed))


def apply_duplex(fields: DuplexFields, given: DuplexUpdateFields) -> DuplexFields:
    """The fields that a conversation does not have, with the changes that were `given`; null changes nothing.

    Raises RemoteProtocolError with the codes of a conversation, `bad_event` for a policy.
    """
    merged = msgspec.structs.replace(fields)
    for key, allowed in (("overlap_policy", OVERLAP_POLICIES), ("playback_commit_policy", COMMIT_POLICIES)):
        if (policy := getattr(given, key)) is not None:
            if policy not in allowed:
                raise RemoteProtocolError(
                    "bad_event", f"Invalid value for 'session.{key}': one of {', '.join(allowed)}.", f"session.{key}"
                )
            setattr(merged, key, policy)
    for key, low, high in (
        ("overlap_short_ack_ms", 0, 10_000),
        ("overlap_barge_in_ms", 0, 10_000),
        ("overlap_silence_rms", 0, 1),
        ("idle_timeout_s", 1, 86_400),
        ("temperature", 0, 2),
    ):
        if (value := getattr(given, key)) is not None:
            setattr(merged, key, number(value, f"session.{key}", low, high))
    if (voice := given.ref_audio) is not None:
        data = voice.data if isinstance(voice, ReferenceAudio) else voice
        merged.ref_audio = audio_file(data, "session.ref_audio", MAX_REFERENCE_BYTES)
    if bytes(given.metadata) != b"null":
        merged.metadata = json_object(bytes(given.metadata), "session.metadata", "session.metadata")
    if bytes(given.extra_body) != b"null":
        extra = decode(given.extra_body, ExtraFields, "session.extra_body")
        for key, (lowest, highest) in EXTRA_RANGES.items():
            if (value := getattr(extra, key)) is not None:
                number(value, f"session.extra_body.{key}", lowest, highest)
        merged.extra_body = _merged_extra(fields.extra_body, given.extra_body)
    return merged


def _merged_extra(before: msgspec.Raw, given: msgspec.Raw) -> msgspec.Raw:
    """`extra_body` with the fields that were given. Of the two names of `auto_response` the newer counts."""
    kept, changes = decode(before, dict[str, msgspec.Raw]), decode(given, dict[str, msgspec.Raw], "session.extra_body")
    if changes.keys() & _ANSWERS:
        kept = {name: value for name, value in kept.items() if name not in _ANSWERS}
    return msgspec.Raw(msgspec.json.encode(kept | changes))


def duplex_config(fields: DuplexFields) -> DuplexConfig:
    """The session's configuration."""
    extra = fields.extra
    return DuplexConfig(
        fields.overlap_policy,
        int(fields.overlap_short_ack_ms),
        int(fields.overlap_barge_in_ms),
        acks_only=fields.playback_commit_policy == "ack_only",
        listen_only_units=None if extra.force_listen_count is None else int(extra.force_listen_count),
        sampling=extra.sampling(fields.temperature),
        voice_reference=fields.ref_audio or b"",
    )


def conversation_changes(given: DuplexUpdateFields) -> SessionChanges:
    """The fields of an update that a conversation has too, without formats. What is flat counts before what is nested.

    Raises RemoteProtocolError for a turn detection that there is not.
    """
    modalities = given.output_modalities if given.modalities is UNSET else given.modalities
    tokens = given.max_response_output_tokens if given.max_output_tokens is UNSET else given.max_output_tokens
    own = OwnFields(
        output_modalities=UNSET if modalities is None else modalities_of_beta(modalities),
        instructions=given.instructions,
        tools=given.tools,
        tool_choice=given.tool_choice,
        max_output_tokens=tokens,
        truncation=given.truncation,
    )
    inputs, outputs = given.inputs, given.outputs
    asked, vad = given.input_audio_transcription, given.turn_detection
    changes = InputFields(
        transcription=inputs.transcription if asked is UNSET else asked,
        noise_reduction=inputs.noise_reduction,
        turn_detection=inputs.turn_detection if vad is UNSET else vad,
        primary_speaker=inputs.primary_speaker,
        enrolled_voice=inputs.enrolled_voice,
    )
    found = changes.turn_detection
    if isinstance(found, TurnDetectionFields) and found.type not in (UNSET, *VAD_LEAVES):
        raise RemoteProtocolError(
            "unsupported_turn_detection",
            "Turn detection is null, server_vad or semantic_vad.",
            "session.turn_detection.type",
        )
    voice = outputs.voice if given.voice is None else given.voice
    speed = outputs.speed if given.speed is None else given.speed
    return SessionChanges(own, changes, OutputFields(voice=voice, speed=speed))


def input_format(given: DuplexUpdateFields, before: AudioFormat) -> AudioFormat:
    """The format that the client sends, by any of the names it may have in an update; `before` where it is missing."""
    kind = given.inputs.format if given.input_audio_format is UNSET else given.input_audio_format
    rate = given.inputs.sample_rate_hz if given.sample_rate_hz is UNSET else given.sample_rate_hz
    return read_audio_format(kind, rate, before, _INPUT_FORMATS, "session.input_audio_format")


def output_format(given: DuplexUpdateFields, before: AudioFormat) -> AudioFormat:
    """The format that the client is sent; `before` where an update has none."""
    kind = given.outputs.format if given.output_audio_format is UNSET else given.output_audio_format
    rate = given.outputs.sample_rate_hz
    return read_audio_format(kind, rate, before, _OUTPUT_FORMATS, "session.output_audio_format")


def read_audio_format(
    kind: object,
    rate: object,
    before: AudioFormat,
    allowed: tuple[str, ...] = _INPUT_FORMATS,
    param: str = "format",
) -> AudioFormat:
    """Read a format, which is a name or an object with `type` and `rate`. What is missing is as `before`.

    G.711 without a rate is at 8,000 Hz. Raises RemoteProtocolError (`unsupported_audio_format`).
    """
    if isinstance(kind, dict):
        rate = kind.get("rate", rate)
        kind = kind.get("type")
    name = before.type if kind is None else kind
    if isinstance(name, str):
        name = _FORMAT_ALIASES.get(name, name)
    if not isinstance(name, str) or name not in allowed:
        raise RemoteProtocolError(
            "unsupported_audio_format",
            f"Sound of the format '{name}' is not supported: {', '.join(allowed)} are.",
            param,
        )
    hz = before.rate if rate is None else rate
    if name != before.type and rate is None and name.startswith("g711"):
        hz = 8000
    if not isinstance(hz, int) or isinstance(hz, bool) or not MIN_RATE_HZ <= hz <= MAX_RATE_HZ:
        raise RemoteProtocolError(
            "unsupported_audio_format",
            f"A sample rate of {hz} is not supported: {MIN_RATE_HZ} to {MAX_RATE_HZ} are.",
            param,
        )
    return AudioFormat(name, hz)
