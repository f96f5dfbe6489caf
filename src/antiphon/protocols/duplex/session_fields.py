"""The fields, audio formats and capabilities that only a full-duplex session has.

docs/wire/duplex.md describes them. Every function that reads a client's field raises RemoteProtocolError if the field
is invalid.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.duplex import DuplexConfig, NativeSampling, OverlapPolicy
from antiphon.events.transcription import PrimarySpeakerMode
from antiphon.protocols.fields import Text, audio_file, decode, json_object, number
from antiphon.protocols.opening import NULL
from antiphon.protocols.realtime.beta_session import modalities_of_beta
from antiphon.protocols.realtime.input_fields import (
    AudioFormat,
    AudioInput,
    InputFields,
    NoiseReduction,
    Transcription,
    TranscriptionFields,
)
from antiphon.protocols.realtime.items import NamedTool, VoiceId
from antiphon.protocols.realtime.session_fields import (
    OutputFields,
    OwnFields,
    SessionChanges,
    SessionOutput,
    Truncation,
)
from antiphon.protocols.realtime.turn_fields import VAD_LEAVES, TurnDetection, TurnDetectionFields

# For each error code of an OpenAI conversation: its name in this dialect.
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
# Error codes of messages that may succeed if they are sent again later.
RETRYABLE = frozenset({"resource_exhausted", "input_backpressure"})

OVERLAP_POLICIES = ("listen_only", "barge_in_on_speech", "auto")
COMMIT_POLICIES = ("commit_all_on_done", "ack_only")
_INPUT_FORMATS = ("pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw")
_OUTPUT_FORMATS = (*_INPUT_FORMATS, "wav")
# Other names that clients may use for formats.
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
# Values in `capabilities`: the best duration of an append for a cascade, and the maximum time until a barge-in silences
# a response.
CHUNK_PERIOD_MS = 100
TARGET_BARGE_IN_MS = 300
# Maximum size of a reference recording's file, in bytes.
MAX_REFERENCE_BYTES = 10 << 20
# Minimum and maximum of each number in `extra_body`.
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
    """Turn detection as a client sends it. `min_speech_duration_ms` is shown to the client, but has no effect."""

    min_speech_duration_ms: object = UNSET

    @property
    def least_speech_ms(self) -> object:
        """The client's `min_speech_duration_ms`; 96 by default."""
        return 96 if self.min_speech_duration_ms in (UNSET, None) else self.min_speech_duration_ms


class DuplexInput(msgspec.Struct):
    """`session.audio.input` as a client sends it. The format is checked only when it is used."""

    # Transcripts of the user's turns; null turns them off.
    transcription: TranscriptionFields | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET  # Shown to the client; has no effect.
    # Turn detection; null selects the conversation model's default.
    turn_detection: DuplexTurnDetection | UnsetType | None = UNSET
    primary_speaker: Text | UnsetType | None = UNSET  # The voices whose turns count: `off`, `auto` or `enrolled`.
    enrolled_voice: Text | UnsetType | None = UNSET  # Name of the uploaded voice, for `enrolled`.
    format: object = None  # Name of a format, or an object with `type` and `rate`.
    sample_rate_hz: object = None  # Sample rate in Hz.


class DuplexOutput(msgspec.Struct):
    """`session.audio.output` as a client sends it. The format is checked only when it is used."""

    voice: VoiceId | Text | None = None
    speed: float | None = None
    format: object = None
    sample_rate_hz: object = None


class DuplexAudio(msgspec.Struct):
    """`session.audio` as a client sends it."""

    input: DuplexInput | None = None
    output: DuplexOutput | None = None


class ReferenceAudio(msgspec.Struct):
    """A recording of a voice. `data`: an audio file, as base64 or as a `data:` URI."""

    data: str


