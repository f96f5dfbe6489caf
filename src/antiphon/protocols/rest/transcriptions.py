"""Bodies of /v1/audio/transcriptions and /v1/audio/translations: docs/wire/transcriptions.md.

Reads the form, and writes a transcript as json, text, srt, vtt or verbose_json, or as the server-sent events of a
stream. Times are in seconds from the beginning of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from antiphon.contracts import FileInfo, TranscriptionTask, TranscriptSegment
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.transcription import ServerVad
from antiphon.events.words import Word
from antiphon.protocols.fields import nearest, unknown_parameter

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS: tuple[TranscriptFormat, ...] = get_args(TranscriptFormat)
GRANULARITIES = ("word", "segment")
# The fields of the form, including the file.
FIELDS = (
    "chunking_strategy",
    "file",
    "language",
    "model",
    "prompt",
    "response_format",
    "stream",
    "temperature",
    "timestamp_granularities",
)
# Undecodable audio shorter than MIN_SKIPPED_S is not reported.
MIN_SKIPPED_S = 0.1
# Accepted spellings of true and false.
TRUE, FALSE = ("true", "1", "yes", "on"), ("", "false", "0", "no", "off", "null")
# Values of `language` that request language detection.
UNNAMED_LANGUAGE = ("", "auto", "detect", "null", "undefined")
# Number of audio tokens per second in `usage`: Whisper's encoder has one position per 20 ms of audio.
AUDIO_TOKENS_PER_S = 50


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

    @property
    def needs_word_times(self) -> bool:
        """Whether the answer needs word times: for words, segments or subtitles."""
        return self.format in ("verbose_json", "srt", "vtt") and not self.stream


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
    )


def _listed(fields: dict[str, list[str]], name: str) -> list[str]:
    """Return a list in any form that clients send: repeated fields, `[]`, indices (`[0]`, `.0`), commas, or JSON."""
    spelling = re.compile(re.escape(name) + r"(\[\d*\]|\.\d+)*")
    found = list[str]()
    for text in (v for key, values in fields.items() if spelling.fullmatch(key) for v in values):
        found += text.strip(" []").split(",")
    return [item for text in found if (item := text.strip(" \"'"))]


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


class _Duration(msgspec.Struct, tag="duration"):
    seconds: float


class _Transcript(msgspec.Struct):
    text: str
    usage: _Duration


class _VerboseSegment(msgspec.Struct):
    # Index of the segment, from 0.
    id: int
    # Start of the window in which the segment was decoded, in frames of 10 ms.
    seek: int
    # Start in seconds.
    start: float
    # End in seconds.
    end: float
    # Text of the segment.
    text: str
    # The model's token ids.
    tokens: tuple[int, ...]
    # Sampling temperature of the decode.
    temperature: float
    # Mean log-probability of the segment's tokens.
    avg_logprob: float
    # Length of the text divided by its compressed length. A high ratio indicates repetition.
    compression_ratio: float
    # Probability that the segment contains no speech.
    no_speech_prob: float


class _VerboseWord(msgspec.Struct):
    word: str
    start: float
    end: float
    confidence: float


class _VerboseTranscript(msgspec.Struct):
    # `transcribe` or `translate`.
    task: TranscriptionTask
    # Language of the speech.
    language: str
    # Duration of the file, in seconds.
    duration: float
    # Text of all segments.
    text: str
    # Duration that counts as usage.
    usage: _Duration
    # Duration of audio that could not be decoded, in seconds; missing if it is short.
    skipped_seconds: float | UnsetType = UNSET
    # Segments, if requested.
    segments: list[_VerboseSegment] | UnsetType = UNSET
    # Words, if requested.
    words: list[_VerboseWord] | UnsetType = UNSET


def skipped_seconds(skipped_s: float) -> float:
    """Return the duration of undecodable audio to report, in seconds; 0 if it is too short for a word."""
    return round(skipped_s, 2) if skipped_s >= MIN_SKIPPED_S else 0.0


def joined(segments: Iterable[TranscriptSegment]) -> str:
    """Join the text of all segments, which include the spaces between them. Strips surrounding space."""
    return "".join(s.text for s in segments).strip()


def body(
    request: FileRequest,
    task: TranscriptionTask,
    info: FileInfo,
    segments: Sequence[TranscriptSegment],
    skipped_s: float = 0.0,
) -> tuple[str, str]:
    """Return the media type and the body of a finished transcript, in the requested format.

    `skipped_s`: duration of audio in the file that could not be decoded, in seconds.
    """
    text = joined(segments)
    match request.format:
        case "text":
            return "text/plain; charset=utf-8", text + "\n"
        case "srt":
            return "application/x-subrip; charset=utf-8", srt(segments)
        case "vtt":
            return "text/vtt; charset=utf-8", vtt(segments)
        case "json":
            return "application/json", _json(_Transcript(text, _Duration(round(info.duration_s, 3))))
        case "verbose_json":
            return "application/json", _json(_verbose(request, task, info, segments, skipped_s))


def _verbose(
    request: FileRequest,
    task: TranscriptionTask,
    info: FileInfo,
    segments: Sequence[TranscriptSegment],
    skipped_s: float,
) -> _VerboseTranscript:
    duration_s = round(info.duration_s, 3)
    return _VerboseTranscript(
        task,
        info.language,
        duration_s,
        joined(segments),
        _Duration(duration_s),
        skipped_seconds(skipped_s) or UNSET,
        [_verbose_segment(s) for s in segments] if request.segments else UNSET,
        [_verbose_word(w) for s in segments for w in s.words] if request.words else UNSET,
    )


def _verbose_word(word: Word) -> _VerboseWord:
    return _VerboseWord(word.text, round(word.start_s, 3), round(word.end_s, 3), round(word.probability, 3))


def _verbose_segment(segment: TranscriptSegment) -> _VerboseSegment:
    return _VerboseSegment(
        id=segment.id,
        seek=segment.seek,
        start=round(segment.start_s, 3),
        end=round(segment.end_s, 3),
        text=segment.text,
        tokens=tuple(segment.tokens),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )


class _TextDelta(msgspec.Struct, tag="transcript.text.delta"):
    delta: str


class _InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class _TokenUsage(msgspec.Struct, tag="tokens"):
    input_tokens: int
    input_token_details: _InputTokenDetails
    output_tokens: int
    total_tokens: int


class _TextDone(msgspec.Struct, tag="transcript.text.done"):
    text: str
    usage: _TokenUsage
    skipped_seconds: float | UnsetType = UNSET


class _Failure(msgspec.Struct, omit_defaults=True):
    type: Literal["server_error", "invalid_request_error"]
    message: str
    code: str | None = None
    param: str | None = None


class _ErrorEvent(msgspec.Struct, tag="error"):
    error: _Failure


def delta_event(text: str) -> str:
    """Return the server-sent event for new text. Clients append the deltas: text is never revised after it was sent."""
    return _sse(_TextDelta(text))


def done_event(text: str, info: FileInfo, num_tokens: int, skipped_s: float = 0.0) -> str:
    """Return the server-sent event that ends a stream. `text`: the joined deltas. `num_tokens`: their token count.

    `skipped_s`: duration of audio in the file that could not be decoded, in seconds.
    """
    audio = round(info.duration_s * AUDIO_TOKENS_PER_S)
    details = _InputTokenDetails(audio_tokens=audio, text_tokens=0)
    usage = _TokenUsage(audio, details, num_tokens, audio + num_tokens)
    return _sse(_TextDone(text, usage, skipped_seconds(skipped_s) or UNSET))


def error_event(message: str) -> str:
    """Return the event for a failure of the model that ends a stream. The status 200 was already sent."""
    return _sse(_ErrorEvent(_Failure("server_error", message)))


def file_error_event(message: str, code: str) -> str:
    """Return the event for an error in the client's file that ends a stream."""
    return _sse(_ErrorEvent(_Failure("invalid_request_error", message, code, "file")))


def _sse(event: _TextDelta | _TextDone | _ErrorEvent) -> str:
    return f"data: {_json(event)}\n\n"


def srt(segments: Iterable[TranscriptSegment]) -> str:
    """Format SubRip subtitles: one cue per segment, numbered from 1, with times as HH:MM:SS,mmm.

    Returns an empty string if there are no segments.
    """
    return "".join(
        f"{n}\n{_clock(s.start_s, ',')} --> {_clock(s.end_s, ',')}\n{s.text.strip()}\n\n"
        for n, s in enumerate(segments, 1)
    )


def vtt(segments: Iterable[TranscriptSegment]) -> str:
    """Format WebVTT subtitles: one cue per segment, with times as HH:MM:SS.mmm.

    Returns only the header if there are no segments.
    """
    cues = (f"{_clock(s.start_s, '.')} --> {_clock(s.end_s, '.')}\n{s.text.strip()}\n\n" for s in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _clock(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3600000:02}:{ms // 60000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
