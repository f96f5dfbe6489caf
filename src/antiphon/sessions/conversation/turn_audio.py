"""The sound of a conversation's turns, for a partner that hears it. Pure: no clocks, no tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import AudioPart, ImagePart
from antiphon.events.conversation import Item
from antiphon.events.transcription import (
    SpeechStarted,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.conversation.history import IMAGE_GONE

# Of a turn so much is heard: the last of it. After its last speech it goes on for so long.
LONGEST_S, TAIL_MS = 120, 100
# A conversation's turns keep so much sound, and so many images; past it the oldest are known by their text, until the second is left.
MOST_S, LEFT_S = 600, 300
MOST_IMAGES, LEFT_IMAGES = 64, 32


@dataclass(slots=True)
class _Turn:
    """`began_ms`: its speech. `part`: its sound up to the pause that began at `speech_end_ms`."""

    began_ms: int
    speech_end_ms: int = -1
    part: AudioPart | None = None


class TurnAudio:
    """Fed with `hear` what the listener hears, before it does, and with `take` all that it tells.

    A turn that has paused, and the turn that this pause ends, are the same sound: what was begun at the pause answers it.
    """

    def __init__(self) -> None:
        self._held: deque[npt.NDArray[np.int16]] = deque()
        # Samples that have come, and those of them that are held.
        self._now = self._length = 0
        # Until they have a transcript.
        self._turns: dict[int, _Turn] = {}
        # Where the turn before ended.
        self._ended_ms = 0

    async def hear(self, pcm: Pcm) -> None:
        """More sound: float32 [num_samples], 16 kHz."""
        self._held.append(np.rint(np.clip(pcm, -1, 1) * 32767).astype(np.int16))
        self._now += len(pcm)
        self._length += len(pcm)
        while self._length - len(self._held[0]) >= LONGEST_S * SAMPLE_RATE_HZ:
            self._length -= len(self._held.popleft())

    def take(self, output: TranscriptionEvent) -> None:
        """What the listener tells."""
        match output:
            case SpeechStarted(turn, at_ms):
                self._turns[turn] = _Turn(at_ms)
            case TurnCommitted(_, _, end_ms):
                self._ended_ms = end_ms
            case TranscriptDone(turn) | TranscriptFailed(turn):
                self._turns.pop(turn, None)
            case TurnCleared():
                self._turns.clear()
                self._ended_ms = self._now * 1000 // SAMPLE_RATE_HZ

    def guess(self, turn: int, speech_end_ms: int) -> AudioPart:
        """The sound of a turn that has paused since then."""
        return self._part(turn, self._ended_ms, speech_end_ms)

    def of(self, turn: TurnCommitted) -> AudioPart:
        """The sound of a turn that has ended."""
        speech_end_ms = turn.end_ms if turn.speech_end_ms is None else turn.speech_end_ms
        return self._part(turn.turn, turn.start_ms, speech_end_ms)

    def _part(self, number: int, start_ms: int, speech_end_ms: int) -> AudioPart:
        turn = self._turns.setdefault(number, _Turn(start_ms))
        if turn.part is None or turn.speech_end_ms != speech_end_ms:
            turn.part, turn.speech_end_ms = self._cut(turn.began_ms, speech_end_ms + TAIL_MS), speech_end_ms
        return turn.part

    def _cut(self, start_ms: int, end_ms: int) -> AudioPart:
        start, end = (ms * SAMPLE_RATE_HZ // 1000 for ms in (start_ms, end_ms))
        at, parts = self._now - self._length, list[npt.NDArray[np.int16]]()
        for held in self._held:
            low, high = max(0, start - at), max(0, end - at)
            if low < len(held) and high:
                parts.append(held[low:high])
            at += len(held)
        whole = np.concatenate(parts) if parts else np.zeros(0, np.int16)
        return AudioPart(whole.astype(np.float32) / np.float32(32767))


def bound(items: Sequence[Item]) -> None:
    """Let the sound and the images of the oldest items go where there is too much."""
    media = [(p, p.media) for i in items for p in i.parts]
    sounds = [(p, len(m.pcm) / SAMPLE_RATE_HZ) for p, m in media if isinstance(m, AudioPart)]
    images = [(p, 1) for p, m in media if isinstance(m, ImagePart)]
    for parts, most, left in ((sounds, MOST_S, LEFT_S), (images, MOST_IMAGES, LEFT_IMAGES)):
        total = sum(size for _, size in parts)
        if total <= most:
            continue
        for part, size in parts:
            if total <= left:
                break
            part.media, total = None, total - size
            part.text = part.text or (IMAGE_GONE if part.kind == "input_image" else "")
