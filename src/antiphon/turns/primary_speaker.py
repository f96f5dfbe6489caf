"""Decides whether a turn is said by the user of a conversation or by another voice near the microphone. Pure.

A voice is a vector of a speaker encoder (`contracts/speaker.py`). Who the user is, is either given (`enrolled`), or
learned from the turns that are answered (`auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts.speaker import SpeakerProfile

PrimarySpeakerMode = Literal["off", "auto", "enrolled"]

# After so many seconds of speech a turn that goes on may be judged before it is over, as an interruption has to be. The
# second look is the surer one.
EARLY_LOOKS_S = (0.6, 1.0)
# Shorter turns are judged, and nothing is learned from them.
MIN_LEARN_S = 1.0
# What was heard counts as at most so many seconds, so that the voice of a long conversation is still followed.
MAX_MEMORY_S = 30.0
# No turn counts as more seconds than these, so that no single one outweighs several.
MAX_TURN_S = 5.0
# The first voice may have been a television's. While it was heard in one turn only, another voice that says so many
# turns in a row takes its place.
TAKEOVER_TURNS = 3


class Speaker(Enum):
    """Who said a turn. UNDECIDED counts as the user: a user's turn that is lost costs more than one too many."""

    USER = "user"
    OTHER = "other"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SpeakerVerdict:
    """Who said a turn, and the similarity that says so, in [-1, 1]; None where there was nothing to compare."""

    speaker: Speaker
    similarity: float | None = None

    @property
    def is_other(self) -> bool:
        """Whether the turn is neither answered nor allowed to interrupt."""
        return self.speaker is Speaker.OTHER


@dataclass(slots=True)
class _Voice:
    """A voice as the mean of the turns it was heard in, weighted by their seconds. `mean` float32 [size], length 1."""

    mean: Pcm
    heard_s: float
    num_turns: int = 1

    def similarity(self, vector: Pcm) -> float:
        return float(self.mean @ vector)

    def learn(self, vector: Pcm, speech_s: float) -> None:
        """Move the mean towards a turn's vector by its part of what was heard."""
        mean = self.heard_s * self.mean + speech_s * vector
        # Opposite vectors have no mean; the voice stays as it was.
        if (length := float(np.linalg.norm(mean))) > 0:
            self.mean = np.asarray(mean / length, np.float32)
        self.heard_s = min(MAX_MEMORY_S, self.heard_s + speech_s)
        self.num_turns += 1


class PrimarySpeaker:
    """Who the user of one conversation is.

    Call `judge` for a turn, and early within it where it may interrupt; then, once for each turn that is over, `heard`.
    In the mode `off` everything is UNDECIDED, and no vectors are needed.
    """

    def __init__(self, mode: PrimarySpeakerMode, profile: SpeakerProfile, enrolled: Sequence[Pcm] = ()) -> None:
        """`profile`: of the encoder that all vectors come from. `enrolled`: the voices that count as the user in the
        mode `enrolled`, float32 [profile.size], each of length 1. Raises ValueError where that mode has none, another
        has some, or one is of another size.
        """
        if (mode == "enrolled") != bool(enrolled):
            raise ValueError("the mode `enrolled` needs a voice, and the others take none")
        if any(vector.shape != (profile.size,) for vector in enrolled):
            raise ValueError(f"a voice of {profile.id} is a vector of {profile.size} numbers")
        self.mode = mode
        self._profile = profile
        self._users = [_Voice(np.asarray(vector, np.float32), 0.0) for vector in enrolled]
        # The other voice that was heard last, while the first may still turn out to be the wrong one.
        self._rival: _Voice | None = None

    @property
    def knows_user(self) -> bool:
        """Whether there is a voice to compare with."""
        return bool(self._users)

    def judge(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        """Say whose voice a vector is, of a whole turn or of its beginning. Nothing is learned.

        `vector`: float32 [profile.size], length 1. `speech_s`: the seconds of speech that it was made of. With less
        than `profile.least_s` of it, or no voice to compare with, the verdict is UNDECIDED.
        """
        if self.mode == "off" or not self._users or speech_s < self._profile.least_s:
            return SpeakerVerdict(Speaker.UNDECIDED)
        similarity = max(user.similarity(vector) for user in self._users)
        threshold = self._profile.threshold(speech_s)
        if similarity < threshold.other:
            return SpeakerVerdict(Speaker.OTHER, similarity)
        return SpeakerVerdict(Speaker.USER if similarity >= threshold.same else Speaker.UNDECIDED, similarity)

    def heard(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        """Judge a turn that is over, and learn from it in the mode `auto`; as `judge` otherwise.

        The first turn of at least MIN_LEARN_S is the user's voice, whoever says it. Turns that are the user's for sure
        move it, ever less as more was heard. Where the first voice was heard once only, and another one then says
        TAKEOVER_TURNS turns in a row, the other one becomes the user with the last of them, whose verdict is USER.
        """
        verdict = self.judge(vector, speech_s)
        if self.mode != "auto" or speech_s < max(MIN_LEARN_S, self._profile.least_s):
            return verdict
        speech_s = min(speech_s, MAX_TURN_S)
        if not self._users:
            self._users = [_Voice(np.asarray(vector, np.float32), speech_s)]
        elif verdict.speaker is Speaker.USER:
            self._users[0].learn(vector, speech_s)
            self._rival = None
        elif verdict.speaker is Speaker.OTHER and self._users[0].num_turns == 1:
            return self._challenged(vector, speech_s) or verdict
        return verdict

    def forget(self) -> None:
        """Forget a voice that was learned, as for a new user. Voices that were enrolled stay."""
        if self.mode == "auto":
            self._users, self._rival = [], None

    def _challenged(self, vector: Pcm, speech_s: float) -> SpeakerVerdict | None:
        """Count a turn of another voice than the first, and return its verdict where it takes the first one's place."""
        similarity = self._rival.similarity(vector) if self._rival else -1.0
        if self._rival is None or similarity < self._profile.threshold(speech_s).other:
            self._rival = _Voice(np.asarray(vector, np.float32), speech_s)
            return None
        self._rival.learn(vector, speech_s)
        if self._rival.num_turns < TAKEOVER_TURNS:
            return None
        self._users, self._rival = [self._rival], None
        return SpeakerVerdict(Speaker.USER, similarity)
