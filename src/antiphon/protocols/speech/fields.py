"""The fields of a request for speech, which a speech stream and HTTP share, and the configuration they come to.

docs/wire/speech-stream.md and docs/wire/speech.md describe them. The names are those of OpenAI's and vLLM's endpoints;
fields that only other models have a use for are checked all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from antiphon.audio import SpeechFormat
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import Granularity, SpeechConfig, VoiceSample
from antiphon.protocols.fields import audio_file, number, typed
from antiphon.protocols.model_names import ModelNames

# The hosted service's voices. Clients name one of them when their user chose none; the default voice speaks for it.
HOSTED_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
TASKS = ("CustomVoice", "VoiceDesign", "Base")
# The numbers of speaker embeddings are far smaller; infinities and NaN are not.
MAX_EMBEDDING_VALUE = 1e6
MAX_EMBEDDING_NUMBERS, MAX_NAME_CHARS, MAX_SAMPLE_BYTES = 8192, 100, 10 << 20
LANGUAGE_NAMES = {
    "english": "en",
    "chinese": "zh",
    "german": "de",
    "french": "fr",
    "spanish": "es",
    "japanese": "ja",
    "italian": "it",
    "portuguese": "pt",
    "korean": "ko",
    "russian": "ru",
}
# Fields that only a model that clones voices has a use for.
_CLONING = ("ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding")


@dataclass(frozen=True, slots=True)
class SpeechCatalog:
    """What the loaded synthesizer offers, for the checks of a request."""

    models: ModelNames
    # Its own voices; the first is the default.
    voices: tuple[str, ...]
    # Codes such as `en`.
    languages: tuple[str, ...]
    # It speaks with the voice of a recording or an embedding.
    clones: bool
    # The uploaded voice of a name, None if there is none.
    uploaded: Callable[[str], VoiceSample | None]
    # Called with a hosted name of a model or voice, and with what serves it instead.
    log_alias: Callable[[str, str], None]
    # The `task_type`s that the model was made for, of TASKS.
    tasks: tuple[str, ...] = ("CustomVoice",)

    @property
    def names(self) -> str:
        """The model's own voices in one line, as errors name them to the client."""
        return ", ".join(self.voices)


def read_config(fields: dict[str, Any], catalog: SpeechCatalog, format: SpeechFormat) -> SpeechConfig:
    """The configuration that a request asks for. A field that is None counts as missing; unknown fields are ignored.

    `format` is the audio format of a request that names none. A hosted name that the default model or voice serves is
    logged. Raises RemoteProtocolError: `model_not_found`, `voice_not_found`, `voice_not_supported`, `not_supported`, or
    `invalid_type` or `invalid_value` with the field in `param`.
    """
    _model(fields.get("model"), catalog)
    _check(fields, catalog)
    asked: SpeechFormat = _choice(fields, "response_format", get_args(SpeechFormat), format)
    granularity: Granularity = _choice(fields, "split_granularity", get_args(Granularity), "sentence")
    seed = _seed(fields)
    words = _flag(fields, "word_timestamps")
    stream = _flag(fields, "stream_audio")
    speed = 1.0 if fields.get("speed") is None else number(fields["speed"], "speed", 0.25, 4.0)
    voice = _voice(fields, catalog)
    sample = _sample(fields)
    if sample is None and isinstance(voice, VoiceSample):
        sample = voice
    language = _language_code(fields["language"]) if fields.get("language") else None
    return SpeechConfig(
        voice=voice if isinstance(voice, str) else None,
        granularity=granularity,
        format=asked,
        speed=speed,
        seed=seed,
        stream=stream,
        word_times=words,
        language=None if language == "auto" else language,
        instructions=fields.get("instructions") or "",
        sample=sample,
        max_frames=fields.get("max_new_tokens"),
        first_frames=fields.get("initial_codec_chunk_frames") or None,
    )


def _choice(fields: dict[str, Any], name: str, choices: tuple[str, ...], default: str) -> Any:
    value = fields.get(name) or default
    if value not in choices:
        raise _invalid(name, f"expected one of {', '.join(choices)}")
    return value


def _seed(fields: dict[str, Any]) -> int | None:
    """The seed in [0, 2^64). Generators take no negative ones; as two's complement, each has a seed of its own."""
    seed = fields.get("seed")
    if seed is None:
        return None
    number(typed(seed, int, "seed"), "seed", -(2**63), 2**63 - 1)
    return int(seed) % 2**64


