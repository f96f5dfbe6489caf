"""Decides when speech starts and stops, from one speech probability per frame. Pure. Time is counted in samples at
16 kHz.

The hysteresis is that of Silero's own iterator: speech starts at `threshold`, and silence below `threshold` - 0.15
(github.com/snakers4/silero-vad, utils_vad.py, VADIterator).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from antiphon.audio import SAMPLE_RATE_HZ

# Number of consecutive frames of speech, 64 ms, that start a turn: a click or a breath is one or two loud frames.
ONSET_FRAMES = 2
RELEASE_MARGIN = 0.15
# Milliseconds by which the silence that ends a turn is longer than a pause after which its speaker went on.
PATIENCE_MS = 100
# Maximum number of samples by which the start of speech may be moved back after its detection.
MAX_BACKDATED = 24 * 512


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    """Speech began. `sample` is the first sample of the speech minus the prefix padding, but not before the end of the
    previous turn.
    """

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """Silence began inside a turn, at `sample`. A SpeechResumed or a SpeechEnded follows."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechResumed:
    """Speech continued after a pause, which ended at `sample`. The turn is the same."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The turn ended. `sample` is the end of its audio, which is the end of the silence that ended the turn.
    `speech_end` is the start of that silence.
    """

    sample: int
    speech_end: int


EndpointChange = SpeechBegan | SpeechPaused | SpeechResumed | SpeechEnded


class EndpointState(NamedTuple):
    """The state with which another endpointer continues the same audio. Positions are samples.

    - `last_end`: the end of the previous turn.
    - `speaking`: whether a turn is open.
    - `quiet_since`: the start of the open turn's current pause; None outside a pause.
    - `patience`: the samples of silence, beyond the configured ones, that end the open turn.
    """

    last_end: int
    speaking: bool
    quiet_since: int | None
    patience: int


