"""The parts shared by the speech stream and speech over HTTP: request fields, their configuration, and word times.

docs/wire/speech-stream.md and docs/wire/speech.md describe them. Field names are those of OpenAI's and vLLM's
endpoints. Fields that the loaded model does not use are checked too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, get_args

import msgspec

from antiphon.audio import SpeechFormat
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.speech import Granularity, SpeechConfig, VoiceSample
from antiphon.events.words import Word
from antiphon.protocols.fields import Text, audio_file, decode, number, seed, typed
from antiphon.protocols.model_names import (
    OTHER_VOICES,
    ModelNames,
    is_hosted_voice,
    loaded_voice,
    voice_not_found,
)

Choice = TypeVar("Choice", bound=str)
Number = TypeVar("Number", int, float)

# The tasks of vLLM's endpoint: to speak with a voice of the model, with a described voice, and with a cloned voice.
TASKS = ("CustomVoice", "VoiceDesign", "Base")
# Maximum absolute value in a speaker embedding. Real values are far smaller. The limit excludes infinities and NaN.
MAX_EMBEDDING_VALUE = 1e6
# Sample rates that all formats support, in Hz.
SAMPLE_RATES = (8_000, 16_000, 24_000, 48_000)
MAX_EMBEDDING_NUMBERS, MAX_NAME_CHARS, MAX_SAMPLE_BYTES = 8192, 100, 10 << 20


class VoiceById(msgspec.Struct):
    """A voice that is named by an object. OpenAI's hosted service uses this form for custom voices."""

    id: Text | None = None


class SpeechFields(msgspec.Struct, kw_only=True):
    """The fields of a request, as the client sent them. Null counts as missing, and unknown fields are ignored."""

    # Name of the model.
    model: Text | None = None
    # Name of the voice.
    voice: Text | VoiceById | None = None
    # Another name of `voice`. If `voice` is present, `speaker` is not read and may be any value.
    speaker: msgspec.Raw = msgspec.Raw(b"null")
    # Audio format, ignoring case. A false value (`""`, `0`, `[]`) counts as missing.
    response_format: object = None
    # Sample rate in Hz, one of SAMPLE_RATES. It may be a string, as in a form.
    sample_rate: int | Text | None = None
    # Speaking rate, in [0.25, 4]; may be a string.
    speed: float | Text | None = None
    # Whether audio is sent while it is generated.
    stream_audio: bool | None = None
    # Whether to report the times of words.
    word_timestamps: bool | None = None
    # How text is split into pieces to synthesize, ignoring case. A false value counts as missing.
    split_granularity: object = None
    # Random seed; may be a string.
    seed: int | Text | None = None
    # Code or English name of the language; `auto` to detect it.
    language: Text | None = None
    # Description of how to speak.
    instructions: Text | None = None
    # Maximum number of codec frames in a sentence.
    max_new_tokens: int | None = None
    # Number of codec frames in the first chunk; 0 for the model's default.
    initial_codec_chunk_frames: int | None = None
    # Whether the model receives the whole text before it speaks.
    non_streaming_mode: bool | None = None
    # Parameters that are specific to the model, by name.
    extra_params: dict[str, Any] | None = None
    # Task of the model: one of TASKS.
    task_type: Text | None = None
    # Recording of the voice to clone: base64, a `data:` URI or a URL.
    ref_audio: str | None = None
    # The words that are spoken in the recording.
    ref_text: Text | None = None
    # Whether to clone the voice from the sound of the recording only, without `ref_text`.
    x_vector_only_mode: bool | None = None
    # Embedding of the voice to clone, instead of a recording.
    speaker_embedding: list[float] | None = None

    @property
    def cloning(self) -> str | None:
        """The name of the first present field that requires a model which clones voices; None if there is none."""
        used = {
            "ref_audio": self.ref_audio,
            "ref_text": self.ref_text,
            "x_vector_only_mode": self.x_vector_only_mode,
            "speaker_embedding": self.speaker_embedding,
        }
        return next((name for name, value in used.items() if value), None)


class WordTime(msgspec.Struct):
    """A spoken word, as an answer shows it. Its times are whole milliseconds from the beginning of the audio."""

    word: str
    start_ms: int
    end_ms: int


