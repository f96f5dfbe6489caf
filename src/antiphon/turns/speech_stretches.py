"""Cuts recorded audio into its stretches of speech, and maps times of the stretches back to the recording. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.transcription import ServerVad
from antiphon.turns.endpoint import ONSET_FRAMES, Endpointer, SpeechBegan, SpeechEnded


class SpeechStretches:
    """Keeps of a recording what a live session with the same `vad` would hear as turns, padding and silence included.

    Audio is given out as soon as it is known to be kept, so that no more is held than one call's audio and the padding.
    """

    def __init__(self, vad: ServerVad, frame_samples: int) -> None:
        self._endpointer = Endpointer(vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms)
        self._frame_samples = frame_samples
        # What speech that begins with the next frame may still need: its padding, and the frames of its onset.
        self._reach = vad.prefix_padding_ms * SAMPLE_RATE_HZ // 1000 + ONSET_FRAMES * frame_samples
        # The audio that is neither given out nor dropped, its first sample's number, and where judged frames end.
        self._held = np.zeros(0, np.float32)
        self._start = 0
        self._judged = 0

    def feed(self, pcm: Pcm, probabilities: Sequence[float]) -> list[tuple[int, Pcm]]:
        """Add audio, and the speech probabilities of the frames that it completes.

        Returns what is now known to be kept, in order: each piece with the number of its first sample in the recording.
        A piece may go on where the one before it ended. pcm: float32 [num_samples], mono, 16 kHz.
        """
        self._held = np.concatenate((self._held, pcm))
        kept: list[tuple[int, Pcm]] = []
        for probability in probabilities:
            self._judged += self._frame_samples
            for change in self._endpointer.feed(probability, self._frame_samples):
                if isinstance(change, SpeechBegan):
                    self._drop(change.sample)
                elif isinstance(change, SpeechEnded):
                    kept += self._take(change.sample)
        if self._endpointer.speaking:
            return kept + self._take(self._judged)
        self._drop(self._judged - self._reach)
        return kept

    def end(self) -> list[tuple[int, Pcm]]:
        """End the recording. Returns the samples that fill no frame, if speech lasts until the end."""
        return self._take(self._start + len(self._held)) if self._endpointer.speaking else []

    def _take(self, end: int) -> list[tuple[int, Pcm]]:
        start, piece = self._start, self._held[: max(0, end - self._start)]
        self._drop(end)
        return [(start, piece)] if len(piece) else []

    def _drop(self, end: int) -> None:
        count = max(0, end - self._start)
        self._held, self._start = self._held[count:], self._start + count


class SpeechTimeline:
    """Where the samples of joined stretches lie in the recording that they were cut from."""

    def __init__(self) -> None:
        # For each stretch, its first sample in the joined audio and in the recording. Both rise.
        self._joined: list[int] = []
        self._recorded: list[int] = []
        self._num_joined = 0

    @property
    def end(self) -> int:
        """The sample of the recording behind the last stretch; 0 where there is none."""
        return self._recorded[-1] + self._num_joined - self._joined[-1] if self._joined else 0

    def add(self, sample: int, num_samples: int) -> None:
        """Join a stretch that begins at `sample` of the recording, not before the last one's end."""
        if not self._joined or sample > self.end:
            self._joined.append(self._num_joined)
            self._recorded.append(sample)
        self._num_joined += num_samples

    def start_s(self, joined_s: float) -> float:
        """Return where in the recording something starts that starts at `joined_s`, both in seconds.

        At the joint of two stretches it starts with the later one. At least one stretch must have been added.
        """
        return self._recorded_s(bisect_right(self._joined, joined_s * SAMPLE_RATE_HZ) - 1, joined_s)

    def end_s(self, joined_s: float) -> float:
        """Return where in the recording something ends that ends at `joined_s`, both in seconds.

        At the joint of two stretches it ends with the earlier one. At least one stretch must have been added.
        """
        return self._recorded_s(bisect_left(self._joined, joined_s * SAMPLE_RATE_HZ) - 1, joined_s)

    def _recorded_s(self, index: int, joined_s: float) -> float:
        at = max(0, index)
        return joined_s + (self._recorded[at] - self._joined[at]) / SAMPLE_RATE_HZ
