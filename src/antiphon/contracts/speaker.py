"""The contract of a speaker encoder, which makes a vector of a stretch of speech by which voices can be told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.audio import Pcm


@dataclass(frozen=True, slots=True)
class VoiceThreshold:
    """What similarities mean for stretches of so many seconds of speech, as measured for one encoder.

    - `other`: below it the voice is another than the one it is compared with.
    - `same`: from it on it is the same. Between the two nobody can say.
    """

    speech_s: float
    other: float
    same: float


@dataclass(frozen=True, slots=True)
class SpeakerProfile:
    """The facts of a speaker encoder.

    - `id`: the model's name. Vectors of encoders with different ids cannot be compared.
    - `size`: how many numbers a vector has.
    - `least_s`: from how many seconds of speech on a vector says something about the voice.
    - `thresholds`: what similarities mean, by seconds of speech, the shortest first; at least one. Lengths between two
      of them are interpolated.
    """

    id: str
    size: int
    least_s: float
    thresholds: tuple[VoiceThreshold, ...]

    def threshold(self, speech_s: float) -> VoiceThreshold:
        """Return what similarities mean for so many seconds of speech. Beyond the ends of the table they mean what they
        mean at its ends.
        """
        below, above = self.thresholds[0], self.thresholds[-1]
        for one in self.thresholds:
            if one.speech_s <= speech_s:
                below = one
        for one in reversed(self.thresholds):
            if one.speech_s >= speech_s:
                above = one
        width = above.speech_s - below.speech_s
        share = min(1.0, max(0.0, (speech_s - below.speech_s) / width)) if width > 0 else 0.0
        return VoiceThreshold(
            speech_s,
            below.other + share * (above.other - below.other),
            below.same + share * (above.same - below.same),
        )


class SpeakerEncoder(Protocol):
    """One loaded speaker encoder, shared by all sessions."""

    @property
    def profile(self) -> SpeakerProfile:
        """The facts by which voices are compared."""
        ...

    async def embed(self, pcm: Pcm) -> Pcm:
        """Return the vector of a voice, float32 [profile.size], of length 1: the scalar product of two vectors is their
        similarity, in [-1, 1], about 0 for voices that have nothing in common.

        pcm: float32 [num_samples], mono, 16 kHz: speech of one voice. Pauses and noise count as a part of the voice, so
        silence before and after the speech is better left out. Of less than `profile.least_s`, even of nothing, there
        is a vector too, which says little. Waits in the model's lane. Raises Refused, ModelError.
        """
        ...

    def close(self) -> None:
        """Stop the model's workers. What waits for a vector is cancelled."""
        ...
