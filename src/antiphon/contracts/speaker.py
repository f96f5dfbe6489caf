"""The contract of speaker encoders. An encoder turns a stretch of speech into a vector, to compare voices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from antiphon.audio import Pcm


@dataclass(frozen=True, slots=True)
class VoiceThreshold:
    """What the similarity of two vectors means, as measured for one encoder.

    - `shared_s`: the seconds of speech that the two vectors share (`shared_s()`).
    - `other`: a similarity below this value means two different voices.
    - `same`: a similarity of this value or more means one voice. It is at least `other`. A similarity between the two
      values decides nothing.
    """

    shared_s: float
    other: float
    same: float


@dataclass(frozen=True, slots=True)
class VoiceClustering:
    """How voices are distinguished with one encoder, as measured for it: those of a recording
    (`turns/voices/speakers.py`), and those of a live session (`turns/voices/live_speakers.py`).
    """

    # The length of a window, in seconds.
    window_s: float
    # The time from the start of one window to the start of the next, in seconds.
    hop_s: float
    # The mean similarity of two groups of windows from which they begin one voice.
    same_windows: float
    # The similarity of two voices, each with seconds of speech, from which they are one.
    same_voices: float
    # The similarity of a voice to a known speaker's reference from which it has the speaker's name.
    same_as_known: float
    # The seconds of speech from which a voice is a speaker of its own.
    least_voice_s: float
    # The similarity of a turn to a voice of a live session from which it is the voice's, relative to the average of
    # turns of one voice.
    same_turns: float
    # The seconds of speech from which a turn of a live session begins a voice.
    least_turn_s: float
    # The seconds of speech of which a vector is as much random as it is the voice's.
    random_s: float
    # The directions in which vectors of one voice differ by microphone, line and noise: float32 [count, size], each of
    # length 1 and orthogonal to the others. They are removed before vectors are compared.
    channel_directions: Pcm = field(compare=False, default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True, slots=True)
class SpeakerProfile:
    """What a speaker encoder measures, and from which similarity two of its vectors are the same voice."""

    # The model's name. Vectors of encoders with different ids cannot be compared.
    id: str
    # The length of a vector.
    size: int
    # The shortest speech that gives a meaningful vector, in seconds.
    least_s: float
    # At least one threshold, in ascending order of `shared_s`.
    thresholds: tuple[VoiceThreshold, ...]
    # The thresholds for the similarity to the nearest take of an enrolled voice (`turns/voices/enrolment.py`), which
    # has many seconds of speech. Empty if `thresholds` also apply to such takes.
    enrolled: tuple[VoiceThreshold, ...] = ()
    # How the voices of a recording are found. None if the encoder was not measured for this.
    clustering: VoiceClustering | None = None

    def threshold(self, one_s: float, other_s: float, *, enrolled: bool = False) -> VoiceThreshold:
        """Return what the similarity of two vectors means, given their seconds of speech.

        Interpolates between two thresholds of the profile. Outside their range, the nearest threshold applies.

        Args:
            one_s: Seconds of speech of one vector, above 0.
            other_s: Seconds of speech of the other vector, above 0.
            enrolled: True if one of the vectors belongs to an enrolled voice.
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
    """Return the effective seconds of speech of two vectors together.

    The result is less than the shorter duration, and close to it if the other duration is much longer. The random part
    of a vector is inversely proportional to its seconds of speech, and the random parts of two vectors add up.
    """
    return 1 / (1 / one_s + 1 / other_s)


def _seconds(threshold: VoiceThreshold) -> float:
    return threshold.shared_s


class SpeakerModel(Protocol):
    """One loaded speaker encoder, shared by all sessions."""

    @property
    def profile(self) -> SpeakerProfile:
        """The encoder's facts, including the thresholds for comparing voices."""
        ...

    async def embed(self, pcm: Pcm) -> Pcm:
        """Return the vector of a voice, float32 [profile.size], of length 1.

        The scalar product of two vectors is their similarity, in [-1, 1], and about 0 for unrelated voices. Waits in
        the model's lane.

        Args:
            pcm: float32 [num_samples], mono, 16 kHz: speech of one voice. Pauses and noise count as part of the voice,
                so leave out silence before and after the speech. Audio shorter than `profile.least_s`, even empty
                audio, also has a vector, but this vector is unreliable.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...

    def close(self) -> None:
        """Stop the model's workers. Calls of `embed` that wait are cancelled."""
        ...
