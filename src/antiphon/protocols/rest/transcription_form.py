"""The form of /v1/audio/transcriptions and /v1/audio/translations: docs/wire/transcriptions.md."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.events.languages import language_code
from antiphon.events.transcription import ServerVad
from antiphon.protocols.fields import nearest, unknown_parameter

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
# What becomes of a file's channels: they are mixed, transcribed one by one, or as their sound suggests.
ChannelMode = Literal["mix", "separate", "auto"]
FORMATS: tuple[TranscriptFormat, ...] = get_args(TranscriptFormat)
CHANNEL_MODES: tuple[ChannelMode, ...] = get_args(ChannelMode)
GRANULARITIES = ("word", "segment")
# The fields of the form, including the file.
FIELDS = (
    "channel_names",
    "channels",
    "chunking_strategy",
    "file",
    "known_speaker_names",
    "known_speaker_references",
    "language",
    "max_speakers",
    "model",
    "prompt",
    "response_format",
    "speaker_labels",
    "speakers",
    "stream",
    "temperature",
    "timestamp_granularities",
)
# Maximum number of characters of a speaker's name.
MAX_NAME_CHARS = 64
# Maximum number of speakers with references, as in OpenAI's service, of known speakers, and of speakers that can be
# asked for.
MAX_REFERENCES, MAX_KNOWN, MAX_SPEAKERS = 4, 20, 99
# Accepted spellings of true and false.
TRUE, FALSE = ("true", "1", "yes", "on"), ("", "false", "0", "no", "off", "null")
# Values of `language` that request language detection.
UNNAMED_LANGUAGE = ("", "auto", "detect", "null", "undefined")


@dataclass(frozen=True, slots=True)
class FileRequest:
    """The checked fields of a form. Only `model` is not checked: the model may not be loaded."""

    # Name of the model.
    model: str
    # Format of the transcript.
    format: TranscriptFormat = "json"
    # Language code such as `en`; None to detect the language.
    language: str | None = None
    # Names and words that the audio is likely to contain.
    prompt: str = ""
    # Sampling temperature in [0, 1]; 0 always takes the most likely token.
    temperature: float = 0.0
    # Whether `verbose_json` includes words.
    words: bool = False
    # Whether `verbose_json` includes segments.
    segments: bool = True
    # Whether to answer with server-sent events.
    stream: bool = False
    # How to detect the speech to transcribe. With "auto", the server chooses. With None, it transcribes the whole file.
    speech_detection: ServerVad | Literal["auto"] | None = "auto"
    # What becomes of the file's channels.
    channels: ChannelMode = "mix"
    # The names of the persons on the channels, in the order of the channels.
    channel_names: tuple[str, ...] = ()
    # Whether subtitles and `verbose_json` tell who speaks.
    speaker_labels: bool = False
    # The number of speakers; None: it is found out.
    speakers: int | None = None
    # The largest number of speakers; None: there is no limit.
    max_speakers: int | None = None
    # The names of known speakers, each with the encoded audio of the reference; b"" for a remembered speaker.
    known_speakers: tuple[tuple[str, bytes], ...] = ()

    @property
    def tells_speakers(self) -> bool:
        """Whether the answer tells who speaks, also if the channels do not."""
        return self.format == "diarized_json" or self.speaker_labels

    @property
    def needs_word_times(self) -> bool:
        """Whether the answer needs word times: for words, segments, subtitles or the order of several channels."""
        timed = self.format in ("verbose_json", "srt", "vtt") and not self.stream
        return timed or self.tells_speakers or self.channels != "mix"


def parse_form(fields: dict[str, list[str]], languages: Sequence[str]) -> FileRequest:
    """Read the text fields of a multipart form. For a repeated field, the last value counts.

    `languages`: the language codes that the model knows. Raises RemoteProtocolError: `missing_required_parameter` or
    `invalid_value`, with the field in `param`.
    """
    one = {k: v[-1] for k, v in fields.items() if v}
    for name in one:
        if (known := re.split(r"[\[.]", name)[0]) not in FIELDS and (meant := nearest(known, frozenset(FIELDS))):
            raise unknown_parameter(name, meant)
    if not one.get("model"):
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'model'.", "model")
    form = one.get("response_format") or "json"
    if form not in FORMATS:
        raise _invalid("response_format", form, FORMATS)
    language = _language(one.get("language", ""), languages)
    wanted = _listed(fields, "timestamp_granularities")
    for name in wanted:
        if name not in GRANULARITIES:
            raise _invalid("timestamp_granularities", name, GRANULARITIES)
    if wanted and form != "verbose_json":
        raise RemoteProtocolError(
            "invalid_value", "timestamp_granularities needs response_format verbose_json.", "timestamp_granularities"
        )
    speaker_labels = _flag(one.get("speaker_labels", ""), "speaker_labels")
    if speaker_labels and form in ("json", "text"):
        raise RemoteProtocolError(
            "invalid_value",
            "speaker_labels needs response_format diarized_json, verbose_json, srt or vtt.",
            "speaker_labels",
        )
    if speaker_labels and form != "diarized_json" and _flag(one.get("stream", ""), "stream"):
        message = "A stream tells speakers only with response_format diarized_json."
        raise RemoteProtocolError("invalid_value", message, "speaker_labels")
    return FileRequest(
        model=one["model"],
        format=form,
        language=language,
        prompt=one.get("prompt", ""),
        temperature=_temperature(one.get("temperature", "0")),
        words="word" in wanted,
        segments=not wanted or "segment" in wanted,
        stream=_flag(one.get("stream", ""), "stream"),
        speech_detection=_speech_detection(one),
        channels=_channel_mode(one.get("channels", "mix")),
        channel_names=_names(fields, "channel_names"),
        speaker_labels=speaker_labels,
        speakers=_count(one.get("speakers", ""), "speakers"),
        max_speakers=_count(one.get("max_speakers", ""), "max_speakers"),
        known_speakers=_known_speakers(fields),
    )


def _listed(fields: dict[str, list[str]], name: str) -> list[str]:
    """Return a list in any form that clients send: repeated fields, `[]`, indices (`[0]`, `.0`), commas, or JSON."""
    found = list[str]()
    for text in _repeated(fields, name):
        found += text.strip(" []").split(",")
    return [item for text in found if (item := text.strip(" \"'"))]


def _repeated(fields: dict[str, list[str]], name: str) -> list[str]:
    """Return the values of a repeated field, with or without `[]` or indices (`[0]`, `.0`), as they are."""
    spelling = re.compile(re.escape(name) + r"(\[\d*\]|\.\d+)*")
    return [value for key, values in fields.items() if spelling.fullmatch(key) for value in values]


def _names(fields: dict[str, list[str]], name: str) -> tuple[str, ...]:
    """Return the names of speakers. Raises RemoteProtocolError for a name that cannot be printed, or given twice."""
    names = tuple(speaker_name(text, name) for text in _repeated(fields, name))
    if len(set(names)) < len(names):
        raise RemoteProtocolError("invalid_value", f"Invalid {name}: two names are equal.", name)
    return names


def speaker_name(given: str, param: str) -> str:
    """Return a speaker's name without space around it. Raises RemoteProtocolError for one that cannot be printed."""
    text = given.strip()
    # Categories C and Z: control, format and separator characters, which may forge lines of a subtitle.
    printable = all(c == " " or unicodedata.category(c)[0] not in "CZ" for c in text)
    if not text or len(text) > MAX_NAME_CHARS or not printable:
        message = f"Invalid {param}: a name has 1 to {MAX_NAME_CHARS} characters, and no control characters."
        raise RemoteProtocolError("invalid_value", message, param)
    return text