class ExtraFields(msgspec.Struct):
    """The fields of `extra_body` that have an effect.

    Most of them are parameters of a native model, with the names that MiniCPM-o uses. None selects the model's default.
    """

    auto_response: object = None  # If false, the model responds only on request.
    full_duplex: object = None  # Alias of `auto_response`.
    force_listen_count: float | None = None  # Number of units at the start during which the model only listens.
    top_k: int | None = None  # Number of most likely tokens to sample from; 0 for no limit.
    top_p: float | None = None  # Top-p sampling: the total probability of the tokens to sample from.
    text_repetition_penalty: float | None = None  # Repetition penalty for text tokens.
    length_penalty: float | None = None  # Values above 1 make turns longer.
    listen_prob_scale: float | None = None  # Factor applied to the logit of the listen token.
    listen_top_k: int | None = None  # The model listens if the listen token is one of this number of top tokens.
    tts_temperature: float | None = None  # Sampling temperature for audio codes.
    tts_repetition_penalty: float | None = None  # Repetition penalty for audio codes.
    seed: int | None = None  # Random seed. The same seed and input give the same response.

    def sampling(self, temperature: float | None) -> NativeSampling:
        """Return the model's sampling parameters. `temperature` is that of the session."""
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
    """A `session` as a client sends it, with flat or nested fields. Unknown fields are ignored."""

    overlap_policy: Text | None = None  # How to treat speech that overlaps a response: one of OVERLAP_POLICIES.
    overlap_short_ack_ms: float | None = None  # Maximum duration of a backchannel, in ms.
    overlap_barge_in_ms: float | None = None  # Duration after which even backchannel words take the floor, in ms.
    overlap_silence_rms: float | None = None  # Shown to the client; has no effect.
    playback_commit_policy: Text | None = None  # Which audio counts as heard: one of COMMIT_POLICIES.
    idle_timeout_s: float | None = None  # Idle timeout, in seconds.
    temperature: float | None = None  # A native model's temperature for text; 0 always takes the most likely token.
    # A recording of the voice for a native model to use: an audio file, as base64 or a `data:` URI.
    ref_audio: ReferenceAudio | str | None = None
    metadata: msgspec.Raw = NULL  # Any object of the client; shown, but has no effect.
    extra_body: msgspec.Raw = NULL  # See ExtraFields. Its other fields are shown, but have no effect.
    instructions: Text | UnsetType | None = UNSET  # Instructions for the conversation model.
    tools: list[msgspec.Raw] | UnsetType | None = UNSET  # Functions that the model may call.
    tool_choice: Text | NamedTool | UnsetType | None = UNSET  # Which function the model may or must call.
    truncation: Text | Truncation | UnsetType | None = UNSET  # How to shorten a history that exceeds the context.
    modalities: list[object] | UnsetType | None = UNSET  # Output modalities: text, or audio and text.
    output_modalities: list[object] | None = None  # OpenAI's GA name of `modalities`.
    # Maximum number of tokens in a response, or "inf".
    max_response_output_tokens: int | Text | UnsetType | None = UNSET
    # OpenAI's GA name of `max_response_output_tokens`.
    max_output_tokens: int | Text | UnsetType | None = UNSET
    audio: DuplexAudio | None = None  # Nested input and output fields. The flat fields below take precedence.
    input_audio_transcription: TranscriptionFields | UnsetType | None = UNSET  # See DuplexInput.
    turn_detection: DuplexTurnDetection | UnsetType | None = UNSET  # See DuplexInput.
    voice: VoiceId | Text | None = None  # Voice of the responses.
    speed: float | None = None  # Speaking rate; 1 is the voice's normal speed.
    input_audio_format: object = UNSET  # Format of the client's audio.
    output_audio_format: object = UNSET  # Format of the server's audio.
    sample_rate_hz: object = UNSET  # Sample rate of the client's audio, in Hz.
    model: object = None  # Name of the model. It is only shown.

    @property
    def inputs(self) -> DuplexInput:
        """The fields of `audio.input`. If it is missing, all of them are UNSET."""
        return (self.audio and self.audio.input) or DuplexInput()

    @property
    def outputs(self) -> DuplexOutput:
        """The fields of `audio.output`. If it is missing, all of them are UNSET."""
        return (self.audio and self.audio.output) or DuplexOutput()