def word_times(words: Iterable[Word]) -> list[WordTime]:
    """Return the words in the form that answers show, in the same order. Rounds their times to milliseconds."""
    return [WordTime(w.text, round(w.start_s * 1000), round(w.end_s * 1000)) for w in words]


@dataclass(frozen=True, slots=True)
class SpeechCatalog:
    """The capabilities of the loaded synthesizer, against which requests are checked."""

    # Names of the synthesizer.
    models: ModelNames
    # Voices of the model. The first is the default.
    voices: tuple[str, ...]
    # Codes of the languages that the model speaks, such as `en`.
    languages: tuple[str, ...]
    # Whether the model can clone the voice of a recording or an embedding.
    clones: bool
    # Returns the uploaded voice with a name; None if the name is unknown.
    uploaded: Callable[[str], VoiceSample | None]
    # Raises RemoteProtocolError for a URL that may not be fetched. The second argument is the field with the URL.
    check_url: Callable[[str, str], None]
    # Called if a hosted name of a model or voice is requested. The arguments are that name and the loaded name that is
    # used instead.
    log_alias: Callable[[str, str], None]
    # The tasks of TASKS that the model can do.
    tasks: tuple[str, ...] = ("CustomVoice",)
    # The `extra_params` that the model uses, by name: the minimum and maximum of each.
    parameters: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def names(self) -> str:
        """The names of the model's voices in one line, for error messages."""
        return ", ".join(self.voices)


def read_config(fields: SpeechFields, catalog: SpeechCatalog, format: SpeechFormat) -> SpeechConfig:
    """Convert the fields of a request into a configuration.

    `format` is the default audio format. If the default model or voice is used for a hosted name, that name is logged.
    Raises RemoteProtocolError: `model_not_found`, `voice_not_found`, `voice_not_supported`, `not_supported` or
    `missing_required_parameter`, or `invalid_type` or `invalid_value` with the field in `param`.
    """
    _check_model(fields.model, catalog)
    _check(fields, catalog)
    _check_language(fields.language, catalog)
    voice = _voice(fields, catalog)
    sample = _sample(fields, catalog)
    if sample is None and isinstance(voice, VoiceSample):
        sample = voice
    language = language_code(fields.language) if fields.language else None
    return SpeechConfig(
        voice=voice if isinstance(voice, str) else None,
        granularity=_choice(fields.split_granularity, "split_granularity", get_args(Granularity), "sentence"),
        format=_choice(fields.response_format, "response_format", get_args(SpeechFormat), format),
        speed=1.0 if fields.speed is None else number(_read(fields.speed, float, "speed"), "speed", 0.25, 4.0),
        seed=None if fields.seed is None else seed(_read(fields.seed, int, "seed")),
        stream=bool(fields.stream_audio),
        word_times=bool(fields.word_timestamps),
        language=None if language == "auto" else language,
        instructions=fields.instructions or "",
        sample=sample,
        max_frames=fields.max_new_tokens,
        first_frames=fields.initial_codec_chunk_frames or None,
        rate_hz=None if fields.sample_rate is None else _sample_rate(_read(fields.sample_rate, int, "sample_rate")),
        whole_text=fields.non_streaming_mode,
        parameters=_parameters(fields.extra_params or {}, catalog.parameters),
    )


def _read(value: Number | str, kind: type[Number], param: str) -> Number:
    """Read a number, which may be a string. Raises RemoteProtocolError (`invalid_type`) if it is not a number."""
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            typed(value, (int, float) if kind is float else int, param)
    return cast(Number, value)


def _sample_rate(asked: int) -> int:
    if asked not in SAMPLE_RATES:
        raise _invalid("sample_rate", f"expected one of {', '.join(map(str, SAMPLE_RATES))}")
    return asked


