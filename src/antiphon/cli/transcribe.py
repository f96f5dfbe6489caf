"""`antiphon transcribe`: runs a file or standard input through the session that the server runs, and
prints the words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import anyio
import anyio.to_thread
import msgspec

from antiphon.audio import Pcm
from antiphon.audio.containers import decode
from antiphon.contracts import TranscriptSegment
from antiphon.errors import MediaError, ModelError
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
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.protocols.rest.transcriptions import srt
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import Settings

# The pause that ends a turn, which becomes a line or a subtitle.
SILENCE_MS = 600
# Seconds of audio that the file's reader may be ahead of the session.
BACKLOG_S = 30.0


class OutputStyle(Enum):
    """What is printed on standard output: lines of text as turns end, or at the end one JSON document or subtitles."""

    TEXT = auto()
    JSON = auto()
    SRT = auto()


class _Word(msgspec.Struct):
    word: str
    start: float
    end: float


class _Segment(msgspec.Struct):
    """One turn. Times are in seconds."""

    start: float
    end: float
    text: str
    words: list[_Word]


class _Document(msgspec.Struct):
    """What `--json` prints. `language` is that of the first turn; None where nothing was said."""

    text: str
    language: str | None
    segments: list[_Segment]


@dataclass(slots=True)
class _TranscriptPrinter:
    """Prints partials on the terminal's last line and finished turns above it, or all of it at the end."""

    style: OutputStyle
    live: bool
    turns: list[TranscriptDone] = field(default_factory=list)
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
                    self.turns.append(output)
                    if self.style is OutputStyle.TEXT:
                        print(output.text, flush=True)
            case TranscriptFailed(_, message):
                raise ModelError(message)
            case _:
                pass

    def finish(self) -> None:
        """Print what is printed at the end of the file: the JSON document or the subtitles."""
        if self.style is OutputStyle.JSON:
            print(msgspec.json.format(msgspec.json.encode(self._document()), indent=2).decode())
        elif self.style is OutputStyle.SRT:
            print(srt(self._segments()), end="")

    def _show(self, text: str) -> None:
        print(f"\r\x1b[2K\x1b[2m{text[-100:]}\x1b[0m" if text else "\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def _span(self, turn: TranscriptDone) -> tuple[float, float]:
        if turn.words:
            return turn.words[0].start_s, turn.words[-1].end_s
        start_ms, end_ms = self.spans[turn.turn]
        return start_ms / 1000, end_ms / 1000

    def _segments(self) -> Iterator[TranscriptSegment]:
        for number, turn in enumerate(self.turns):
            start_s, end_s = self._span(turn)
            yield TranscriptSegment(number, 0, start_s, end_s, turn.text, (), 0.0, 0.0, 0.0, 0.0)

    def _document(self) -> _Document:
        segments = []
        for turn in self.turns:
            start_s, end_s = self._span(turn)
            words = [_Word(w.text, round(w.start_s, 3), round(w.end_s, 3)) for w in turn.words]
            segments.append(_Segment(round(start_s, 3), round(end_s, 3), turn.text, words))
        return _Document(" ".join(t.text for t in self.turns), self.turns[0].language if self.turns else None, segments)


async def transcribe_file(settings: Settings, file: str, language: str | None, prompt: str, style: OutputStyle) -> None:
    """Print the transcript of a file ("-": standard input) while it is read, so that a file of any length fits in
    memory. `language` None: it is detected. Raises MediaError for what is no audio, StoreError, ModelError.
    """
    chunks = decode(sys.stdin.buffer if file == "-" else file)
    first = await anyio.to_thread.run_sync(next, chunks, None)
    if first is None:
        raise MediaError("the file holds no sound")
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models), None, TRANSCRIPTION_ROLES)
    printer = _TranscriptPrinter(style, live=style is OutputStyle.TEXT and sys.stderr.isatty())
    inbox = Inbox(BACKLOG_S)
    config = TranscriptionConfig(
        language=language,
        prompt=prompt,
        vad=ServerVad(silence_duration_ms=SILENCE_MS),
        word_times=style is not OutputStyle.TEXT,
    )
    session = TranscriptionSession(config, models.required_transcriber, models.required_vad, inbox, printer.emit)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_feed, inbox, first, chunks)
            group.start_soon(session.run)
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    finally:
        models.close()
    printer.finish()


async def _feed(inbox: Inbox, first: Pcm, chunks: Iterator[Pcm]) -> None:
    pcm: Pcm | None = first
    while pcm is not None:
        await inbox.put(AppendAudio(pcm))
        pcm = await anyio.to_thread.run_sync(next, chunks, None)
    inbox.close()
