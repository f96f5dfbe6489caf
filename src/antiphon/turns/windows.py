"""The values that a segmenter returns: windows of audio with the turns in them, and its own state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Hypothesis
from antiphon.turns.endpoint import EndpointState


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """A turn's part of a window, in samples from the session's start.

    - `start`: words from this sample on belong to this turn.
    - `first`: whether no part of the turn lies in an earlier window.
    - `end`: the end of its speech. None while the turn is open.
    - `audio_s`: seconds of the turn's audio, known when the turn has ended.
    """

    turn: int
    start: int
    first: bool
    end: int | None = None
    audio_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeechWindow:
    """A window as it was at one moment. Positions are samples from the session's start."""

    # The number of the window, counted from 1. An open window keeps its id until it is cut.
    id: int
    # The window's first sample.
    start: int
    # The id of the previous window whose audio is the context at the beginning of this one. The words of that window
    # are the prefix of this one. None: no context.
    after: int | None
    # The turns in the window, in order. There is at least one.
    spans: tuple[TurnSpan, ...]
    # Its audio, float32 [num_samples], mono, 16 kHz. Shares memory with other windows and must not be written to.
    pcm: Pcm = field(compare=False, repr=False)
    # The sample at which its current pause began; None while speech continues.
    quiet_since: int | None = None

    @property
    def end(self) -> int:
        """The sample after the window's last sample."""
        return self.start + len(self.pcm)

    @property
    def length_s(self) -> float:
        """The window's length in seconds, including the context that it begins with."""
        return len(self.pcm) / SAMPLE_RATE_HZ

    @property
    def speech_s(self) -> float:
        """Seconds from the start of the first turn to the newest speech, without context and without the current
        pause.
        """
        end = self.end if self.quiet_since is None else self.quiet_since
        return max(0, end - self.spans[0].start) / SAMPLE_RATE_HZ

    def from_sample(self, start: int) -> SpeechWindow:
        """Return the same window without its audio before `start`, which has to lie in it. Id and turns stay."""
        return replace(self, start=start, pcm=self.pcm[start - self.start :]) if start > self.start else self

    def word_turns(self, hypothesis: Hypothesis) -> list[int]:
        """Return the number of the turn of each word of a hypothesis of this window. If turns share the window, a word
        belongs to the turn at its middle. Without word times, all words belong to the window's last turn.
        """
        if len(self.spans) == 1 or len(hypothesis.words) != len(hypothesis.pieces):
            return [self.spans[-1].turn] * len(hypothesis.pieces)
        return [self._turn_at(self.start + int((w.start_s + w.end_s) / 2 * SAMPLE_RATE_HZ)) for w in hypothesis.words]

    def _turn_at(self, sample: int) -> int:
        """Return the number of the turn of a word at `sample`: the last turn that starts at or before it."""
        return next((s.turn for s in reversed(self.spans) if s.start <= sample), self.spans[0].turn)


@dataclass(frozen=True, slots=True)
class WindowEnded:
    """A window is complete. Its audio includes a margin after the speech, if such audio exists. `speech_end` is the
    sample after its last speech.
    """

    window: SpeechWindow
    speech_end: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """All windows of the turn are complete, so its transcript can be completed. `audio_s` is the length of the turn's
    audio in seconds.
    """

    turn: int
    audio_s: float


class SegmenterState(NamedTuple):
    """The state with which another segmenter continues the same audio. Positions are samples from the session's start.

    The context audio of the open window is not in it.
    """

    # The number of samples received.
    now: int
    # The sample of the last commit.
    committed: int
    # The number of the open turn, or of the next one.
    turn: int
    # The number of windows so far.
    windows: int
    # Whether a part of the open turn lies in a window.
    turn_has_window: bool
    # The sample at which the settling window ends; None if no window settles.
    settle_at: int | None
    # The first sample of the open window; None if no window is open.
    window_start: int | None
    # The turns in the open window.
    spans: tuple[TurnSpan, ...]
    # The sample at which the open window's current pause began.
    quiet_since: int | None
    # The state of the open turn.
    endpoint: EndpointState


def own_start(start: int, after: int | None, spans: Sequence[TurnSpan]) -> int:
    """Return the first sample of a window's own audio, without the context that it begins with."""
    return start if after is None else max(start, spans[0].start)
