"""Bodies of /v1/audio/transcriptions and /v1/audio/translations: docs/wire/transcriptions.md.

Writes a transcript as json, text, srt, vtt, verbose_json or diarized_json, or as the server-sent events of a stream.
Times are in seconds from the beginning of the file. `transcription_form.py` reads the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio.channel_survey import ChannelFacts
from antiphon.contracts import FileInfo, TranscriptionTask, TranscriptSegment
from antiphon.events.words import Word
from antiphon.protocols.rest.transcription_form import FileRequest

# Undecodable audio shorter than MIN_SKIPPED_S is not reported.
MIN_SKIPPED_S = 0.1
# Number of audio tokens per second in `usage`: Whisper's encoder has one position per 20 ms of audio.
AUDIO_TOKENS_PER_S = 50


class _Duration(msgspec.Struct, tag="duration"):
    seconds: float


class _Transcript(msgspec.Struct):
    text: str
    usage: _Duration


class ChannelNote(msgspec.Struct, omit_defaults=True):
    """What became of one channel of a file whose channels were transcribed one by one.

    - `channel`: its number, from 0.
    - `speaker`: the label of its words; None if it is silent.
    - `same_as`: the earlier channel with the same sound, which was transcribed in its place.
    """

    channel: int
    speaker: str | None = None
    same_as: int | None = None


class _DiarizedSegment(msgspec.Struct, tag="transcript.text.segment"):
    id: str
    start: float
    end: float
    text: str
    speaker: str


class _Diarized(msgspec.Struct):
    # `transcribe` or `translate`.
    task: TranscriptionTask
    # Duration of the file, in seconds.
    duration: float
    # Text of all segments.
    text: str
    # What was said by whom.
    segments: list[_DiarizedSegment]
    # Duration that counts as usage.
    usage: _Duration
    # What became of the channels, if they were transcribed one by one.
    channels: Sequence[ChannelNote] | UnsetType = UNSET


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
    # Who says it, if speakers are distinguished.
    speaker: str | UnsetType = UNSET


class _VerboseWord(msgspec.Struct):
    word: str
    start: float
    end: float
    confidence: float
    speaker: str | UnsetType = UNSET


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
    # What became of the channels, if they were transcribed one by one.
    channels: Sequence[ChannelNote] | UnsetType = UNSET


def channel_notes(facts: ChannelFacts, names: Mapping[int, str]) -> list[ChannelNote]:
    """Return what became of each channel. `names`: the speakers of the channels that were transcribed."""
    heard = [names.get(channel if same is None else same) for channel, same in enumerate(facts.same_as)]
    return [ChannelNote(channel, heard[channel], same) for channel, same in enumerate(facts.same_as)]


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
    channels: Sequence[ChannelNote] = (),
) -> tuple[str, str]:
    """Return the media type and the body of a finished transcript, in the requested format.

    `skipped_s`: duration of audio in the file that could not be decoded, in seconds. `channels`: what became of the
    channels; empty if they were mixed.
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
            return "application/json", _json(_verbose(request, task, info, segments, skipped_s, channels))
        case "diarized_json":
            duration_s = round(info.duration_s, 3)
            said = [_diarized_segment(s) for s in segments]
            return "application/json", _json(
                _Diarized(task, duration_s, text, said, _Duration(duration_s), channels or UNSET)
            )


def _diarized_segment(segment: TranscriptSegment) -> _DiarizedSegment:
    start, end = round(segment.start_s, 3), round(segment.end_s, 3)
    return _DiarizedSegment(segment_id(segment), start, end, segment.text.strip(), segment.speaker)


def segment_id(segment: TranscriptSegment) -> str:
    """Return the id of a segment in `diarized_json`, which counts from 1."""
    return f"seg_{segment.id + 1:03}"


def _verbose(
    request: FileRequest,
    task: TranscriptionTask,
    info: FileInfo,
    segments: Sequence[TranscriptSegment],
    skipped_s: float,
    channels: Sequence[ChannelNote],
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
        [_verbose_word(w, s.speaker) for s in segments for w in s.words] if request.words else UNSET,
        channels or UNSET,
    )


