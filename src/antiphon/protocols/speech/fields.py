"""The fields a request for speech may have, over the socket and over REST: their checks and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from antiphon.audio import SpeechFormat
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import Granularity, SpeechConfig, VoiceSample
from antiphon.protocols.fields import audio_file, number, typed
from antiphon.protocols.model_names import ModelNames

# The hosted service's voices. A client that names one, as most do that never chose, is spoken to by the default voice.
HOSTED_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
TASKS = ("CustomVoice", "VoiceDesign", "Base")
# No number of an embedding is as large.
MAX_NUMBER = 1e6
MAX_EMBEDDING, MAX_NAME_CHARS, MAX_SAMPLE_BYTES = 8192, 100, 10 << 20
LANGUAGES = {
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
# Fields only a model that clones voices has a use for.
_CLONING = ("ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding")


@dataclass(frozen=True, slots=True)
class SpeechCatalog:
    """What can be asked of the loaded synthesizer. `voices`: the first is the default. `tasks`: see SynthesizerProfile. `uploaded`: the voice of that
    name, if one was uploaded. `log_alias`: called with a hosted name that the default voice speaks for, once it is used.
    """

    models: ModelNames
    voices: tuple[str, ...]
    languages: tuple[str, ...]
    clones: bool
    uploaded: Callable[[str], VoiceSample | None]
    log_alias: Callable[[str, str], None]
    tasks: tuple[str, ...] = ("CustomVoice",)

    @property
    def names(self) -> str:
        return ", ".join(self.voices)


def config(fields: dict[str, Any], catalog: SpeechCatalog, format: SpeechFormat) -> SpeechConfig:
    """The configuration that `fields` come to; None stands for a field that is not there. Unknown fields are ignored.

    Raises RemoteProtocolError: model_not_found, voice_not_found, or what is wrong with which field.
    """
    _model(fields.get("model"), catalog)
    _check(fields, catalog)
    asked: SpeechFormat = fields.get("response_format") or format
    if asked not in get_args(SpeechFormat):
        raise _invalid("response_format", f"expected one of {', '.join(get_args(SpeechFormat))}")
    granularity: Granularity = fields.get("split_granularity") or "sentence"
    if granularity not in get_args(Granularity):
        raise _invalid("split_granularity", f"expected one of {', '.join(get_args(Granularity))}")
    speed, seed = fields.get("speed"), fields.get("seed")
    if seed is not None:
        typed(seed, int, "seed")
        number(seed, "seed", -(2**63), 2**63 - 1)
    words = _flag(fields, "word_timestamps")
    stream = _flag(fields, "stream_audio")
    pace = 1.0 if speed is None else number(speed, "speed", 0.25, 4.0)
    voice = _voice(fields, catalog)
    sample = _sample(fields)
    if sample is None and isinstance(voice, VoiceSample):
        sample = voice
    language = fields.get("language")
    spoken = _code(language) if language else None
    return SpeechConfig(
        voice=voice if isinstance(voice, str) else None,
        granularity=granularity,
        format=asked,
        speed=pace,
        # Generators take no negative seeds; two's complement keeps them apart.
        seed=None if seed is None else seed % 2**64,
        stream=stream,
        word_times=words,
        language=None if spoken == "auto" else spoken,
        instructions=fields.get("instructions") or "",
        sample=sample,
        max_frames=fields.get("max_new_tokens"),
        first_frames=fields.get("initial_codec_chunk_frames") or None,
    )


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
    """The voice that a request brings along."""
    if embedding := fields.get("speaker_embedding"):
        if not all(abs(v) < MAX_NUMBER for v in embedding):
            raise _invalid("speaker_embedding", "expected finite numbers")
        return VoiceSample(embedding=tuple(float(v) for v in embedding))
    given = fields.get("ref_audio")
    if not given:
        return None
    sound = audio_file(given, "ref_audio", MAX_SAMPLE_BYTES)
    # Of who is to be followed by the sound of the voice alone, what was said does not matter.
    return VoiceSample(sound, "" if fields.get("x_vector_only_mode") else fields.get("ref_text") or "")


def _check(fields: dict[str, Any], catalog: SpeechCatalog) -> None:
    """Fields that are checked whether or not this model has a use for them."""
    for name in ("instructions", "language", "ref_audio", "ref_text"):
        typed(fields.get(name), (str, type(None)), name)
    for name, low in (("max_new_tokens", 1), ("initial_codec_chunk_frames", 0)):
        if fields.get(name) is not None:
            number(typed(fields[name], int, name), name, low, 2**31)
    embedding = fields.get("speaker_embedding")
    if embedding is not None:
        values = typed(embedding, list, "speaker_embedding")
        if not 0 < len(values) <= MAX_EMBEDDING:
            raise _invalid("speaker_embedding", f"expected 1 to {MAX_EMBEDDING} numbers")
        for value in values:
            typed(value, (int, float), "speaker_embedding")
    _flag(fields, "x_vector_only_mode")
    task = fields.get("task_type")
    if task is not None and task not in TASKS:
        raise _invalid("task_type", f"expected one of {', '.join(TASKS)}")
    wanted = None if catalog.clones else next((n for n in _CLONING if fields.get(n)), None)
    if wanted or (task is not None and task not in catalog.tasks):
        raise RemoteProtocolError(
            "not_supported",
            "The loaded model speaks with its own voices only."
            if not catalog.clones
            else f"The loaded model does {', '.join(catalog.tasks)}.",
            wanted or "task_type",
        )
    language = fields.get("language")
    if language and _code(language) not in (*catalog.languages, "auto"):
        raise _invalid("language", f"the loaded model speaks {', '.join(catalog.languages)}")


def _code(language: str) -> str:
    """`English`, `en-US` and `en` are one language."""
    return LANGUAGES.get(language.lower(), language.lower().split("-")[0].split("_")[0])


def _flag(fields: dict[str, Any], name: str) -> bool:
    return bool(typed(fields.get(name), (bool, type(None)), name))


def _invalid(param: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
