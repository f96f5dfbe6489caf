"""When speech starts and stops, from a speech probability a frame. Pure; time counts samples.

Hysteresis as in Silero's own iterator: a turn starts at `threshold` and counts as silence under `threshold` - 0.15
(github.com/snakers4/silero-vad, utils_vad.py, VADIterator).
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.audio import SAMPLE_RATE_HZ

# A click or a breath is one or two loud frames: 64 ms of speech in a row before a turn starts.
ONSET_FRAMES = 2
RELEASE_MARGIN = 0.15


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    """Speech began; `sample` is its first sample, prefix padding already taken off (never before the last end)."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """Silence began inside a turn, at `sample`; a Resumed or a Stopped follows."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechResumed:
    """Speech went on after a pause that ended at `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The turn ended. `sample` is the end of its audio: the last speech plus the silence that decided it."""

    sample: int
    speech_end: int


EndpointChange = SpeechBegan | SpeechPaused | SpeechResumed | SpeechEnded


class Endpointer:
    """`feed` takes one frame's probability; `flush` ends an open turn at once (a client's commit)."""

    def __init__(self, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> None:
        self.threshold = threshold
        self._prefix = prefix_padding_ms * SAMPLE_RATE_HZ // 1000
        self._silence = silence_duration_ms * SAMPLE_RATE_HZ // 1000
        self._now = 0
        self._floor = 0
        self._speaking = False
        self._loud_frames = 0
        self._loud_since = 0
        self._quiet_since: int | None = None
        self._hastened: int | None = None

    @property
    def speaking(self) -> bool:
        """A turn is open (a pause shorter than the silence that ends it included)."""
        return self._speaking

    def feed(self, probability: float, num_samples: int) -> list[EndpointChange]:
        """One frame of `num_samples`; its probability in [0, 1]. Returns what it changed, in order."""
        begin, self._now = self._now, self._now + num_samples
        return self._in_turn(probability, begin) if self._speaking else self._between_turns(probability, begin)

    def flush(self) -> list[EndpointChange]:
        """End the open turn here, if there is one."""
        if not self._speaking:
            return []
        return [self._stop(self._now if self._quiet_since is None else self._quiet_since)]

    def hasten(self, silence_ms: int) -> None:
        """The pause that has begun ends the turn after this silence already."""
        if self._speaking and self._quiet_since is not None:
            self._hastened = silence_ms * SAMPLE_RATE_HZ // 1000

    def linger(self) -> None:
        """The pause that has begun is not hastened after all."""
        self._hastened = None

    def apply(self, threshold: float, prefix_padding_ms: int, silence_duration_ms: int) -> None:
        """Take new settings; an open turn goes on under them."""
        self.threshold = threshold
        self._prefix = prefix_padding_ms * SAMPLE_RATE_HZ // 1000
        self._silence = silence_duration_ms * SAMPLE_RATE_HZ // 1000

    def _between_turns(self, probability: float, begin: int) -> list[EndpointChange]:
        if probability < self.threshold:
            self._loud_frames = 0
            return []
        if not self._loud_frames:
            self._loud_since = begin
        self._loud_frames += 1
        if self._loud_frames < ONSET_FRAMES:
            return []
        self._speaking, self._loud_frames, self._quiet_since = True, 0, None
        return [SpeechBegan(max(self._floor, self._loud_since - self._prefix))]

    def _in_turn(self, probability: float, begin: int) -> list[EndpointChange]:
        if probability >= self.threshold - RELEASE_MARGIN:
            if self._quiet_since is not None and probability >= self.threshold:
                self._quiet_since = self._hastened = None
                return [SpeechResumed(begin)]
            if self._quiet_since is None:
                return []
        changes: list[EndpointChange] = []
        if self._quiet_since is None:
            self._quiet_since = begin
            changes.append(SpeechPaused(begin))
        if self._now - self._quiet_since >= (self._silence if self._hastened is None else self._hastened):
            changes.append(self._stop(self._quiet_since))
        return changes

    def _stop(self, speech_end: int) -> SpeechEnded:
        self._speaking, self._quiet_since, self._loud_frames, self._floor = False, None, 0, self._now
        self._hastened = None
        return SpeechEnded(self._now, speech_end)
