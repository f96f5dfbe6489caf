"""The answer to `POST /v1/listen`: the transcript of a file. See docs/wire/deepgram.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.contracts import FileInfo, TranscriptSegment
from antiphon.events.words import Word
from antiphon.protocols.deepgram.forms import (
    DeepgramWord,
    Speakers,
    confidence,
    created,
    model_info,
    model_uuid,
    shown_text,
    shown_words,
)
from antiphon.protocols.deepgram.query import COMMON, DeepgramQuery
from antiphon.protocols.fields import Text

# The parameters of a file.
PARAMETERS = COMMON | {
    "detect_language",
    "diarize",
    "diarize_model",
    "language",
    "multichannel",
    "paragraphs",
    "punctuate",
    "smart_format",
    "utt_split",
    "utterances",
}
# The pause in seconds that divides utterances, if the client gives none.
UTTERANCE_PAUSE_S = 0.8


class FileUrl(msgspec.Struct):
    """The body of a request about a file elsewhere."""

    url: Text


class FileSentence(msgspec.Struct):
    """One sentence of a paragraph, with its times in seconds."""

    text: str
    start: float
    end: float


class Paragraph(msgspec.Struct):
    """A part of the text, with its times in seconds."""

    sentences: list[FileSentence]
    start: float
    end: float
    num_words: int
    speaker: int | UnsetType = UNSET


class Paragraphs(msgspec.Struct):
    """The text in parts, and joined by empty lines."""

    transcript: str
    paragraphs: list[Paragraph]


class FileAlternative(msgspec.Struct):
    """The transcript of one channel, or of the mixed channels."""

    transcript: str
    confidence: float
    words: list[DeepgramWord]
    paragraphs: Paragraphs | UnsetType = UNSET


class Channel(msgspec.Struct):
    """A channel. `detected_language` is the ISO-639-1 code, if the client asked for its detection."""

    alternatives: list[FileAlternative]
    detected_language: str | UnsetType = UNSET


class FileUtterance(msgspec.Struct):
    """What one speaker says without a long pause. Times are seconds."""

    # When its first word begins.
    start: float
    # When its last word ends.
    end: float
    # The mean confidence of its words.
    confidence: float
    # The number of its channel, from 0.
    channel: int
    # Its text.
    transcript: str
    # Its words.
    words: list[DeepgramWord]
    # Its id, which is made of the request's id and its number.
    id: str
    # The number of its speaker, if speakers are distinguished.
    speaker: int | UnsetType = UNSET


class Results(msgspec.Struct):
    """The transcripts of all channels, and the utterances in order."""

    channels: list[Channel]
    utterances: list[FileUtterance] | UnsetType = UNSET


class Metadata(msgspec.Struct):
    """What is known of the request and the file. `duration` is in seconds."""

    # Always "deprecated".
    transaction_key: str
    # The id of the request.
    request_id: str
    # The SHA-256 of the file, as hexadecimal digits.
    sha256: str
    # When the answer was made, as ISO 8601 text.
    created: str
    # The length of the audio.
    duration: float
    # The number of channels that were transcribed.
    channels: int
    # The ids of the models.
    models: list[str]
    # What is known of each model, by its id.
    model_info: dict[str, dict[str, str]]


class FileTranscript(msgspec.Struct):
    """The answer about a file: its facts, and its transcript."""

    metadata: Metadata
    results: Results


@dataclass(frozen=True, slots=True)
class TranscribedFile:
    """What was heard in a file. `channels`: the names of the channels' speakers, in order; () if they were mixed."""

    segments: Sequence[TranscriptSegment]
    info: FileInfo
    channels: Sequence[str]
    sha256: str


def file_transcript(
    query: DeepgramQuery, heard: TranscribedFile, model: str, request_id: str, now_s: float
) -> FileTranscript:
    """Return the answer about a file. `model` is the name of the transcriber."""
    names, speakers = heard.channels or ("",), Speakers()
    punctuate = query.flag("punctuate") or query.flag("smart_format") or query.flag("paragraphs")
    detects = query.flag("detect_language") or query.text("language") == "multi"
    channels = []
    for name in names:
        own = [s for s in heard.segments if not heard.channels or s.speaker == name]
        shown = [word for s in own for word in shown_words(s.words, speaker=_speaker(s, heard, speakers))]
        alternative = FileAlternative(
            shown_text("".join(s.text for s in own), punctuate=punctuate),
            confidence([word for s in own for word in s.words]),
            shown,
            _paragraphs(own, heard, speakers) if query.flag("paragraphs") else UNSET,
        )
        channels.append(Channel([alternative], heard.info.language if detects else UNSET))
    utterances: list[FileUtterance] | UnsetType = UNSET
    if query.flag("utterances"):
        pause_s = query.number("utt_split", UTTERANCE_PAUSE_S, 0.0, 60.0)
        utterances = list(_utterances(heard, speakers, pause_s, request_id, punctuate=punctuate))
    info = {model_uuid(model): model_info(model)}
    metadata = Metadata(
        *("deprecated", request_id, heard.sha256, created(now_s), round(heard.info.duration_s, 3)),
        *(len(names), list(info), info),
    )
    return FileTranscript(metadata, Results(channels, utterances))


def _speaker(segment: TranscriptSegment, heard: TranscribedFile, speakers: Speakers) -> int | UnsetType:
    """Return the number of a segment's speaker; UNSET if each channel is one speaker, or without labels."""
    return UNSET if heard.channels else speakers.number(segment.speaker)


def _paragraphs(segments: Sequence[TranscriptSegment], heard: TranscribedFile, speakers: Speakers) -> Paragraphs:
    found = []
    for s in segments:
        sentence = FileSentence(s.text.strip(), round(s.start_s, 3), round(s.end_s, 3))
        speaker = _speaker(s, heard, speakers)
        found.append(Paragraph([sentence], sentence.start, sentence.end, len(s.words), speaker))
    return Paragraphs("\n\n".join(p.sentences[0].text for p in found), found)


def _utterances(
    heard: TranscribedFile, speakers: Speakers, pause_s: float, request_id: str, *, punctuate: bool
) -> Iterator[FileUtterance]:
    """Yield runs of words of one speaker without a pause of `pause_s`."""
    words: list[Word] = []
    of: TranscriptSegment | None = None

    def utterance(number: int) -> FileUtterance:
        assert of
        text = " ".join(word.text for word in words)
        return FileUtterance(
            *(round(words[0].start_s, 3), round(words[-1].end_s, 3), confidence(words)),
            heard.channels.index(of.speaker) if heard.channels else 0,
            shown_text(text, punctuate=punctuate),
            shown_words(words, speaker=_speaker(of, heard, speakers)),
            f"{request_id}-{number}",
            _speaker(of, heard, speakers),
        )

    number = 0
    for segment in heard.segments:
        for word in segment.words:
            if words and of and (of.speaker != segment.speaker or word.start_s - words[-1].end_s >= pause_s):
                yield utterance(number)
                number, words = number + 1, []
            words, of = [*words, word], segment
    if words:
        yield utterance(number)