def _model(name: Any, catalog: SpeechCatalog) -> None:
    if name is None or name == "":
        return
    typed(name, str, "model")
    if catalog.models.exact(name):
        return
    if len(name) > MAX_NAME_CHARS or not catalog.models.lenient(name):
        raise RemoteProtocolError("model_not_found", f"The model `{name[:MAX_NAME_CHARS]}` does not exist.", "model")
    catalog.log_alias(name, catalog.models.loaded[0])


def _voice(fields: dict[str, Any], catalog: SpeechCatalog) -> str | VoiceSample | None:
    given = fields.get("voice")
    asked = fields.get("speaker") if given is None else given
    if isinstance(asked, dict):
        asked = asked.get("id")
    if asked is None or asked == "":
        return None
    name: str = typed(asked, str, "voice")
    own = next((v for v in catalog.voices if v.lower() == name.lower()), None)
    if own:
        return own
    hosted = name.lower() in HOSTED_VOICES and not catalog.models.strict
    if not hosted and len(name) <= MAX_NAME_CHARS and (found := catalog.uploaded(name)):
        if catalog.clones:
            return found
        raise RemoteProtocolError(
            "voice_not_supported",
            f"The loaded model cannot speak with an uploaded voice; its own: {catalog.names}.",
            "voice",
        )
    if hosted:
        catalog.log_alias(f"voice {name}", catalog.voices[0])
        return None
    raise RemoteProtocolError(
        "voice_not_found", f"The voice `{name[:MAX_NAME_CHARS]}` does not exist; there are: {catalog.names}.", "voice"
    )


def _sample(fields: dict[str, Any]) -> VoiceSample | None:
    """The voice that a request brings along, as an embedding or a recording."""
    if embedding := fields.get("speaker_embedding"):
        if not all(abs(v) < MAX_EMBEDDING_VALUE for v in embedding):
            raise _invalid("speaker_embedding", "expected finite numbers")
        return VoiceSample(embedding=tuple(float(v) for v in embedding))
    given = fields.get("ref_audio")
    if not given:
        return None
    recording = audio_file(given, "ref_audio", MAX_SAMPLE_BYTES)
    # With x_vector_only_mode the voice is cloned from its sound alone, and the words of the recording are not used.
    ref_text = "" if fields.get("x_vector_only_mode") else fields.get("ref_text") or ""
    return VoiceSample(recording, ref_text)


def _check(fields: dict[str, Any], catalog: SpeechCatalog) -> None:
    """Check the fields that are checked whether or not the loaded model has a use for them."""
    for name in ("instructions", "language", "ref_audio", "ref_text"):
        typed(fields.get(name), (str, type(None)), name)
    for name, low in (("max_new_tokens", 1), ("initial_codec_chunk_frames", 0)):
        if fields.get(name) is not None:
            number(typed(fields[name], int, name), name, low, 2**31)
    embedding = fields.get("speaker_embedding")
    if embedding is not None:
        values = typed(embedding, list, "speaker_embedding")
        if not 0 < len(values) <= MAX_EMBEDDING_NUMBERS:
            raise _invalid("speaker_embedding", f"expected 1 to {MAX_EMBEDDING_NUMBERS} numbers")
        for value in values:
            typed(value, (int, float), "speaker_embedding")
    _flag(fields, "x_vector_only_mode")
    task = fields.get("task_type")
    if task is not None and task not in TASKS:
        raise _invalid("task_type", f"expected one of {', '.join(TASKS)}")
    unserved = None if catalog.clones else next((n for n in _CLONING if fields.get(n)), None)
    if unserved or (task is not None and task not in catalog.tasks):
        message = "The loaded model speaks with its own voices only."
        if catalog.clones:
            message = f"The loaded model does {', '.join(catalog.tasks)}."
        raise RemoteProtocolError("not_supported", message, unserved or "task_type")
    language = fields.get("language")
    if language and _language_code(language) not in (*catalog.languages, "auto"):
        raise _invalid("language", f"the loaded model speaks {', '.join(catalog.languages)}")


def _language_code(language: str) -> str:
    """The code of a language that is given by its name, code or locale: `en` for `English`, `en` and `en-US`."""
    return LANGUAGE_NAMES.get(language.lower(), language.lower().split("-")[0].split("_")[0])


def _flag(fields: dict[str, Any], name: str) -> bool:
    return bool(typed(fields.get(name), (bool, type(None)), name))


def _invalid(param: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
