"""Decoding without a session: windows in, events and commands out. Only the tests themselves cut audio."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio

from antiphon.audio import Pcm
from antiphon.events.transcription import (
    TranscriptDelta,
    TranscriptDone,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.sessions.transcription.decoding import Decoding, WindowCommand
from antiphon.turns.windows import SpeechWindow, TurnEnded, TurnSpan, WindowEnded
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedTranscriber, speech

# Enough rounds for every decode of these tests to end.
ROUNDS = 60

Input = Callable[[Decoding], Awaitable[None] | None]
Output = TranscriptionEvent | WindowCommand
Answer = Callable[[Decoding, WindowCommand], bool]


class Tuned(ScriptedTranscriber):
    """A transcriber with a changed profile."""

    def __init__(self, **changes: float | bool) -> None:
        super().__init__()
        self._profile = replace(self._profile, **changes)  # type: ignore[arg-type]


def no_answer(_: Decoding, command: WindowCommand) -> bool:
    """Refuse the command: its window is over."""
    return False


def play(
    *inputs: Input,
    transcriber: ScriptedTranscriber | None = None,
    config: TranscriptionConfig | None = None,
    answer: Answer = no_answer,
    measured: list[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Output]:
    """Pass each input once the decodes before it are done, then end. Returns events and commands, in order."""
    out: list[Output] = []

    async def main() -> None:
        async def emit(event: TranscriptionEvent) -> None:
            out.append(event)

        def command(asked: WindowCommand) -> bool:
            out.append(asked)
            return answer(decoding, asked)

        def measure(kind: str, _: float) -> None:
            if measured is not None:
                measured.append(kind)

        decoding = Decoding(
            config or TranscriptionConfig(), transcriber or ScriptedTranscriber(), emit, command, measure, clock
        )
        async with anyio.create_task_group() as group:
            group.start_soon(decoding.run)
            for give in inputs:
                waiting = give(decoding)
                if waiting is not None:
                    await waiting
                for _ in range(ROUNDS):
                    await anyio.lowlevel.checkpoint()
            decoding.end()

    anyio.run(main)
    return out


def window(
    pcm: Pcm,
    *,
    id: int = 1,
    start: int = 0,
    after: int | None = None,
    turn: int = 0,
    spans: tuple[TurnSpan, ...] = (),
    quiet_since: int | None = None,
) -> SpeechWindow:
    """Return a window of one turn, unless it has other spans, whose speech begins with the window."""
    return SpeechWindow(id, start, after, spans or (TurnSpan(turn, start, True),), pcm, quiet_since)


def opened(shown: SpeechWindow | None, *, settling: bool = False) -> Input:
    return lambda decoding: decoding.update_window(shown, settling=settling)


def ended(over: SpeechWindow, speech_end: int | None = None) -> Input:
    return lambda decoding: decoding.add(WindowEnded(over, over.end if speech_end is None else speech_end))


def turn_ended(turn: int = 0, audio_s: float = 1.0) -> Input:
    return lambda decoding: decoding.add(TurnEnded(turn, audio_s))


def together(*inputs: Input) -> Input:
    """Join inputs between which decoding does not run."""

    def give(decoding: Decoding) -> None:
        for each in inputs:
            each(decoding)

    return give


def growing(pcm: Pcm, first: int = FRAME * 5) -> list[Input]:
    """Return the window as its speech arrives, in steps of 160 ms."""
    return [opened(window(pcm[:end])) for end in range(first, len(pcm) + 1, FRAME * 5)]


def paused(num_words: int = 3, frames: int = 2) -> SpeechWindow:
    """Return a window in a pause, by default one that is just long enough for a preflight transcript."""
    return window(speech(1, num_words, frames), quiet_since=num_words * WORD_SAMPLES)


def joined(out: list[Output], turn: int = 0) -> str:
    return "".join(o.text for o in out if isinstance(o, TranscriptDelta) and o.turn == turn)


def done(out: list[Output]) -> list[TranscriptDone]:
    return [o for o in out if isinstance(o, TranscriptDone)]
