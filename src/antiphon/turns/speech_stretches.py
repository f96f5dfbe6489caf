"""Cuts the stretches of speech out of a recording, and maps times in these stretches back to the recording. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.transcription import ServerVad
from antiphon.turns.endpoint import ONSET_FRAMES, Endpointer, SpeechBegan, SpeechEnded

# A stretch counts as speech if the detector's probability reaches SURE in it. In 457 stretches of speech, which
# included noise of up to 0 dB, far microphones and single words, the peak was at least 0.924. In half an hour of noise,
# music and babble, the detector found 17 stretches of speech, 11 of which had a peak below 0.9.
SURE = 0.9
# The required peak for a client with a lower threshold, as a multiple of that threshold.
SURE_RATIO = SURE / 0.5
# Maximum samples of a stretch that are held until the detector is sure that it is speech.
MAX_UNSURE = 30 * SAMPLE_RATE_HZ


class SpeechStretches:
    """Keeps the parts of a recording that a live session with the same `vad` would treat as turns, including padding
    and silence.

    Drops a stretch if the detector is never sure that it is speech. A live session, which cannot wait, would make such
    a stretch a turn. Audio is returned as soon as it is known to be kept, so at most the audio of one call, the padding
    and MAX_UNSURE samples are held.
    """

    def __init__(self, vad: ServerVad, frame_samples: int) -> None:
        self._endpointer = Endpointer(vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms)
        self._frame_samples = frame_samples
        self._sure_from = min(SURE, vad.threshold * SURE_RATIO)
        # The last probabilities outside speech, and the highest probability of the current stretch.
        self._onset: deque[float] = deque(maxlen=ONSET_FRAMES)
        self._peak = 0.0
        # The number of past samples that are still needed if speech begins with the next frame: its padding, and the
        # frames of its onset.
        self._reach = vad.prefix_padding_ms * SAMPLE_RATE_HZ // 1000 + ONSET_FRAMES * frame_samples
        # The audio that is neither returned nor dropped yet, the number of its first sample, and the end of the frames
        # that were judged.
        self._held = np.zeros(0, np.float32)
        self._start = 0
        self._judged = 0

    def feed(self, pcm: Pcm, probabilities: Sequence[float]) -> list[tuple[int, Pcm]]:
        """Add audio, and the speech probabilities of the frames that it completes.

        Returns the audio that is now known to be kept, in order. Each piece has the number of its first sample in the
        recording, and may directly continue the previous piece. `pcm`: float32 [num_samples], mono, 16 kHz.
        """
        self._held = np.concatenate((self._held, pcm))
        kept: list[tuple[int, Pcm]] = []
        for probability in probabilities:
            self._judged += self._frame_samples
            self._onset.append(probability)
            self._peak = max(self._peak, probability)
            for change in self._endpointer.feed(probability, self._frame_samples):
                if isinstance(change, SpeechBegan):
                    self._drop(change.sample)
                    self._peak = max(self._onset)
                elif isinstance(change, SpeechEnded):
                    kept += self._take_if_sure(change.sample)
        if not self._endpointer.speaking:
            self._drop(self._judged - self._reach)
        elif self._is_sure():
            kept += self._take(self._judged)
        else:
            self._drop(self._judged - MAX_UNSURE)
        return kept

    def end(self) -> list[tuple[int, Pcm]]:
        """End the recording. If speech lasts until the end, returns the rest, including the incomplete frame."""
        return self._take_if_sure(self._start + len(self._held)) if self._endpointer.speaking else []

    def _is_sure(self) -> bool:
        return self._peak >= self._sure_from

    def _take_if_sure(self, end: int) -> list[tuple[int, Pcm]]:
        if self._is_sure():
            return self._take(end)
        self._drop(end)
        return []

    def _take(self, end: int) -> list[tuple[int, Pcm]]:
        start, piece = self._start, self._held[: max(0, end - self._start)]
        self._drop(end)
        return [(start, piece)] if len(piece) else []

    def _drop(self, end: int) -> None:
        count = max(0, end - self._start)
        self._held, self._start = self._held[count:], self._start + count


class SpeechTimeline:
    """Maps times in joined stretches of audio to times in the recording from which the stretches were cut."""

    def __init__(self) -> None:
        # The first sample of each stretch in the joined audio, and in the recording. Both lists increase.
        self._joined: list[int] = []
        self._recorded: list[int] = []
        self._num_joined = 0

    @property
    def end(self) -> int:
        """The sample of the recording after the last stretch. 0 if there are no stretches."""
        return self._recorded[-1] + self._num_joined - self._joined[-1] if self._joined else 0

    def add(self, sample: int, num_samples: int) -> None:
        """Append a stretch that begins at `sample` of the recording. It must not begin before the previous one ends."""
        if not self._joined or sample > self.end:
            self._joined.append(self._num_joined)
            self._recorded.append(sample)
        self._num_joined += num_samples

    def start_s(self, joined_s: float) -> float:
        """Convert the start time of something in the joined audio to one in the recording, both in seconds.

        A start at the joint of two stretches belongs to the later one. At least one stretch must have been added.
        """
        return self._recorded_s(bisect_right(self._joined, joined_s * SAMPLE_RATE_HZ) - 1, joined_s)

    def end_s(self, joined_s: float) -> float:
        """Convert the end time of something in the joined audio to one in the recording, both in seconds.

        An end at the joint of two stretches belongs to the earlier one. At least one stretch must have been added.
        """
        return self._recorded_s(bisect_left(self._joined, joined_s * SAMPLE_RATE_HZ) - 1, joined_s)

    def span_s(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Convert the start and end of a word in the joined audio to times in the recording, in seconds.

        The result lies in one stretch. If the word spans a joint, that is the stretch with the longest part of the
        word. At least one stretch must have been added.
        """
        edges = [start_s, *(j / SAMPLE_RATE_HZ for j in self._joined if start_s < j / SAMPLE_RATE_HZ < end_s), end_s]
        start_s, end_s = max(pairwise(edges), key=lambda part: part[1] - part[0])
        start_s, end_s = self.start_s(start_s), self.end_s(end_s)
        return start_s, max(start_s, end_s)

    def _recorded_s(self, index: int, joined_s: float) -> float:
        at = max(0, index)
        return joined_s + (self._recorded[at] - self._joined[at]) / SAMPLE_RATE_HZ
