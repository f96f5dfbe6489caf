"""Turns and windows: which sound belongs to which turn, and which part of it is decoded together. Pure.

A turn is what the client sees (server VAD or its own commits). A window is what the model sees. A window ends when speech
has paused for `settle_s`, whatever silence ends a turn: turns that follow each other more closely share a window, so that
a short endpoint does not tear the model's context apart. A window that begins soon after another has the other's sound before
its own. No window grows with the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Hypothesis, TranscriberProfile
from antiphon.events.transcription import ServerVad, SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.turns.endpoint import EndpointChange, Endpointer, SpeechBegan, SpeechEnded, SpeechPaused, SpeechResumed

# Sound kept before and after the speech of a window, where there is any.
MARGIN_SAMPLES = SAMPLE_RATE_HZ // 5
INNER_PREFIX_MS = 300


@dataclass(slots=True)
class TurnSpan:
    """A turn's part of a window. `start`: from here on words are its own. `end`: None while the turn is open.

    `first`: nothing of the turn lies in an earlier window.
    """

    turn: int
    start: int
    first: bool
    end: int | None = None
    audio_s: float = 0.0


@dataclass(slots=True)
class OpenWindow:
    """The window that speech is going into. Samples count from the session's start; spans are in order.

    `after`: the settled window whose sound this one begins with, as context; its words are the new window's prefix.
    """

    id: int
    start: int
    after: int | None = None
    spans: list[TurnSpan] = field(default_factory=list)
    # The client threw it away.
    dropped: bool = False

    def turn_at(self, sample: int) -> int:
        """The turn that what is said at `sample` belongs to."""
        return next((s.turn for s in reversed(self.spans) if s.start <= sample), self.spans[0].turn)


@dataclass(frozen=True, slots=True)
class WindowEnded:
    """A window is complete. pcm: its sound; `speech_end` the sample after its last speech."""

    window: OpenWindow
    pcm: Pcm
    speech_end: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The turn has no more windows."""

    turn: int
    audio_s: float


SegmenterEvent = SpeechStarted | SpeechStopped | TurnCommitted | WindowEnded | TurnEnded