class DuplexFields(msgspec.Struct):
    """The fields that a full-duplex session has and an OpenAI conversation has not, as the client sees them.

    They are stored with the session under these names, except `ref_audio`.
    """

    overlap_policy: OverlapPolicy = "auto"  # How to treat speech that overlaps a response: one of OVERLAP_POLICIES.
    overlap_short_ack_ms: int | float = 700  # Maximum duration of a backchannel, in ms.
    overlap_barge_in_ms: int | float = 1200  # Duration after which even backchannel words take the floor, in ms.
    overlap_silence_rms: float = 0.003  # Shown to the client; has no effect.
    playback_commit_policy: str = "commit_all_on_done"  # Which audio counts as heard: one of COMMIT_POLICIES.
    idle_timeout_s: float = 300.0  # Idle timeout, in seconds.
    temperature: float | None = None  # A native model's temperature for text; None for its default.
    # An audio file with the voice for a native model to use. It is neither shown nor stored.
    ref_audio: bytes | None = None
    metadata: msgspec.Raw = NULL  # Any object of the client, shown as it was sent.
    # The client's object, shown as it was sent. Only its ExtraFields have an effect.
    extra_body: msgspec.Raw = msgspec.Raw(b'{"auto_response":true}')

    @property
    def extra(self) -> ExtraFields:
        """The fields of `extra_body` that have an effect."""
        return decode(self.extra_body, ExtraFields, "session.extra_body")


class ShownCapabilities(msgspec.Struct):
    """`session.capabilities` as the client sees it."""

    implementation_level: str  # `model_native_duplex` or `turn_based_duplex`.
    input_modes: list[str]  # The kinds of input that the model uses: `audio`, `video`, `text`.
    chunk_period_ms: int  # Best duration of an append, in ms. For a native model, this is its unit.
    required_modalities: list[str]  # Input that the client has to send.
    optional_modalities: list[str]  # Input that the client may send.
    output_modalities: list[str]  # The kinds of output that the model generates.
    supports_barge_in: bool  # Whether speech can cut off a response.
    supports_session_resume: bool  # Whether the session outlives its connection.
    supports_audio_truncate: bool  # Whether the history keeps only the audio that was heard.
    supports_kv_lease: bool  # Whether a session keeps its KV between responses. Always true.
    target_barge_in_latency_ms: int  # Maximum time until a barge-in silences a response, in ms.


class ShownInput(msgspec.Struct):
    """`session.audio.input` as the client sees it, without transcription and turn detection."""

    format: str
    sample_rate_hz: int
    primary_speaker: PrimarySpeakerMode | UnsetType = UNSET
    enrolled_voice: str | UnsetType = UNSET


class ShownOutputAudio(msgspec.Struct):
    """`session.audio.output` as the client sees it, including voice and speed."""

    format: str
    sample_rate_hz: int
    voice: VoiceId | str
    speed: float


class ShownSessionAudio(msgspec.Struct):
    """`session.audio` as the client sees it."""

    input: ShownInput
    output: ShownOutputAudio


