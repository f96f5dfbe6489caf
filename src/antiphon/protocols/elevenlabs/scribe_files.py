"""Scribe over HTTP (`POST /v1/speech-to-text`): the form of a request, and the transcript of a file.

See docs/wire/elevenlabs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from antiphon.contracts import FileInfo, TranscriptSegment
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.protocols.elevenlabs.scribe import ScribeWord, scribe_words
from antiphon.protocols.opening import TRUE_VALUES
from antiphon.protocols.rest.transcription_form import FileRequest

MAX_SPEAKERS = 32
# Fields with a wish that this server cannot fulfil. They are refused unless they are false.
REFUSED = ("webhook", "cloud_storage_url", "source_url", "use_multi_channel", "entity_detection", "additional_formats")
# Fields that are read here. The others are hints for the hosted models.
FIELDS = frozenset(
    (
        *("file", "model_id", "language_code", "num_speakers", "diarize", "timestamps_granularity", "file_format"),
        *("temperature", "keyterms", *REFUSED),
    )
)


class ScribeTranscript(msgspec.Struct):
    """The transcript of a file, with its words and the spaces between them."""

    # ISO-639-1 code of the language.
    language_code: str
    # Always 1: the model's probability of the language is not reported.
    language_probability: float
    # All text.
    text: str
    # The words and the spaces between them.
    words: list[ScribeWord]
    # Id of the request.
    transcription_id: str
    # Length of the file, in seconds.
    audio_duration_secs: float


def read_form(form: Mapping[str, Sequence[str]], knows_language: Callable[[str], bool], model: str) -> FileRequest:
    """Read the text fields of a form. `model` is the loaded model. Raises RemoteProtocolError."""
    one = {name: values[-1] for name, values in form.items() if values}
    for name in REFUSED:
        if one.get(name, "").lower() not in ("", "false", "0", "[]", "null"):
            raise RemoteProtocolError("unsupported_parameter", f"'{name}' is not supported by this server.", name)
    if one.get("file_format", "other") not in ("other", ""):
        message = "Raw samples are not supported: send a file in a container, such as WAV."
        raise RemoteProtocolError("invalid_value", message, "file_format")
    language = language_code(one["language_code"]) if one.get("language_code") else None
    if language and not knows_language(language):
        raise RemoteProtocolError("invalid_value", f"The language '{language[:20]}' is not known.", "language_code")
    return FileRequest(
        model,
        "verbose_json",
        language,
        ", ".join(term.strip() for term in form.get("keyterms", ()) if term.strip()),
        temperature=_temperature(one.get("temperature", "")),
        words=True,
        speaker_labels=one.get("diarize", "").lower() in TRUE_VALUES,
        speakers=_speakers(one.get("num_speakers", "")),
    )


def transcript(
    info: FileInfo, segments: Sequence[TranscriptSegment], granularity: str, request_id: str
) -> ScribeTranscript:
    """Return the answer. `granularity`: `none` leaves out the words. Speakers are numbered as they appear."""
    labels = list(dict.fromkeys(segment.speaker for segment in segments if segment.speaker))
    words = list[ScribeWord]()
    for segment in segments if granularity != "none" else ():
        speaker = f"speaker_{labels.index(segment.speaker)}" if segment.speaker else None
        found = list(scribe_words(segment.words, speaker))
        if words and found:
            words.append(ScribeWord(" ", words[-1].end, found[0].start, "spacing", speaker, 0.0))
        words += found
    text = "".join(segment.text for segment in segments).strip()
    return ScribeTranscript(info.language, 1.0, text, words, request_id, round(info.duration_s, 3))


def _temperature(text: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 2.0:
        raise RemoteProtocolError("invalid_value", "The temperature has to be 0 to 2.", "temperature")
    return min(value, 1.0)


def _speakers(text: str) -> int | None:
    if not text.strip() or text == "null":
        return None
    if not text.strip().isdecimal() or not 1 <= int(text) <= MAX_SPEAKERS:
        raise RemoteProtocolError("invalid_value", f"'num_speakers' has to be 1 to {MAX_SPEAKERS}.", "num_speakers")
    return int(text)
