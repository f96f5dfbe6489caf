"""Turns and windows: which sound belongs to which turn, and which part of it is decoded together. Pure.

A turn is what the client sees (server VAD or its own commits). A window is what the model sees: it ends at a pause, so
that it never grows with the session, and under server VAD it lives on over a turn's end when the next turn follows at
once, so that a short endpoint does not take the model's context away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from antiphon.adapters.base import TranscriberProfile
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events import ServerVad, SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.turn.endpoint import Change, Endpointer, Paused, Resumed, Started, Stopped

# Sound kept before and after the speech of a window, where there is any.
MARGIN = SAMPLE_RATE_HZ // 5
INNER_PREFIX_MS = 300


@dataclass(slots=True)
class OpenWindow:
    """The window that speech is going into. Samples count from the session's start.

    `turn_start`: where the turn's own sound begins; it is later than `start` when the window `continues` another.
    `first`: nothing of this turn lies in an earlier window.
    """

    id: int
    turn: int
    start: int
    turn_start: int
    continues: bool
    first: bool


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


Step = SpeechStarted | SpeechStopped | TurnCommitted | WindowEnded | TurnEnded


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
        self._turn_windows = 0
        self._warm: tuple[int, int] | None = None
        self.window: OpenWindow | None = None
        self.quiet_since: int | None = None

    @property
    def now(self) -> int:
        """Samples received."""
        return self._now

    @property
    def uncommitted_ms(self) -> int:
        """Audio since the last commit."""
        return (self._now - self._committed) * 1000 // SAMPLE_RATE_HZ

    @property
    def window_s(self) -> float:
        """Length of the open window; 0 without one."""
        return (self._now - self.window.start) / SAMPLE_RATE_HZ if self.window else 0.0

    def retune(self, profile: TranscriberProfile, vad: ServerVad | None) -> list[Step]:
        """Take a changed configuration. Going between server VAD and commits ends an open window."""
        steps: list[Step] = []
        if (vad is None) != (self._vad is None):
            steps = self._end_turn() if self._vad and self._endpoint.speaking else self._end_window(self._now)
        self._profile, self._vad = profile, vad
        self._endpoint.retune(*self._endpoint_settings())
        return steps

    def feed(self, pcm: Pcm, probabilities: list[float]) -> list[Step]:
        """Sound, and the probabilities of the frames it completed. pcm: float32 [num_samples], 16 kHz."""
        self._tape = np.concatenate((self._tape, pcm))
        self._now += len(pcm)
        steps: list[Step] = []
        for probability in probabilities:
            self._judged += self._frame
            for change in self._endpoint.feed(probability, self._frame):
                steps += self._apply(change)
        self._forget()
        return steps

    def commit(self) -> list[Step]:
        """The client ends the turn here."""
        return self._end_turn()

    def clear(self) -> None:
        """Drop what was not committed; an open turn ends without a trace."""
        self._endpoint.flush()
        self.window, self.quiet_since, self._warm = None, None, None
        self._committed = self._now
        self._turn_windows = 0
        self._forget()

    def sound(self, start: int, end: int | None = None) -> Pcm:
        """A copy of the tape between two samples (to now without an end)."""
        stop = self._now if end is None else min(end, self._now)
        return self._tape[start - self._tape_start : stop - self._tape_start].copy()

    def cut(self, sample: int) -> None:
        """The open window's sound before `sample` has been decoded for good: it goes on from there."""
        assert self.window is not None
        self.window = self._open(sample, self.window.turn, sample, False)
        self._forget()

    def _endpoint_settings(self) -> tuple[float, int, int]:
        pause_ms = round(self._profile.pause_s * 1000)
        if self._vad is None:
            return (0.5, INNER_PREFIX_MS, pause_ms)
        return (self._vad.threshold, self._vad.prefix_padding_ms, self._vad.silence_duration_ms)

    def _apply(self, change: Change) -> list[Step]:
        match change:
            case Started(sample):
                return self._started(max(sample, self._committed, self._tape_start))
            case Paused(sample):
                self.quiet_since = sample
                return []
            case Resumed(sample):
                return self._resumed(sample)
            case Stopped(sample, speech_end):
                return self._stopped(sample, speech_end)

    def _started(self, sample: int) -> list[Step]:
        self.quiet_since = None
        start, continues = sample, False
        if self._vad and self._warm:
            warm_start, warm_end = self._warm
            near = sample - warm_end < self._profile.pause_s * SAMPLE_RATE_HZ
            if near and sample - warm_start < self._profile.long_s * SAMPLE_RATE_HZ:
                start, continues = warm_start, True
        self._warm = None
        self.window = self._open(start, self._turn, sample, continues)
        return [SpeechStarted(self._turn, _ms(sample))] if self._vad else []

    def _resumed(self, sample: int) -> list[Step]:
        quiet, self.quiet_since = self.quiet_since, None
        if self.window is None or quiet is None:
            return []
        paused = sample - quiet >= self._profile.long_pause_s * SAMPLE_RATE_HZ
        if not paused or quiet - self.window.start < self._profile.long_s * SAMPLE_RATE_HZ:
            return []
        turn = self.window.turn
        steps = self._end_window(quiet)
        begin = max(quiet + MARGIN // 2, sample - MARGIN)
        self.window = self._open(begin, turn, begin, False)
        return steps

    def _stopped(self, sample: int, speech_end: int) -> list[Step]:
        if self._vad is None:
            return self._end_window(speech_end)
        return [SpeechStopped(self._turn, _ms(sample)), *self._close_turn(speech_end, sample)]

    def _end_turn(self) -> list[Step]:
        speech_end = self.quiet_since if self.quiet_since is not None else self._now
        stopped: list[Step] = []
        if self._endpoint.flush() and self._vad:
            stopped = [SpeechStopped(self._turn, _ms(self._now))]
        return stopped + self._close_turn(speech_end, self._now)

    def _close_turn(self, speech_end: int, end: int) -> list[Step]:
        # Under server VAD a turn begins with its speech; what the client commits begins at its last commit.
        begin = self.window.turn_start if self._vad and self.window and self.window.first else self._committed
        window = self.window
        steps = self._end_window(speech_end)
        if self._vad and window:
            self._warm = (window.start, speech_end)
        audio_s = (end - begin) / SAMPLE_RATE_HZ
        out: list[Step] = [TurnCommitted(self._turn, _ms(begin), _ms(end)), *steps, TurnEnded(self._turn, audio_s)]
        self._turn += 1
        self._turn_windows = 0
        self._committed = end
        return out

    def _end_window(self, speech_end: int) -> list[Step]:
        window, self.window, self.quiet_since = self.window, None, None
        if window is None:
            return []
        pcm = self.sound(window.start, max(speech_end, window.turn_start) + MARGIN)
        return [WindowEnded(window, pcm, speech_end)]

    def _open(self, start: int, turn: int, turn_start: int, continues: bool) -> OpenWindow:
        self._windows += 1
        self._turn_windows += 1
        return OpenWindow(self._windows, turn, start, turn_start, continues, self._turn_windows == 1)

    def _forget(self) -> None:
        """Drop sound that no window can want any more."""
        prefix_ms = self._vad.prefix_padding_ms if self._vad else INNER_PREFIX_MS
        keep = self._judged - prefix_ms * SAMPLE_RATE_HZ // 1000 - 4 * self._frame
        if self._warm and self._judged - self._warm[1] >= self._profile.pause_s * SAMPLE_RATE_HZ:
            self._warm = None
        if self._warm:
            keep = min(keep, self._warm[0])
        if self.window:
            keep = min(keep, self.window.start)
        drop = max(0, keep) - self._tape_start
        # Moving the tape for every frame would cost more than keeping a second of it.
        if drop >= SAMPLE_RATE_HZ:
            self._tape = self._tape[drop:].copy()
            self._tape_start += drop


def _ms(sample: int) -> int:
    return sample * 1000 // SAMPLE_RATE_HZ
