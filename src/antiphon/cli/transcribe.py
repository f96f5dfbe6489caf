"""`antiphon transcribe`: prints the transcript of a file, of standard input, or of a stream at a URL.

A file is transcribed as the server transcribes a posted file: each word is decoded with the audio that follows it. A
stream is transcribed as the server transcribes live speech.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from antiphon.audio import Pcm
from antiphon.audio.containers import OneChannel, SkippedAudio, decode, decode_in_slabs
from antiphon.contracts import FileOptions, TranscriptSegment
from antiphon.errors import MediaError, ModelError, SettingsError
from antiphon.events.transcription import (
    AppendAudio,
    ServerVad,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import SPEAKER_ROLES, TRANSCRIPTION_ROLES
from antiphon.protocols.rest.transcriptions import joined, skipped_seconds, spoken, srt
from antiphon.roles import ModelRole
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.file_channels import (
    CHANNEL_PAUSE_S,
    Parts,
    channels_to_hear,
    in_order,
    surveyed,
)
from antiphon.sessions.transcription.file_speakers import FileVoices
from antiphon.sessions.transcription.file_speech import MAX_PAUSE_S, segments_by_words, transcribe_speech
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import Settings
from antiphon.turns.voices.speakers import SpeakerHints

# The speaker encoder of `--speakers` if `--speaker-model` names none.
DEFAULT_SPEAKER_MODEL = "resemblyzer"
# The length of a pause that ends a turn of a stream, in milliseconds. Each turn becomes a line or a subtitle.
SILENCE_MS = 600
# The length of the pieces in which a file is read, in seconds: 2 MB each, the same as in the server.
SLAB_S = 30.0
# The most audio that the reader may be ahead of the session, in seconds.
BACKLOG_S = 30.0


class OutputStyle(Enum):
    """The output format: a line of text when each turn ends, or, at the end, one JSON document or subtitles."""

    TEXT = auto()
    JSON = auto()
    SRT = auto()


@dataclass(frozen=True, slots=True)
class TranscriptRequest:
    """What to transcribe, and how to print it."""

    # The path or URL of a recording; "-" for standard input.
    file: str
    # The language as ISO 639-1; None: it is detected.
    language: str | None
    # Names and words to expect.
    prompt: str
    # The output format.
    style: OutputStyle
    # Whether speakers are distinguished by voice.
    speakers: bool = False
    # What becomes of the channels: they are mixed, each is a speaker, or as their sound suggests.
    channels: Literal["mix", "separate", "auto"] = "mix"

    @property
    def arrives(self) -> bool:
        """Whether the input is a stream: standard input, a URL, a pipe or a device."""
        path = Path(self.file)
        return self.file == "-" or "://" in self.file or (path.exists() and not path.is_file() and not path.is_dir())

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """The models that are needed."""
        return TRANSCRIPTION_ROLES + (SPEAKER_ROLES if self.speakers else ())


class _Word(msgspec.Struct):
    word: str
    start: float
    end: float


class _Segment(msgspec.Struct, omit_defaults=True):
    """One turn. Times are in seconds. `speaker` is missing if speakers are not distinguished."""

    start: float
    end: float
    text: str
    words: list[_Word]
    speaker: str = ""


class _Document(msgspec.Struct):
    """The output of `--json`. `language` is the language of the first turn; None if there is no speech."""

    text: str
    language: str | None
    segments: list[_Segment]


@dataclass(slots=True)
class _TranscriptPrinter:
    """Prints partials on the terminal's last line and finished segments above it, or everything at the end."""

    # The output format.
    style: OutputStyle
    # Whether partials are shown on standard error.
    live: bool
    # The language of the first turn with words; None before that.
    language: str | None = None
    # The finished segments.
    segments: list[TranscriptSegment] = field(default_factory=list)
    # The start and end of each turn, in milliseconds, by its number.
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    _line: str = ""

    async def emit(self, output: TranscriptionEvent) -> None:
        match output:
            case TranscriptDelta(_, text) if self.live:
                self._line += text
                self._show(self._line)
            case TurnCommitted(turn, start_ms, end_ms):
                self.spans[turn] = (start_ms, end_ms)
            case TranscriptDone():
                self._line = ""
                if self.live:
                    self._show("")
                if output.text:
                    self.language = self.language or output.language
                    self.add(self._segment(output))
            case TranscriptFailed(_, message):
                raise ModelError(message)
            case _:
                pass

    def add(self, segment: TranscriptSegment) -> None:
        """Add the next segment. With the style TEXT, print it."""
        self.segments.append(segment)
        if self.style is OutputStyle.TEXT and segment.text.strip():
            print(spoken(segment), flush=True)

    def finish(self) -> None:
        """Print the JSON document or the subtitles at the end of the audio."""
        if self.style is OutputStyle.JSON:
            print(msgspec.json.format(msgspec.json.encode(self._document()), indent=2).decode())
        elif self.style is OutputStyle.SRT:
            print(srt(self.segments), end="")

    def _show(self, text: str) -> None:
        print(f"\r\x1b[2K\x1b[2m{text[-100:]}\x1b[0m" if text else "\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def _segment(self, turn: TranscriptDone) -> TranscriptSegment:
        start_ms, end_ms = self.spans[turn.turn]
        start_s, end_s = start_ms / 1000, end_ms / 1000
        if turn.words:
            start_s, end_s = turn.words[0].start_s, turn.words[-1].end_s
        text = f" {turn.text}" if self.segments else turn.text
        return TranscriptSegment(
            len(self.segments), 0, start_s, end_s, text, (), 0.0, 0.0, 0.0, 0.0, words=tuple(turn.words)
        )

    def _document(self) -> _Document:
        segments = []
        for segment in self.segments:
            words = [_Word(w.text, round(w.start_s, 3), round(w.end_s, 3)) for w in segment.words]
            span = round(segment.start_s, 3), round(segment.end_s, 3)
            segments.append(_Segment(*span, segment.text.strip(), words, segment.speaker))
        return _Document(joined(self.segments), self.language if segments else None, segments)


def check_source(request: TranscriptRequest) -> None:
    """Check that a file can be decoded, by its beginning. Does not read a stream. Blocks.

    Raises MediaError, and SettingsError if a stream cannot be transcribed this way.
    """
    if not request.arrives:
        with closing(decode(request.file)) as chunks:
            next(chunks, None)
    elif request.speakers or request.channels != "mix":
        raise SettingsError("--speakers and --channels need a file: in a stream, speakers are not distinguished")


async def transcribe_file(settings: Settings, request: TranscriptRequest) -> None:
    """Print the transcript of a file or stream while reading it, so that any length fits in memory.

    Speakers by voice are known at the end of the file, and so is what they say. Raises MediaError for input without
    audio, SettingsError for a language that the model does not know, StoreError, ModelError.
    """
    arrives, file, language = request.arrives, request.file, request.language
    chunks: Iterator[Pcm] = decode(sys.stdin.buffer if file == "-" else file) if arrives else iter(())
    first = await anyio.to_thread.run_sync(next, chunks, None)
    if arrives and first is None:
        raise MediaError("the file holds no sound")
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models), None, request.roles)
    try:
        if language and language not in models.required_transcriber.profile.languages:
            raise SettingsError(f"--language: this model does not know the language '{language}'.")
        is_live = arrives and request.style is OutputStyle.TEXT and sys.stderr.isatty()
        printer = _TranscriptPrinter(request.style, live=is_live)
        if first is not None:
            await _transcribe_live(models, first, chunks, language, request.prompt, printer)
        else:
            await _transcribe_whole(models, request, printer)
    finally:
        models.close()
    printer.finish()