class ShownSession(msgspec.Struct, kw_only=True):
    """A session as the client sees it: with the flat field names of this dialect, and without `ref_audio`."""

    id: str  # The session's id.
    session_id: str  # Same as `id`, for clients that read this field instead.
    object: str = "realtime.session"  # Object type in OpenAI's API.
    type: str = "realtime"  # Session type in OpenAI's API.
    model: str  # The model's name as the client spells it.
    expires_at: int  # Expiry, in Unix seconds.
    modalities: list[str]  # Output modalities: `text`, or `audio` and `text`.
    instructions: str  # Instructions for the conversation model.
    voice: VoiceId | str  # Voice of the responses.
    input_audio_format: str  # Format of the client's audio.
    output_audio_format: str  # Format of the server's audio.
    sample_rate_hz: int  # Sample rate of the client's audio, in Hz.
    audio: ShownSessionAudio  # The same fields in nested form, with the sample rates of both directions.
    turn_detection: TurnDetection | None  # Turn detection; null selects the conversation model's default.
    input_audio_transcription: Transcription | None  # Transcripts of the user's turns; null if they are off.
    tools: list[msgspec.Raw]  # Functions that the model may call.
    tool_choice: str | NamedTool  # Which function the model may or must call.
    max_response_output_tokens: int | str  # Maximum number of tokens in a response, or "inf".
    overlap_policy: str  # How to treat speech that overlaps a response.
    overlap_short_ack_ms: float  # Maximum duration of a backchannel, in ms.
    overlap_barge_in_ms: float  # Duration after which even backchannel words take the floor, in ms.
    overlap_silence_rms: float  # Shown to the client; has no effect.
    playback_commit_policy: str  # Which audio counts as heard.
    idle_timeout_s: float  # Idle timeout, in seconds.
    temperature: float | None  # A native model's temperature for text; null for its default.
    metadata: msgspec.Raw  # The client's own object.
    extra_body: msgspec.Raw  # The client's own object, which includes the ExtraFields.
    epoch: int  # The current epoch.
    capabilities: ShownCapabilities  # The session's capabilities.


def capabilities(*, unit_ms: int, speaks: bool, resumes: bool) -> ShownCapabilities:
    """Return the capabilities of a session. `unit_ms`: length of a native model's unit; 0 for a cascade.

    `speaks`: a voice is loaded. `resumes`: the session outlives its connection.
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
    """Return the session's `audio` as the client sees it."""
    shown = ShownInput(audio.format.type, audio.format.rate_hz, audio.primary_speaker, audio.enrolled_voice)
    form = output.format
    return ShownSessionAudio(shown, ShownOutputAudio(form.type, form.rate_hz, output.voice, output.speed))


def apply_duplex(fields: DuplexFields, given: DuplexUpdateFields) -> DuplexFields:
    """Return the fields that only full duplex has, after applying the changes in `given`. Null changes nothing.

    Raises RemoteProtocolError with the error codes of an OpenAI conversation, or `bad_event` for an unknown policy.
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
    """Merge the given fields into `extra_body`. A new `auto_response` or `full_duplex` replaces both of them."""
    kept, changes = decode(before, dict[str, msgspec.Raw]), decode(given, dict[str, msgspec.Raw], "session.extra_body")
    if changes.keys() & _ANSWERS:
        kept = {name: value for name, value in kept.items() if name not in _ANSWERS}
    return msgspec.Raw(msgspec.json.encode(kept | changes))


def duplex_config(fields: DuplexFields) -> DuplexConfig:
    """Convert the session's fields into the configuration of full duplex."""
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
    """Return the fields of an update that an OpenAI conversation has too, without formats.

    Flat fields override nested fields. Raises RemoteProtocolError for an unknown type of turn detection.
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
    """Return the format of the client's audio, which has several names in an update; `before` if all are missing."""
    kind = given.inputs.format if given.input_audio_format is UNSET else given.input_audio_format
    rate = given.inputs.sample_rate_hz if given.sample_rate_hz is UNSET else given.sample_rate_hz
    return read_audio_format(kind, rate, before, _INPUT_FORMATS, "session.input_audio_format")


def output_format(given: DuplexUpdateFields, before: AudioFormat) -> AudioFormat:
    """Return the format of the server's audio; `before` if the update does not name a format."""
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
    """Read a format: a name, or an object with `type` and `rate`. Missing values are taken from `before`.

    G.711 defaults to 8,000 Hz. Raises RemoteProtocolError (`unsupported_audio_format`).
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