def _count(text: str, name: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal() or not 1 <= int(text) <= MAX_SPEAKERS:
        message = f"Invalid {name}: '{text[:MAX_NAME_CHARS]}'. Expected 1 to {MAX_SPEAKERS}."
        raise RemoteProtocolError("invalid_value", message, name)
    return int(text)


def _known_speakers(fields: dict[str, list[str]]) -> tuple[tuple[str, bytes], ...]:
    """Return the names of known speakers, each with its reference, which is empty for a remembered speaker.

    The references are not decoded as audio yet. Without any, all speakers are remembered ones.
    """
    names, param = _names(fields, "known_speaker_names"), "known_speaker_references"
    references = _repeated(fields, param) or [""] * len(names)
    if len(names) != len(references):
        message = f"There are {len(names)} known_speaker_names and {len(references)} known_speaker_references."
        raise RemoteProtocolError("invalid_value", message, param)
    for most, given in ((MAX_KNOWN, names), (MAX_REFERENCES, [reference for reference in references if reference])):
        if len(given) > most:
            message = f"At most {MAX_KNOWN} speakers can be known, and {MAX_REFERENCES} of them by references."
            raise RemoteProtocolError("invalid_value", message, "known_speaker_names")
    found = []
    for name, reference in zip(names, references, strict=True):
        if not reference:
            found.append((name, b""))
            continue
        header, body = split_data_uri(reference)
        try:
            if not header.endswith(";base64"):
                raise ValueError("expected a data URL with base64")
            found.append((name, decode_base64(body)))
        except ValueError as error:
            message = f"The reference of '{name}' is invalid: {error}."
            raise RemoteProtocolError("invalid_value", message, param) from None
    return tuple(found)


def _channel_mode(text: str) -> ChannelMode:
    if text not in CHANNEL_MODES:
        raise _invalid("channels", text, CHANNEL_MODES)
    return text


def _flag(text: str, name: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE and word not in FALSE:
        raise _invalid(name, text, ("true", "false"))
    return word in TRUE


def _language(text: str, languages: Sequence[str]) -> str | None:
    """Convert a code, a locale or an English name into the model's code. Returns None to detect the language."""
    named = text.strip()
    if named.lower() in UNNAMED_LANGUAGE:
        return None
    for code in (named, language_code(named)):
        if code in languages:
            return code
    raise RemoteProtocolError(
        "invalid_value",
        f"'{text}' is no language of this model. Expected an ISO 639-1 code such as 'en', or none to detect it.",
        "language",
    )


class _ServerVadFields(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=32, le=60000)] = 200


def _speech_detection(form: dict[str, str]) -> ServerVad | Literal["auto"] | None:
    """Read `chunking_strategy`: a word, a JSON object, or the object's fields as separate form fields.

    OpenAI's own client libraries send separate fields, such as `chunking_strategy[type]`.
    """
    name = "chunking_strategy"
    spelling = re.compile(rf"{name}(?:\[(\w+)\]|\.(\w+))")
    matches = ((spelling.fullmatch(key), value) for key, value in form.items())
    fields: object = {match[1] or match[2]: value for match, value in matches if match}
    text = form.get(name, "").strip()
    if not fields and text in ("", "auto"):
        return "auto"
    try:
        fields = fields or msgspec.json.decode(text)
        if fields is None:
            return None
        if fields == "auto":
            return "auto"
        found = msgspec.convert(fields, _ServerVadFields, strict=False)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise RemoteProtocolError("invalid_value", f"Invalid {name}: {error}.", name) from None
    return ServerVad(found.threshold, found.prefix_padding_ms, found.silence_duration_ms)


def _temperature(text: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise RemoteProtocolError("invalid_value", f"Invalid temperature: '{text}'. Expected 0 to 1.", "temperature")
    return value


def _invalid(param: str, value: str, choices: Sequence[str]) -> RemoteProtocolError:
    names = ", ".join(f"'{c}'" for c in choices)
    return RemoteProtocolError("invalid_value", f"Invalid value: '{value}'. Supported values are: {names}.", param)
