"""Labels the turns of a live session by their voices, one after another. Pure.

A turn gets the label of the most similar voice if it is similar enough, and begins a voice otherwise: leader-follower
clustering (Kwon and Narayanan 2005, Unsupervised speaker indexing using generic models). The vector of a short turn has
a large random part. So a similarity is divided by the one that two turns of one voice, with as much speech, have on
average, as in the two-covariance model (Brümmer and de Villiers 2010, The speaker partitioning problem).

A label is final: later turns change neither it nor the voice that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts import speaker_label
from antiphon.contracts.speaker import SpeakerProfile, VoiceClustering
from antiphon.events.transcription import KnownVoice
from antiphon.turns.voices.speakers import Numbers, without_channel

# Maximum number of voices of a session. Later turns get the label of the most similar one.
MAX_VOICES = 64
# A turn counts as at most MAX_TURN_S seconds of its voice, so that one turn does not outweigh several.
MAX_TURN_S = 10.0


@dataclass(slots=True, eq=False)
class _Voice:
    """A voice of the session. `total` is the sum of its turns' vectors, float64 [size], weighted by their seconds."""

    label: str
    total: Numbers
    heard_s: float


class LiveSpeakers:
    """The voices of one session.

    `num_labels`: the number of labels A, B, … that the session has given, also at another host. The vectors of their
    voices stay at that host, so a voice that was heard there gets another label here, and no label has two voices.
    """

    def __init__(self, profile: SpeakerProfile, clustering: VoiceClustering) -> None:
        """`profile` and `clustering` are those of the encoder that makes all vectors."""
        self._least_s, self._clustering = profile.least_s, clustering
        self._known: list[_Voice] = []
        self._voices: list[_Voice] = []
        self.num_labels = 0

    def know(self, known: Sequence[KnownVoice]) -> None:
        """Label the turns of these speakers with their names from now on, and no longer those of earlier ones."""
        self._known = [_Voice(v.name, v.speech_s * self._unit(v.vector), v.speech_s) for v in known]

    def label(self, vector: Pcm, speech_s: float) -> str:
        """Return the label of a turn that is over, and learn from it.

        `vector`: float32 [size], length 1. `speech_s`: the seconds of speech from which it was made. Returns "" for a
        turn with less than `least_s`, and for a turn with less than `least_turn_s` that is similar to no voice.
        """
        if speech_s < self._least_s:
            return ""
        unit, voices = self._unit(vector), [*self._known, *self._voices]
        scores = [self._score(voice, unit, speech_s) for voice in voices]
        best = max(zip(scores, range(len(voices)), strict=True), default=(-np.inf, 0))[1]
        if not voices or scores[best] < self._clustering.same_turns:
            if speech_s < self._clustering.least_turn_s:
                return ""
            if len(self._voices) < MAX_VOICES:
                voices.append(_Voice(self._new_label(), np.zeros_like(unit), 0.0))
                self._voices.append(voices[-1])
                best = len(voices) - 1
        voice = voices[best]
        if voice in self._voices:
            counted_s = min(speech_s, MAX_TURN_S)
            voice.total, voice.heard_s = voice.total + counted_s * unit, voice.heard_s + counted_s
        return voice.label

    def _unit(self, vector: Pcm) -> Numbers:
        return np.asarray(without_channel(vector[None], self._clustering)[0], np.float64)

    def _score(self, voice: _Voice, unit: Numbers, speech_s: float) -> float:
        """Return the similarity of a turn to a voice, divided by that of turns of one voice."""
        expected = self._share(voice.heard_s) * self._share(speech_s)
        return float(voice.total @ unit / (max(float(np.linalg.norm(voice.total)), 1e-9) * expected))

    def _share(self, speech_s: float) -> float:
        """Return the cosine of a vector's angle to its voice without the random part."""
        return float(np.sqrt(speech_s / (speech_s + self._clustering.random_s)))

    def _new_label(self) -> str:
        taken = {voice.label for voice in self._known}
        for number in count(self.num_labels):
            if (label := speaker_label(number)) not in taken:
                self.num_labels = number + 1
                return label
        raise AssertionError