def _parameters(given: dict[str, Any], known: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Check and return the parameters that are specific to the model. Null counts as missing."""
    for name in given:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "has none"
            where = f"extra_params.{name[:MAX_NAME_CHARS]}"
            raise RemoteProtocolError("unknown_parameter", f"Unknown parameter '{where}': the model {takes}.", where)
    return {k: number(v, f"extra_params.{k}", *known[k]) for k, v in given.items() if v is not None}


def _choice(value: object, name: str, choices: tuple[Choice, ...], default: Choice) -> Choice:
    if not value:
        return default
    given = value.lower() if isinstance(value, str) else value
    found = next((choice for choice in choices if choice == given), None)
    if found is None:
        raise _invalid(name, f"expected one of {', '.join(choices)}")
    return found


def _check_model(name: str | None, catalog: SpeechCatalog) -> None:
    if not name or catalog.models.exact(name):
        return
    if len(name) > MAX_NAME_CHARS or not catalog.models.lenient(name):
        raise RemoteProtocolError("model_not_found", f"The model `{name[:MAX_NAME_CHARS]}` does not exist.", "model")
    catalog.log_alias(name, catalog.models.loaded[0])


def _voice(fields: SpeechFields, catalog: SpeechCatalog) -> str | VoiceSample | None:
    asked = fields.voice
    if asked is None:
        asked = decode(fields.speaker, str | VoiceById | None, "speaker")
    name = asked.id if isinstance(asked, VoiceById) else asked
    if not name:
        return None
    own, is_hosted = loaded_voice(name, catalog.voices), is_hosted_voice(name, strict=catalog.models.strict)
    if own:
        return own
    if not is_hosted and len(name) <= MAX_NAME_CHARS and (found := catalog.uploaded(name)):
        if catalog.clones:
            return found
        raise RemoteProtocolError(
            "voice_not_supported",
            f"The loaded model cannot speak with an uploaded voice; its own: {catalog.names}.",
            "voice",
        )
    if is_hosted:
        catalog.log_alias(f"voice {name}", catalog.voices[0])
        return None
    raise voice_not_found(name, catalog.voices, "voice")


def _sample(fields: SpeechFields, catalog: SpeechCatalog) -> VoiceSample | None:
    """Return the embedding or recording of a voice that a request contains; None without one."""
    if fields.speaker_embedding:
        return VoiceSample(embedding=tuple(fields.speaker_embedding))
    if not fields.ref_audio:
        return None
    if re.match(r"[\w+.-]+://", fields.ref_audio):
        catalog.check_url(fields.ref_audio, "ref_audio")
        sample = VoiceSample(url=fields.ref_audio)
    else:
        sample = VoiceSample(audio_file(fields.ref_audio, "ref_audio", MAX_SAMPLE_BYTES))
    if fields.x_vector_only_mode:
        # Clone the voice from its sound only, without the words of the recording.
        return sample
    if not (fields.ref_text or "").strip():
        message = "'ref_text' is required: the words of 'ref_audio'. With x_vector_only_mode it is not needed."
        raise RemoteProtocolError("missing_required_parameter", message, "ref_text")
    return replace(sample, text=fields.ref_text or "")


def _check(fields: SpeechFields, catalog: SpeechCatalog) -> None:
    """Check the fields that have to be valid even if the loaded model does not use them."""
    if fields.max_new_tokens is not None:
        number(fields.max_new_tokens, "max_new_tokens", 1, 2**31)
    if fields.initial_codec_chunk_frames is not None:
        number(fields.initial_codec_chunk_frames, "initial_codec_chunk_frames", 0, 2**31)
    if fields.speaker_embedding is not None:
        _check_embedding(fields.speaker_embedding)
    task, unserved = fields.task_type, None if catalog.clones else fields.cloning
    if task is not None and task not in TASKS:
        raise _invalid("task_type", f"expected one of {', '.join(TASKS)}")
    if unserved or (task is not None and task not in catalog.tasks):
        message = "The loaded model speaks with its own voices only."
        if catalog.clones:
            message = f"The loaded model does {', '.join(catalog.tasks)}."
        raise RemoteProtocolError("not_supported", message, unserved or "task_type")


def _check_embedding(embedding: list[float]) -> None:
    if not 0 < len(embedding) <= MAX_EMBEDDING_NUMBERS:
        raise _invalid("speaker_embedding", f"expected 1 to {MAX_EMBEDDING_NUMBERS} numbers")
    if not all(abs(v) < MAX_EMBEDDING_VALUE for v in embedding):
        raise _invalid("speaker_embedding", "expected finite numbers")


def _check_language(language: str | None, catalog: SpeechCatalog) -> None:
    if language and catalog.languages and language_code(language) not in (*catalog.languages, "auto"):
        raise _invalid("language", f"the loaded model speaks {', '.join(catalog.languages)}; {OTHER_VOICES}")


def _invalid(param: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