def _verbose_word(word: Word, speaker: str) -> _VerboseWord:
    times = round(word.start_s, 3), round(word.end_s, 3)
    return _VerboseWord(word.text, *times, round(word.probability, 3), speaker or UNSET)


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
        speaker=segment.speaker or UNSET,
    )


class _TextDelta(msgspec.Struct, tag="transcript.text.delta"):
    delta: str
    segment_id: str | UnsetType = UNSET


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
    channels: Sequence[ChannelNote] | UnsetType = UNSET


class _Failure(msgspec.Struct, omit_defaults=True):
    type: Literal["server_error", "invalid_request_error"]
    message: str
    code: str | None = None
    param: str | None = None


class _ErrorEvent(msgspec.Struct, tag="error"):
    error: _Failure


def delta_event(text: str, segment_id: str | None = None) -> str:
    """Return the server-sent event for new text. Clients append the deltas: text is never revised after it was sent.

    `segment_id`: the id of the segment whose event follows; None if no segments are sent.
    """
    return _sse(_TextDelta(text, segment_id or UNSET))


def segment_event(segment: TranscriptSegment) -> str:
    """Return the server-sent event for a complete segment and its speaker, who is not changed afterwards."""
    return _sse(_diarized_segment(segment))


def done_event(
    text: str, info: FileInfo, num_tokens: int, skipped_s: float = 0.0, channels: Sequence[ChannelNote] = ()
) -> str:
    """Return the server-sent event that ends a stream. `text`: the joined deltas. `num_tokens`: their token count.

    `skipped_s`: duration of audio in the file that could not be decoded, in seconds. `channels`: as in `body`.
    """
    audio = round(info.duration_s * AUDIO_TOKENS_PER_S)
    details = _InputTokenDetails(audio_tokens=audio, text_tokens=0)
    usage = _TokenUsage(audio, details, num_tokens, audio + num_tokens)
    return _sse(_TextDone(text, usage, skipped_seconds(skipped_s) or UNSET, channels or UNSET))


def error_event(message: str) -> str:
    """Return the event for a failure of the model that ends a stream. The status 200 was already sent."""
    return _sse(_ErrorEvent(_Failure("server_error", message)))


def file_error_event(message: str, code: str) -> str:
    """Return the event for an error in the client's file that ends a stream."""
    return _sse(_ErrorEvent(_Failure("invalid_request_error", message, code, "file")))


def _sse(event: _TextDelta | _DiarizedSegment | _TextDone | _ErrorEvent) -> str:
    return f"data: {_json(event)}\n\n"


def srt(segments: Iterable[TranscriptSegment]) -> str:
    """Format SubRip subtitles: one cue per segment, numbered from 1, with times as HH:MM:SS,mmm.

    If speakers are distinguished, a cue begins with the speaker and a colon. Returns an empty string if there are no
    segments.
    """
    return "".join(
        f"{n}\n{_clock(s.start_s, ',')} --> {_clock(s.end_s, ',')}\n{spoken(s)}\n\n" for n, s in enumerate(segments, 1)
    )


def spoken(segment: TranscriptSegment) -> str:
    """Return the text of a segment, after the speaker and a colon if speakers are distinguished."""
    text = segment.text.strip()
    return f"{segment.speaker}: {text}" if segment.speaker else text


def vtt(segments: Iterable[TranscriptSegment]) -> str:
    """Format WebVTT subtitles: one cue per segment, with times as HH:MM:SS.mmm.

    If speakers are distinguished, the text of a cue is in a voice tag, `<v A>`. Returns only the header if there are no
    segments.
    """
    cues = (f"{_clock(s.start_s, '.')} --> {_clock(s.end_s, '.')}\n{_voiced(s)}\n\n" for s in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _voiced(segment: TranscriptSegment) -> str:
    text = segment.text.strip()
    # An annotation ends at `>`, and may have entities.
    return f"<v {escape(segment.speaker, quote=False)}>{text}" if segment.speaker else text


def _clock(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3600000:02}:{ms // 60000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
