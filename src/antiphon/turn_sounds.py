"""The sound of a conversation's turns, for a partner that hears it. Pure: no clocks, no tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from antiphon.adapters.base import SoundPart
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events import GuessDropped, Output, SpeechStarted, TranscriptGuess, TurnCleared, TurnCommitted
from antiphon.talk_events import Item

# Of a turn so much is heard: the last of it.
LONGEST_S = 120
# A conversation's turns keep so much sound; past it the oldest are known by their transcripts, until the second is left.
MOST_S, LEFT_S = 600, 300


class TurnSounds:
    """Fed with `hear` what the listener hears, before it does, and with `take` all that it tells."""

    def __init__(self) -> None:
        self._held: list[npt.NDArray[np.int16]] = []
        # Samples that have come, and those of them that are held.
        self._now = self._length = 0
        self._began: dict[int, int] = {}
        # What would be a turn's sound if the pause that has begun ended it.
        self._guesses: dict[int, SoundPart] = {}

    async def hear(self, pcm: Pcm) -> None:
        """More sound: float32 [num_samples], 16 kHz."""
        self._held.append(np.rint(pcm * 32767).astype(np.int16))
        self._now += len(pcm)
        self._length += len(pcm)
        while self._length - len(self._held[0]) >= LONGEST_S * SAMPLE_RATE_HZ:
            self._length -= len(self._held.pop(0))

    def take(self, output: Output) -> None:
        """What the listener tells."""
        match output:
            case SpeechStarted(turn, at_ms):
                self._began[turn] = at_ms
            case TranscriptGuess(turn):
                self._guesses[turn] = self._cut(self._began.get(turn, 0), self._now * 1000 // SAMPLE_RATE_HZ)
            case GuessDropped(turn):
                self._guesses.pop(turn, None)
            case TurnCleared():
                self._guesses.clear()

    def guess(self, turn: int) -> SoundPart | None:
        """The sound of a turn that has paused."""
        return self._guesses.get(turn)

    def of(self, turn: TurnCommitted) -> SoundPart:
        """The sound of a turn that has ended: that of its guess, where the guess held."""
        self._began.pop(turn.turn, None)
        return self._guesses.pop(turn.turn, None) or self._cut(turn.start_ms, turn.end_ms)

    def _cut(self, start_ms: int, end_ms: int) -> SoundPart:
        first = self._now - self._length
        start, end = (max(0, ms * SAMPLE_RATE_HZ // 1000 - first) for ms in (start_ms, end_ms))
        whole = np.concatenate(self._held) if self._held else np.zeros(0, np.int16)
        return SoundPart(whole[start:end].astype(np.float32) / np.float32(32767))


def bound(items: Sequence[Item]) -> None:
    """Let the sound of the oldest turns go where there is too much."""
    sounds = [(p, p.media) for i in items for p in i.parts if isinstance(p.media, SoundPart)]
    total = sum(len(media.pcm) for _, media in sounds)
    if total > MOST_S * SAMPLE_RATE_HZ:
        for part, media in sounds:
            if total <= LEFT_S * SAMPLE_RATE_HZ:
                return
            part.media = None
            total -= len(media.pcm)
