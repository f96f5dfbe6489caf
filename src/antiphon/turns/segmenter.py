"""Divides audio into turns, which the client gets, and windows, which the model decodes. Pure.

Server VAD or the client's commits end a turn. A window ends when speech has paused for `settle_s`, which may be longer
than the silence that ends a turn. Turns with a shorter pause between them share a window, so that a short endpointing
silence does not split the model's context. A window that begins shortly after another one starts with the audio of that
window. No window grows with the session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import TranscriberProfile
from antiphon.events.transcription import ServerVad, SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.turns.end_of_turn import SpeakerPauses
from antiphon.turns.endpoint import (
    MAX_BACKDATED,
    EndpointChange,
    Endpointer,
    SpeechBegan,
    SpeechEnded,
    SpeechPaused,
    SpeechResumed,
)
from antiphon.turns.windows import SegmenterState, SpeechWindow, TurnEnded, TurnSpan, WindowEnded, own_start

# Samples of audio that are kept before and after the speech of a window, if there are any.
MARGIN_SAMPLES = SAMPLE_RATE_HZ // 5
INNER_PREFIX_MS = 300


SegmenterEvent = SpeechStarted | SpeechStopped | TurnCommitted | WindowEnded | TurnEnded


@dataclass(slots=True)
class _OpenWindow:
    """The window that new speech belongs to. SpeechWindow explains the fields."""

    id: int
    start: int
    after: int | None
    spans: list[TurnSpan]


class Segmenter:
    """Cuts one session's audio into turns and windows. If `vad` is None, the client's commits end the turns.

    Only the session's listening task, which owns the segmenter, may change it. The windows that it returns are values.
    It keeps the audio that a window may still need: at most one window and one more second.

    `start` is the number of the session's samples that came before its first one, if another segmenter got them.
    """

    def __init__(
        self, profile: TranscriberProfile, vad: ServerVad | None, frame_samples: int, *, start: int = 0
    ) -> None:
        self._profile = profile
        self._frame = frame_samples
        self._vad = vad
        self._endpoint = Endpointer(*self._endpoint_settings())
        # Maximum number of samples by which a turn begins before its speech.
        self.prefix_samples = _prefix_samples(vad)
        # Windows share the memory of the tape, so only samples after `_now` are ever written.
        self._tape = np.zeros(SAMPLE_RATE_HZ, np.float32)
        self._tape_start = self._now = self._committed = start
        # Frames begin at the same samples as if the session had begun here.
        self._judged = start - start % frame_samples
        self._turn = 0
        self._windows = 0
        self._turn_has_window = False
        self._settle_at: int | None = None
        # The id, the start and the end of speech of the last window, while it can be the context of the next.
        self._warm: tuple[int, int, int] | None = None
        self._window: _OpenWindow | None = None
        self._quiet_since: int | None = None
        # The pauses inside turns so far.
        self.speaker_pauses = SpeakerPauses()

    def state(self) -> SegmenterState:
        """Return the state for another segmenter."""
        window = self._window
        return SegmenterState(
            self._now,
            self._committed,
            self._turn,
            self._windows,
            self._turn_has_window,
            self._settle_at,
            None if window is None else own_start(window.start, window.after, window.spans),
            tuple(window.spans) if window else (),
            self._quiet_since,
            self._endpoint.state(),
        )

    def hear_again(self, pcm: Pcm, num_frames: int) -> None:
        """Record audio that another segmenter has divided: float32 [num_samples], with the frames that it completed."""
        self._record(pcm)
        self._judged += num_frames * self._frame

    def restore(self, state: SegmenterState) -> None:
        """Continue from another segmenter's state, after `hear_again` got the audio up to `state.now`."""
        self._committed, self._turn, self._windows = state.committed, state.turn, state.windows
        self._turn_has_window, self._settle_at = state.turn_has_window, state.settle_at
        self._quiet_since = state.quiet_since
        if state.window_start is not None:
            self._window = _OpenWindow(state.windows, state.window_start, None, list(state.spans))
        self._endpoint.restore(state.endpoint, self._judged)

    def heard(self, start: int, end: int) -> Pcm:
        """Return a part of the kept audio, between two samples: float32 [num_samples]."""
        return self._tape[max(0, start - self._tape_start) : min(end, self._now) - self._tape_start]

    @property
    def next_turn_from(self) -> int:
        """The first sample at which a turn may begin that is not open yet."""
        return max(self._committed if self._vad else 0, self._next_turn_from)

    @property
    def now(self) -> int:
        """The number of samples received since the session's start. It is the session's clock."""
        return self._now

    @property
    def num_held(self) -> int:
        """The number of samples kept, from the first that may still be decoded. Bounded by the longest window."""
        return self._now - self._tape_start

    @property
    def num_bytes(self) -> int:
        """Memory of the kept audio in bytes, including reserved space."""
        return self._tape.nbytes

    @property
    def turn(self) -> int:
        """The number of the open turn, or of the next one if none is open. Turns are numbered from 0."""
        return self._turn

    @property
    def uncommitted_ms(self) -> int:
        """Milliseconds of audio since the last commit, which may all be silence."""
        return (self._now - self._committed) * 1000 // SAMPLE_RATE_HZ

    @property
    def window(self) -> SpeechWindow | None:
        """The open window as it is now, or None. It may be open between turns, too."""
        if self._window is None:
            return None
        return self._value(self._window, self._now)

    @property
    def quiet_since(self) -> int | None:
        """The sample at which the current pause of the open window began; None outside a pause."""
        return self._quiet_since

    def apply(self, profile: TranscriberProfile, vad: ServerVad | None) -> list[SegmenterEvent]:
        """Apply a changed profile or changed server VAD, and return the resulting events. A change between server VAD
        and the client's commits ends the open turn or window. Other changes leave them open.
        """
        steps: list[SegmenterEvent] = []
        if (vad is None) != (self._vad is None):
            if self._vad and self._endpoint.speaking:
                steps += self._end_turn()
            else:
                # Speech that is under way becomes a new turn.
                self._endpoint.flush()
                steps += self._end_window()
        self._profile, self._vad, self.prefix_samples = profile, vad, _prefix_samples(vad)
        self._endpoint.apply(*self._endpoint_settings())
        return steps

    def feed(self, pcm: Pcm, probabilities: list[float], heard_since: int | None = None) -> list[SegmenterEvent]:
        """Add audio with the speech probabilities of the frames that it completed, and return the changes, in order.

        `pcm` is float32 [num_samples], mono, 16 kHz, of any length. The result does not depend on how the audio was
        cut. If the beginning of the speech in these frames was not recognized at the time, `heard_since` is the sample
        at which it began, at most MAX_BACKDATED before these frames.
        """
        if heard_since is not None:
            self._endpoint.backdate(heard_since)
        self._record(pcm)
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
        """Whether a turn has ended, but its window waits for more silence. Until the window ends, another turn may join
        it.
        """
        return self._settle_at is not None

    def settle(self) -> list[WindowEnded | TurnEnded]:
        """End a settling window now, because audio has stopped arriving, which counts as silence."""
        return self._end_window() if self.settling else []

    @property
    def in_turn(self) -> bool:
        """Whether server VAD is on and a turn is open, including its pauses."""
        return self._vad is not None and self._endpoint.speaking

    def wait(self, num_samples: int) -> list[SegmenterEvent]:
        """Count `num_samples` of time without audio after the newest sample as silence, which may end the open turn.
        Returns the changes, in order. The turn's audio ends with the newest sample.
        """
        steps: list[SegmenterEvent] = []
        if self.in_turn:
            for change in self._endpoint.wait(num_samples):
                steps += self._apply(change)
        return steps

    def end_after(self, pause: int, silence_ms: int) -> bool:
        """Have the pause that began at the sample `pause` end the turn after `silence_ms`, or with the next frame if
        the pause is already that long. A later call for the same pause replaces this value. Returns False, and does
        nothing, if the pause is over, or if the client commits turns.
        """
        if self._vad is None or pause != self._quiet_since:
            return False
        self._endpoint.end_after(silence_ms)
        return True

    def turn_goes_on(self, pause_ms: int) -> None:
        """Count a pause that has ended the last turn as a pause inside a turn, because the open turn continues it. If
        the open turn ends after a fixed silence, that silence becomes longer, see `Endpointer.be_patient`.
        """
        self.speaker_pauses.join_turns(pause_ms)
        self._endpoint.be_patient(pause_ms)

    def commit(self) -> list[SegmenterEvent]:
        """End the turn now, because the client commits it, and with it the window. Returns the events of all that
        ended, in order. With server VAD these include windows of earlier turns that were still settling.
        """
        return self._end_turn()

    @property
    def silent_since(self) -> int | None:
        """The sample since which the user is silent: the end of the last turn, or of audio that was committed or
        cleared after it. None while the user speaks. Also None without server VAD, if the client commits the turns.
        """
        return self._committed if self._vad and not self._endpoint.speaking else None

    def commit_silence(self) -> list[SegmenterEvent]:
        """Commit silence as a turn, up to the sample at which the next turn could begin. Returns the events of all that
        ended, in order.
        """
        steps: list[SegmenterEvent] = [*self._end_window()]
        turn, begin = self._turn, self._committed
        end = max(begin, self._next_turn_from)
        return [*steps, *self._close_turn(end), TurnEnded(turn, (end - begin) / SAMPLE_RATE_HZ)]

    def clear(self) -> list[SegmenterEvent]:
        """Drop the audio since the last commit. The open turn ends without an event. Committed turns whose window was
        settling keep their words, and the events of their end are returned.
        """
        steps: list[SegmenterEvent] = []
        if self._window and (closed := [s for s in self._window.spans if s.end is not None]):
            end = closed[-1].end or 0
            self._window.spans = closed
            steps.append(WindowEnded(self._value(self._window, end + MARGIN_SAMPLES), end))
            steps += [TurnEnded(s.turn, s.audio_s) for s in closed]
        self._endpoint.flush()
        self._window, self._quiet_since, self._settle_at, self._warm = None, None, None, None
        self._committed = self._now
        self._turn_has_window = False
        self._forget()
        return steps

    def cut(self, sample: int) -> None:
        """Restart the open window at `sample`, with a new id, because the final of all audio before `sample` is known.
        Its turns stay in the window.
        """
        assert self._window is not None
        self._windows += 1
        spans = [replace(s, first=False) for s in self._window.spans]
        self._window = _OpenWindow(self._windows, sample, None, spans)
        self._forget()

    def _value(self, window: _OpenWindow, end: int) -> SpeechWindow:
        """Return the window as a value, with its audio up to `end` or the newest sample."""
        pcm = self._tape[window.start - self._tape_start : min(end, self._now) - self._tape_start]
        return SpeechWindow(window.id, window.start, window.after, tuple(window.spans), pcm, self._quiet_since)

    def _endpoint_settings(self) -> tuple[float, int, int]:
        pause_ms = round(self._profile.pause_s * 1000)
        if self._vad is None:
            return (0.5, INNER_PREFIX_MS, pause_ms)
        return (self._vad.threshold, self._vad.prefix_padding_ms, self._vad.silence_duration_ms)

    def _apply(self, change: EndpointChange) -> list[SegmenterEvent]:
        match change:
            case SpeechBegan(sample):
                return self._started(max(sample, self._committed, self._tape_start))
            case SpeechPaused(sample):
                self._quiet_since = sample
                return []
            case SpeechResumed(sample):
                return self._resumed(sample)
            case SpeechEnded(sample, speech_end):
                return self._stopped(sample, speech_end)

    def _started(self, sample: int) -> list[SegmenterEvent]:
        self._settle_at, steps = None, list[SegmenterEvent]()
        if self._window and (self._now - self._window.start) / SAMPLE_RATE_HZ >= self._profile.long_window_s:
            steps += self._end_window()
        self._quiet_since = None
        if self._window:
            last = self._window.spans[-1]
            between = sample if last.end is None else (last.end + sample) // 2
            self._window.spans.append(TurnSpan(self._turn, between, True))
        else:
            self._open_window(sample)
        return [*steps, SpeechStarted(self._turn, _ms(sample))] if self._vad else steps

    def _resumed(self, sample: int) -> list[SegmenterEvent]:
        quiet = self._quiet_since
        if self._window is None or quiet is None:
            return []
        self.speaker_pauses.add((sample - quiet) * 1000 // SAMPLE_RATE_HZ)
        long = quiet - self._window.start >= self._profile.long_window_s * SAMPLE_RATE_HZ
        if not long or sample - quiet < self._profile.long_pause_s * SAMPLE_RATE_HZ:
            self._quiet_since = None
            return []
        steps = self._end_window()
        self._open_window(max(quiet + MARGIN_SAMPLES // 2, sample - MARGIN_SAMPLES))
        return [*steps]

    def _stopped(self, sample: int, speech_end: int) -> list[SegmenterEvent]:
        if self._vad is None:
            return [*self._end_window()]
        steps = [SpeechStopped(self._turn, _ms(sample)), *self._close_turn(sample)]
        self.speaker_pauses.end_turn()
        self._settle_at = speech_end + int(self._profile.settle_s * SAMPLE_RATE_HZ)
        return steps

    def _end_turn(self) -> list[SegmenterEvent]:
        steps: list[SegmenterEvent] = []
        if self._vad and self._window and not self._endpoint.speaking:
            # The turns of the window are committed, so they no longer wait for the silence that settles them.
            steps += self._end_window()
        if self._endpoint.flush() and self._vad:
            steps.append(SpeechStopped(self._turn, _ms(self._now)))
        had_window = self._window is not None
        turn, begin = self._turn, self._committed
        steps += self._close_turn(self._now)
        steps += self._end_window() if had_window else [TurnEnded(turn, (self._now - begin) / SAMPLE_RATE_HZ)]
        return steps

    def _close_turn(self, end: int) -> list[SegmenterEvent]:
        begin = self._committed
        if self._window:
            span = self._window.spans[-1]
            # With server VAD, a turn begins with its speech. Otherwise it begins at the client's last commit.
            begin = span.start if self._vad and span.first else begin
            speech_end = self._quiet_since if self._quiet_since is not None else end
            self._window.spans[-1] = replace(span, end=speech_end, audio_s=(end - begin) / SAMPLE_RATE_HZ)
        quiet = None if self._quiet_since is None else _ms(self._quiet_since)
        committed = TurnCommitted(self._turn, _ms(begin), _ms(end), quiet)
        self._turn += 1
        self._turn_has_window = False
        self._committed = end
        return [committed]

    def _end_window(self) -> list[WindowEnded | TurnEnded]:
        window, quiet = self._window, self._quiet_since
        if window is None:
            self._quiet_since, self._settle_at = None, None
            return []
        speech_end = self._now if quiet is None else quiet
        ended = WindowEnded(self._value(window, speech_end + MARGIN_SAMPLES), speech_end)
        self._window, self._quiet_since, self._settle_at = None, None, None
        self._warm = (window.id, window.start, speech_end)
        return [ended, *(TurnEnded(s.turn, s.audio_s) for s in window.spans if s.end is not None)]

    def _open_window(self, start: int) -> None:
        self._windows += 1
        begin, after = start, None
        if self._warm:
            warm, warm_start, warm_end = self._warm
            soon = start - warm_end < self._profile.context_pause_s * SAMPLE_RATE_HZ
            if soon and start - warm_start < self._profile.long_window_s * SAMPLE_RATE_HZ:
                begin, after = warm_start, warm
        self._warm = None
        span = TurnSpan(self._turn, start, not self._turn_has_window)
        self._window = _OpenWindow(self._windows, begin, after, [span])
        self._turn_has_window = True

    def _record(self, pcm: Pcm) -> None:
        held = self._now - self._tape_start
        if held + len(pcm) > len(self._tape):
            # Reserves 25 % more space, so that a long window is not copied for each added chunk.
            room = np.zeros((held + len(pcm)) * 5 // 4 + SAMPLE_RATE_HZ, np.float32)
            room[:held] = self._tape[:held]
            self._tape = room
        self._tape[held : held + len(pcm)] = pcm
        self._now += len(pcm)

    @property
    def _next_turn_from(self) -> int:
        """The first sample at which a future turn may begin."""
        return self._judged - self.prefix_samples - MAX_BACKDATED

    def _forget(self) -> None:
        """Drop audio that no window can need any more."""
        keep = self._next_turn_from
        if self._warm:
            _, start, end = self._warm
            is_old = self._judged - end >= self._profile.context_pause_s * SAMPLE_RATE_HZ
            if is_old or keep - start >= self._profile.long_window_s * SAMPLE_RATE_HZ:
                self._warm = None
        if self._warm:
            keep = min(keep, self._warm[1])
        if self._window:
            keep = min(keep, self._window.start)
        drop = max(0, keep) - self._tape_start
        # Moving the tape for every frame would cost more than keeping an extra second of it.
        if drop >= SAMPLE_RATE_HZ:
            self._tape = self._tape[drop : self.num_held].copy()
            self._tape_start += drop


def _prefix_samples(vad: ServerVad | None) -> int:
    return (vad.prefix_padding_ms if vad else INNER_PREFIX_MS) * SAMPLE_RATE_HZ // 1000


def _ms(sample: int) -> int:
    return sample * 1000 // SAMPLE_RATE_HZ