class Segmenter:
    """Feed sound with its frame probabilities; what changed comes back in order. `vad` None: the client commits."""

    def __init__(self, profile: TranscriberProfile, vad: ServerVad | None, frame_samples: int) -> None:
        self._profile = profile
        self._frame = frame_samples
        self._vad = vad
        self._endpoint = Endpointer(*self._endpoint_settings())
        self._tape = np.zeros(0, np.float32)
        self._tape_start = 0
        self._now = 0
        self._judged = 0
        self._committed = 0
        self._turn = 0
        self._windows = 0
        self._turn_has_window = False
        self._settle_at: int | None = None
        # (id, start, end of speech) of the window that ended last, while it can be context.
        self._warm: tuple[int, int, int] | None = None
        self.window: OpenWindow | None = None
        self.quiet_since: int | None = None

    @property
    def now(self) -> int:
        """Samples received."""
        return self._now

    @property
    def turn(self) -> int:
        """The number of the turn that is open, or that comes next."""
        return self._turn

    @property
    def uncommitted_ms(self) -> int:
        """Audio since the last commit."""
        return (self._now - self._committed) * 1000 // SAMPLE_RATE_HZ

    @property
    def window_s(self) -> float:
        """Length of the open window; 0 without one."""
        return (self._now - self.window.start) / SAMPLE_RATE_HZ if self.window else 0.0

    def apply(self, profile: TranscriberProfile, vad: ServerVad | None) -> list[SegmenterEvent]:
        """Take a changed configuration. Going between server VAD and commits ends an open window."""
        steps: list[SegmenterEvent] = []
        if (vad is None) != (self._vad is None):
            steps = self._end_turn() if self._vad and self._endpoint.speaking else self._end_window()
        self._profile, self._vad = profile, vad
        self._endpoint.apply(*self._endpoint_settings())
        return steps

    def feed(self, pcm: Pcm, probabilities: list[float]) -> list[SegmenterEvent]:
        """Sound, and the probabilities of the frames it completed. pcm: float32 [num_samples], 16 kHz."""
        self._tape = np.concatenate((self._tape, pcm))
        self._now += len(pcm)
        steps: list[SegmenterEvent] = []
        for probability in probabilities:
            self._judged += self._frame
            for change in self._endpoint.feed(probability, self._frame):
                steps += self._apply(change)
            if self._settle_at is not None and self._judged >= self._settle_at:
                steps += self._end_window()
        self._forget()
        return steps

    @property
    def settling(self) -> bool:
        """A turn has ended, and its window waits for the silence that settles it."""
        return self._settle_at is not None

    def settle(self) -> list[SegmenterEvent]:
        """No more sound comes for now: that is silence too."""
        return self._end_window() if self.settling else []

    def hasten(self) -> None:
        """What was said is complete: the pause that has begun ends the turn after its shorter silence."""
        if self._vad:
            self._endpoint.hasten(self._vad.silence_duration_ms)

    def linger(self) -> None:
        """What was said is not complete after all."""
        self._endpoint.linger()

    def commit(self) -> list[SegmenterEvent]:
        """The client ends the turn here."""
        return self._end_turn()

    def clear(self) -> list[SegmenterEvent]:
        """Drop what was not committed; an open turn ends without a trace. A committed turn whose window waits to settle is done."""
        steps: list[SegmenterEvent] = []
        if self.window and (closed := [s for s in self.window.spans if s.end is not None]):
            end = closed[-1].end or 0
            self.window.spans = closed
            steps.append(WindowEnded(self.window, self.audio(self.window.start, end + MARGIN_SAMPLES), end))
            steps += [TurnEnded(s.turn, s.audio_s) for s in closed]
        self._endpoint.flush()
        self.window, self.quiet_since, self._settle_at, self._warm = None, None, None, None
        self._committed = self._now
        self._turn_has_window = False
        self._forget()
        return steps

    def audio(self, start: int, end: int | None = None) -> Pcm:
        """A copy of the tape between two samples (to now without an end)."""
        stop = self._now if end is None else min(end, self._now)
        return self._tape[start - self._tape_start : stop - self._tape_start].copy()

    def cut(self, sample: int) -> None:
        """The open window's sound before `sample` has been decoded for good: it goes on from there as another."""
        assert self.window is not None
        self._windows += 1
        spans = [TurnSpan(s.turn, s.start, False, s.end, s.audio_s) for s in self.window.spans]
        self.window = OpenWindow(self._windows, sample, None, spans)
        self._forget()

    def _endpoint_settings(self) -> tuple[float, int, int]:
        pause_ms = round(self._profile.pause_s * 1000)
        if self._vad is None:
            return (0.5, INNER_PREFIX_MS, pause_ms)
        silence_ms = self._vad.patience_ms or self._vad.silence_duration_ms
        return (self._vad.threshold, self._vad.prefix_padding_ms, silence_ms)

    def _apply(self, change: EndpointChange) -> list[SegmenterEvent]:
        match change:
            case SpeechBegan(sample):
                return self._started(max(sample, self._committed, self._tape_start))
            case SpeechPaused(sample):
                self.quiet_since = sample
                return []
            case SpeechResumed(sample):
                return self._resumed(sample)
            case SpeechEnded(sample, speech_end):
                return self._stopped(sample, speech_end)

    def _started(self, sample: int) -> list[SegmenterEvent]:
        self._settle_at, steps = None, list[SegmenterEvent]()
        if self.window and self.window_s >= self._profile.long_window_s:
            steps += self._end_window()
        self.quiet_since = None
        if self.window:
            last = self.window.spans[-1]
            between = sample if last.end is None else (last.end + sample) // 2
            self.window.spans.append(TurnSpan(self._turn, between, True))
        else:
            self._open(sample)
        return [*steps, SpeechStarted(self._turn, _ms(sample))] if self._vad else steps

    def _resumed(self, sample: int) -> list[SegmenterEvent]:
        quiet = self.quiet_since
        if self.window is None or quiet is None:
            return []
        long = quiet - self.window.start >= self._profile.long_window_s * SAMPLE_RATE_HZ
        if not long or sample - quiet < self._profile.long_pause_s * SAMPLE_RATE_HZ:
            self.quiet_since = None
            return []
        steps = self._end_window()
        self._open(max(quiet + MARGIN_SAMPLES // 2, sample - MARGIN_SAMPLES))
        return steps

    def _stopped(self, sample: int, speech_end: int) -> list[SegmenterEvent]:
        if self._vad is None:
            return self._end_window()
        steps = [SpeechStopped(self._turn, _ms(sample)), *self._close_turn(sample)]
        self._settle_at = speech_end + int(self._profile.settle_s * SAMPLE_RATE_HZ)
        return steps

    def _end_turn(self) -> list[SegmenterEvent]:
        steps: list[SegmenterEvent] = []
        if self._vad and self.window and not self._endpoint.speaking:
            # Its turns were committed before and wait for the silence that settles them: not any more.
            steps += self._end_window()
        if self._endpoint.flush() and self._vad:
            steps.append(SpeechStopped(self._turn, _ms(self._now)))
        had_window = self.window is not None
        turn, begin = self._turn, self._committed
        steps += self._close_turn(self._now)
        steps += self._end_window() if had_window else [TurnEnded(turn, (self._now - begin) / SAMPLE_RATE_HZ)]
        return steps

    def _close_turn(self, end: int) -> list[SegmenterEvent]:
        begin = self._committed
        if self.window:
            span = self.window.spans[-1]
            # Under server VAD a turn begins with its speech; what the client commits begins at its last commit.
            begin = span.start if self._vad and span.first else begin
            span.end = self.quiet_since if self.quiet_since is not None else end
            span.audio_s = (end - begin) / SAMPLE_RATE_HZ
        quiet = None if self.quiet_since is None else _ms(self.quiet_since)
        committed = TurnCommitted(self._turn, _ms(begin), _ms(end), quiet)
        self._turn += 1
        self._turn_has_window = False
        self._committed = end
        return [committed]

    def _end_window(self) -> list[SegmenterEvent]:
        window, quiet = self.window, self.quiet_since
        self.window, self.quiet_since, self._settle_at = None, None, None
        if window is None:
            return []
        speech_end = self._now if quiet is None else quiet
        self._warm = (window.id, window.start, speech_end)
        ended = WindowEnded(window, self.audio(window.start, speech_end + MARGIN_SAMPLES), speech_end)
        return [ended, *(TurnEnded(s.turn, s.audio_s) for s in window.spans if s.end is not None)]

    def _open(self, start: int) -> None:
        self._windows += 1
        begin, after = start, None
        if self._warm:
            warm, warm_start, warm_end = self._warm
            soon = start - warm_end < self._profile.context_pause_s * SAMPLE_RATE_HZ
            if soon and start - warm_start < self._profile.long_window_s * SAMPLE_RATE_HZ:
                begin, after = warm_start, warm
        self._warm = None
        span = TurnSpan(self._turn, start, not self._turn_has_window)
        self.window = OpenWindow(self._windows, begin, after, [span])
        self._turn_has_window = True

    def _forget(self) -> None:
        """Drop sound that no window can want any more."""
        prefix_ms = self._vad.prefix_padding_ms if self._vad else INNER_PREFIX_MS
        keep = self._judged - prefix_ms * SAMPLE_RATE_HZ // 1000 - 4 * self._frame
        if self._warm and self._judged - self._warm[2] >= self._profile.context_pause_s * SAMPLE_RATE_HZ:
            self._warm = None
        if self._warm:
            keep = min(keep, self._warm[1])
        if self.window:
            keep = min(keep, self.window.start)
        drop = max(0, keep) - self._tape_start
        # Moving the tape for every frame would cost more than keeping a second of it.
        if drop >= SAMPLE_RATE_HZ:
            self._tape = self._tape[drop:].copy()
            self._tape_start += drop


def _ms(sample: int) -> int:
    return sample * 1000 // SAMPLE_RATE_HZ


def word_turns(window: OpenWindow, hypothesis: Hypothesis) -> list[int]:
    """The turn of each piece: by the middle of its word where turns share the window."""
    if len(window.spans) == 1 or len(hypothesis.words) != len(hypothesis.pieces):
        return [window.spans[-1].turn] * len(hypothesis.pieces)
    return [window.turn_at(window.start + int((w.start_s + w.end_s) / 2 * SAMPLE_RATE_HZ)) for w in hypothesis.words]