class Endpointer:
    """Finds the turns in a stream of speech probabilities. One object serves one session. No method waits."""

    def __init__(self, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> None:
        self.threshold = threshold
        self._prefix = prefix_padding_ms * SAMPLE_RATE_HZ // 1000
        self._silence = silence_duration_ms * SAMPLE_RATE_HZ // 1000
        self._now = 0
        # The end of the previous turn. Padding does not extend before it.
        self._last_end = 0
        self._speaking = False
        self._loud_frames = 0
        self._loud_since = 0
        # The start of speech that may be detected next, if it is known from `backdate`.
        self._heard_since: int | None = None
        self._quiet_since: int | None = None
        # The samples of silence, beyond the configured ones, that end the open turn.
        self._patience = 0
        # The samples of silence after which the current pause ends the turn. None means the configured silence.
        self._pause_silence: int | None = None

    def state(self) -> EndpointState:
        """Return the state for another endpointer. Speech that is not a turn yet is not in it."""
        return EndpointState(self._last_end, self._speaking, self._quiet_since, self._patience)

    def restore(self, state: EndpointState, now: int) -> None:
        """Continue from another endpointer's state, before the frame that begins at the sample `now`."""
        self._now, self._last_end, self._speaking = now, state.last_end, state.speaking
        self._quiet_since, self._patience = state.quiet_since, state.patience

    @property
    def speaking(self) -> bool:
        """Whether a turn is open. It stays open during a pause that is too short to end it."""
        return self._speaking

    def backdate(self, sample: int) -> None:
        """Set the start of the next speech to `sample`, because frames since then were not recognized as speech. Only
        valid for speech detected within MAX_BACKDATED samples. The earliest `sample` counts. A no-op during a turn.
        """
        if not self._speaking:
            earlier = self._recent(self._heard_since)
            self._heard_since = sample if earlier is None else min(sample, earlier)

    def feed(self, probability: float, num_samples: int) -> list[EndpointChange]:
        """Add one frame of `num_samples` with its speech probability in [0, 1], and return the resulting changes, in
        order. Most frames cause none.
        """
        begin, self._now = self._now, self._now + num_samples
        return self._in_turn(probability, begin) if self._speaking else self._between_turns(probability, begin)

    def wait(self, num_samples: int) -> list[EndpointChange]:
        """Count `num_samples` of time without audio, since the last frame, as silence, and return the changes. In the
        middle of speech, a pause begins at the last frame. A pause that is then long enough ends the turn. A no-op
        outside a turn. Later audio is counted from the last frame, as if none were missing.
        """
        if not self._speaking:
            return []
        changes: list[EndpointChange] = []
        if self._quiet_since is None:
            self._quiet_since = self._now
            changes.append(SpeechPaused(self._now))
        if self._now - self._quiet_since + num_samples >= self._needed:
            changes.append(self._stop(self._quiet_since))
        return changes

    def flush(self) -> list[EndpointChange]:
        """End the open turn at once, because the client commits it, and return its SpeechEnded. Returns an empty list
        if no turn is open. In a pause, the turn ends at the start of the pause.
        """
        if not self._speaking:
            return []
        return [self._stop(self._now if self._quiet_since is None else self._quiet_since)]

    def end_after(self, silence_ms: int) -> None:
        """Have the current pause end the turn after `silence_ms` instead of after the configured silence. A later call
        in the same pause replaces this value. When speech continues, the configured silence applies again. A no-op
        outside a pause.
        """
        if self._speaking and self._quiet_since is not None:
            self._pause_silence = silence_ms * SAMPLE_RATE_HZ // 1000

    def be_patient(self, pause_ms: int) -> None:
        """Have the open turn end only after a silence longer than `pause_ms`, and at most twice the configured silence.
        The next turn ends after the configured silence again. A no-op if no turn is open.
        """
        if self._speaking:
            longer = (pause_ms + PATIENCE_MS) * SAMPLE_RATE_HZ // 1000
            self._patience = min(self._silence, max(0, longer - self._silence))

    def apply(self, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> None:
        """Apply changed settings. They also hold for the rest of an open turn and of its pause."""
        self.threshold = threshold
        self._prefix = prefix_padding_ms * SAMPLE_RATE_HZ // 1000
        self._silence = silence_duration_ms * SAMPLE_RATE_HZ // 1000

    @property
    def _needed(self) -> int:
        """The samples of silence after which the turn ends."""
        return self._silence + self._patience if self._pause_silence is None else self._pause_silence

    def _recent(self, sample: int | None) -> int | None:
        """Return `sample` if it is recent enough to be the start of speech that begins now, else None."""
        return None if sample is None or self._now - sample > MAX_BACKDATED else sample

    def _between_turns(self, probability: float, begin: int) -> list[EndpointChange]:
        if probability < self.threshold:
            self._loud_frames = 0
            return []
        if not self._loud_frames:
            heard_since = self._recent(self._heard_since)
            self._loud_since = begin if heard_since is None else min(begin, heard_since)
        self._loud_frames += 1
        if self._loud_frames < ONSET_FRAMES:
            return []
        self._speaking, self._loud_frames, self._quiet_since, self._heard_since = True, 0, None, None
        return [SpeechBegan(max(self._last_end, self._loud_since - self._prefix))]

    def _in_turn(self, probability: float, begin: int) -> list[EndpointChange]:
        if probability >= self.threshold - RELEASE_MARGIN:
            if self._quiet_since is not None and probability >= self.threshold:
                self._quiet_since = self._pause_silence = None
                return [SpeechResumed(begin)]
            if self._quiet_since is None:
                return []
        changes: list[EndpointChange] = []
        if self._quiet_since is None:
            self._quiet_since = begin
            changes.append(SpeechPaused(begin))
        if self._now - self._quiet_since >= self._needed:
            changes.append(self._stop(self._quiet_since))
        return changes

    def _stop(self, speech_end: int) -> SpeechEnded:
        self._speaking, self._quiet_since, self._pause_silence = False, None, None
        self._loud_frames, self._last_end, self._patience = 0, self._now, 0
        return SpeechEnded(self._now, speech_end)
