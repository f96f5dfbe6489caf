"""The contract of a speaker encoder, which makes a vector of a stretch of speech by which voices can be told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.audio import Pcm


@dataclass(frozen=True, slots=True)
class VoiceThreshold:
    """What the similarity of two vectors means, as measured for one encoder.

    - `shared_s`: how much speech the two vectors are of, by `shared_s()`.
    - `other`: below it they are of two voices.
    - `same`: from it on they are of one voice; at least `other`. Between the two nobody can say.
    """

    shared_s: float
    other: float
    same: float


@dataclass(frozen=True, slots=True)
class SpeakerProfile:
    """The facts of a speaker encoder.

    - `id`: the model's name. Vectors of encoders with different ids cannot be compared.
    - `size`: how many numbers a vector has.
    - `least_s`: from how many seconds of speech on a vector says something about the voice.
    - `thresholds`: what similarities mean, by the seconds of speech, the shortest first; at least one.
    - `enrolled`: the same for the similarity to the nearest take of a voice that was enrolled with many seconds of
      speech (`turns/voices/enrolment.py`); empty where `thresholds` hold for it too.
    """

    id: str
    size: int
    least_s: float
    thresholds: tuple[VoiceThreshold, ...]
    enrolled: tuple[VoiceThreshold, ...] = ()

    def threshold(self, one_s: float, other_s: float, *, enrolled: bool = False) -> VoiceThreshold:
        """Return what the similarity of two vectors means that are of so many seconds of speech each, above 0. Between
        two thresholds of the profile it is interpolated; beyond the ends of the table it is that of the end.
        `enrolled`: one of them is of an enrolled voice.
        """
        seconds = shared_s(one_s, other_s)
        thresholds = (enrolled and self.enrolled) or self.thresholds
        below = max((t for t in thresholds if t.shared_s <= seconds), key=_seconds, default=thresholds[0])
        above = min((t for t in thresholds if t.shared_s >= seconds), key=_seconds, default=thresholds[-1])
        width = above.shared_s - below.shared_s
        share = (seconds - below.shared_s) / width if width > 0 else 0.0
        return VoiceThreshold(
            seconds,
            below.other + share * (above.other - below.other),
            below.same + share * (above.same - below.same),
        )


def shared_s(one_s: float, other_s: float) -> float:
    """How much speech two vectors are of together: less than the shorter one, and nearly that where the other one is of
    much more. What is accidental in a vector falls with its seconds, and that of two vectors adds up.
    """
    return 1 / (1 / one_s + 1 / other_s)


def _seconds(threshold: VoiceThreshold) -> float:
    return threshold.shared_s


class SpeakerModel(Protocol):
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