async def _transcribe_whole(models: LoadedModels, request: TranscriptRequest, printer: _TranscriptPrinter) -> None:
    """Transcribe a file as the server transcribes a posted one, with the same text."""
    has_speakers = request.speakers or request.channels != "mix"
    timed = printer.style is not OutputStyle.TEXT or has_speakers
    options = FileOptions(request.language, request.prompt, word_times=timed)
    skipped = SkippedAudio()
    heard = None
    if request.channels != "mix":
        facts = await surveyed(request.file, anyio.to_thread.run_sync)
        heard = channels_to_hear(facts, request.channels, ())
    voices = None
    if request.speakers and heard is None:
        model = models.speaker_model
        clustering = model.profile.clustering if model else None
        if model is None or clustering is None:
            raise SettingsError("--speakers: the speaker model does not find the speakers of a file")
        voices = FileVoices(model, clustering, SpeakerHints())

    def parts_of(slabs: AsyncGenerator[Pcm, None], max_pause_s: float) -> Parts:
        listener = voices.hear if voices else None
        parts = transcribe_speech(models.required_transcriber, models.required_vad, slabs, options, listener=listener)
        return segments_by_words(parts, max_pause_s)

    async with AsyncExitStack() as stack:

        async def opened(channel: OneChannel | None, skipped: SkippedAudio) -> AsyncGenerator[Pcm, None]:
            return await stack.enter_async_context(aclosing(_slabs(request.file, skipped, channel)))

        if heard is None:
            parts = parts_of(await opened(None, skipped), MAX_PAUSE_S)
        else:
            made: dict[str, Parts] = {}
            for channel, name in heard.items():
                own = await opened(OneChannel(channel, facts), SkippedAudio() if made else skipped)
                made[name] = parts_of(own, CHANNEL_PAUSE_S)
            parts = in_order(made)
        segments = list[TranscriptSegment]()
        async for part in parts:
            if not isinstance(part, TranscriptSegment):
                printer.language = part.language
            elif voices:
                segments.append(part)
            else:
                printer.add(part)
        for segment in await voices.labelled(segments) if voices else ():
            printer.add(segment)
    if seconds := skipped_seconds(skipped.seconds):
        print(f"antiphon: {request.file}: {seconds} s are damaged and were left out", file=sys.stderr)


async def _slabs(file: str, skipped: SkippedAudio, channel: OneChannel | None) -> AsyncGenerator[Pcm, None]:
    with closing(decode_in_slabs(file, SLAB_S, skipped, channel)) as slabs:
        while (slab := await anyio.to_thread.run_sync(next, slabs, None)) is not None:
            yield slab


async def _transcribe_live(
    models: LoadedModels,
    first: Pcm,
    chunks: Iterator[Pcm],
    language: str | None,
    prompt: str,
    printer: _TranscriptPrinter,
) -> None:
    """Transcribe a stream as a live session does: each turn becomes a segment."""
    inbox = Inbox(BACKLOG_S)
    config = TranscriptionConfig(
        language=language,
        prompt=prompt,
        vad=ServerVad(silence_duration_ms=SILENCE_MS),
        word_times=printer.style is not OutputStyle.TEXT,
    )
    session = TranscriptionSession(config, models.required_transcriber, models.required_vad, inbox, printer.emit)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_feed, inbox, first, chunks)
            group.start_soon(session.run)
    except ExceptionGroup as group_error:
        failure: Exception = group_error
        while isinstance(failure, ExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None


async def _feed(inbox: Inbox, first: Pcm, chunks: Iterator[Pcm]) -> None:
    pcm: Pcm | None = first
    while pcm is not None:
        await inbox.put(AppendAudio(pcm))
        pcm = await anyio.to_thread.run_sync(next, chunks, None)
    inbox.close()
