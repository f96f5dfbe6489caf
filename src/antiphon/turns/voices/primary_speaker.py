"""Decides whether a turn is said by the user of a conversation or by another voice near the microphone. Pure.

A voice is a vector of a speaker encoder (`contracts/speaker.py`). The user's voice is either given (`enrolled`) or
learned from the turns that are answered (`auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts.speaker import SpeakerProfile
from antiphon.events.transcription import EnrolledVoice, PrimarySpeakerMode

# Seconds of speech after which an open turn is judged, because an interruption cannot wait for the end of its turn. The
# second judgement is more reliable.
EARLY_LOOKS_S = (0.6, 1.0)
# A turn that is too short to be judged alone is another speaker's if it follows another speaker's turn, and if its
# similarity to that voice exceeds its similarity to the user's voice by NEARER. A pause has then cut it off from that
# turn. Turns shorter than SHORTEST_S have no voice.
NEARER, SHORTEST_S = 0.1, 0.2
# Seconds of speech below which nothing is learned from a turn once the user is known. It is judged all the same.
MIN_LEARN_S = 1.0
# The past of a voice counts as at most MAX_MEMORY_S seconds, so that its model still changes in a long conversation.
MAX_MEMORY_S = 30.0
# A turn counts as at most MAX_TURN_S seconds, so that a single turn does not outweigh several.
MAX_TURN_S = 5.0
# A voice is accepted as the user's after SURE_TURNS turns. Until then no turn is ignored, because the first turn may
# have been a television or a cough.
SURE_TURNS = 2
# Until then, another voice replaces the first one if it has TAKEOVER_TURNS turns in a row.
TAKEOVER_TURNS = 3


class TurnSpeaker(Enum):
    """Who said a turn. UNDECIDED counts as the user, because ignoring the user is worse than answering someone else."""

    USER = "user"
    OTHER = "other"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SpeakerVerdict:
    """Who said a turn, and the similarity that decided it, in [-1, 1], or None without a voice to compare with."""

    speaker: TurnSpeaker
    similarity: float | None = None

    @property
    def is_other(self) -> bool:
        """Whether the turn is neither answered nor allowed to interrupt."""
        return self.speaker is TurnSpeaker.OTHER


@dataclass(slots=True)
class _Voice:
    """A voice: the mean of its turns' vectors, weighted by their seconds. `mean` is float32 [size], with length 1."""

    mean: Pcm
    heard_s: float
    num_turns: int = 1

    def judge(self, vector: Pcm, speech_s: float, profile: SpeakerProfile, *, enrolled: bool = False) -> SpeakerVerdict:
        similarity = float(self.mean @ vector)
        threshold = profile.threshold(speech_s, self.heard_s, enrolled=enrolled)
        if similarity < threshold.other:
            return SpeakerVerdict(TurnSpeaker.OTHER, similarity)
        return SpeakerVerdict(TurnSpeaker.USER if similarity >= threshold.same else TurnSpeaker.UNDECIDED, similarity)

    def learn(self, vector: Pcm, speech_s: float) -> None:
        """Move the mean towards a turn's vector, by the turn's share of the seconds."""
        mean = self.heard_s * self.mean + speech_s * vector
        # Opposite vectors have no mean, so the voice stays unchanged.
        if (length := float(np.linalg.norm(mean))) > 0:
            self.mean = np.asarray(mean / length, np.float32)
        self.heard_s = min(MAX_MEMORY_S, self.heard_s + speech_s)
        self.num_turns += 1


# If the verdicts of several enrolled voices differ, the first of them in this order counts.
_ORDER = (TurnSpeaker.USER, TurnSpeaker.UNDECIDED, TurnSpeaker.OTHER)


class PrimarySpeaker:
    """Tracks the user's voice in one conversation.

    Call `judge` early in a turn that may interrupt a response, and `heard` once for each turn that is over. In the mode
    `off`, every verdict is UNDECIDED, and no vectors are needed.
    """

    def __init__(
        self, mode: PrimarySpeakerMode, profile: SpeakerProfile, enrolled: Sequence[EnrolledVoice] = ()
    ) -> None:
        """`profile` is that of the encoder that makes all vectors. `enrolled` are the user's voices in the mode
        `enrolled`. Several may belong to one person, for example recordings in several rooms. Raises ValueError if this
        mode has no enrolled voices, if another mode has some, or if a voice's vector has the wrong size.
        """
        if (mode == "enrolled") != bool(enrolled):
            raise ValueError("the mode `enrolled` needs a voice, and the others take none")
        if any(voice.vector.shape != (profile.size,) or voice.speech_s <= 0 for voice in enrolled):
            raise ValueError(
                f"a voice for {profile.id} needs a vector of {profile.size} numbers and speech of more than 0 s"
            )
        self.mode = mode
        self._profile = profile
        # The user's voice, both as it was heard and with added noise, or all enrolled voices.
        self._users = [_Voice(voice.vector, voice.speech_s) for voice in enrolled]
        self._num_turns = SURE_TURNS if enrolled else 0
        # The last voice that was not taken for the user's, while the user's voice is not certain yet.
        self._rival: _Voice | None = None
        # The vector of the previous turn, if that was another speaker's.
        self._other_before: Pcm | None = None

    @property
    def knows_user(self) -> bool:
        """Whether the user's voice is known, so that a verdict may be OTHER."""
        return self._num_turns >= SURE_TURNS

    def judge(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        """Return whose voice a vector is. It may be from a whole turn or from its beginning. Learns nothing.

        `vector`: float32 [profile.size], length 1. `speech_s`: the seconds of speech from which it was made. Without a
        voice to compare with, the verdict is UNDECIDED. While `knows_user` is false, it is never OTHER. With less than
        `profile.least_s` of speech it is never USER, and it is OTHER only after a turn of another voice, if the vector
        is nearer to that voice.
        """
        verdict = self._compared(vector, speech_s)
        if verdict.speaker is TurnSpeaker.OTHER and not self.knows_user:
            return SpeakerVerdict(TurnSpeaker.UNDECIDED, verdict.similarity)
        return verdict

    def heard(self, vector: Pcm, speech_s: float, takes: Sequence[Pcm] = ()) -> SpeakerVerdict:
        """Judge a turn that is over, see `judge`, and in the mode `auto` learn from it.

        `takes`: the vectors of the turn's `enrolment_takes` (`turns/voices/enrolment.py`) with synthetic noise. They
        let the user be recognized if noise begins later. They are needed while `knows_user` is false, but used later
        too.

        The first turn is assumed to be the user's. Until SURE_TURNS turns of this voice were heard, a later turn that
        may have the same voice counts as well, and another voice with TAKEOVER_TURNS turns in a row replaces the voice.
        After that, a turn of MIN_LEARN_S that surely has the same voice moves the voice, by less the more was heard of
        it.
        """
        verdict = self.judge(vector, speech_s)
        if not verdict.is_other:
            self._other_before = None
        elif speech_s >= self._profile.least_s:
            self._other_before = vector
        learn_from_s = MIN_LEARN_S if self.knows_user else 0.0
        if self.mode != "auto" or speech_s < max(learn_from_s, self._profile.least_s):
            return verdict
        speech_s = min(speech_s, MAX_TURN_S)
        if not self._users:
            self._users = [_Voice(one, speech_s) for one in (vector, *takes)]
            self._num_turns = 1
        elif not self.knows_user and self._compared(vector, speech_s).speaker is TurnSpeaker.OTHER:
            self._challenge(vector, speech_s)
        elif verdict.speaker is TurnSpeaker.USER or not self.knows_user:
            self._learn(vector, speech_s, takes)
        return verdict

    def forget(self) -> None:
        """Forget a learned voice, as for a new user. Enrolled voices stay."""
        if self.mode == "auto":
            self._users, self._num_turns, self._rival, self._other_before = [], 0, None, None

    def _compared(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        """Return the best verdict over the user's voices, even if little was heard of them."""
        if self.mode == "off" or not self._users:
            return SpeakerVerdict(TurnSpeaker.UNDECIDED)
        if speech_s < self._profile.least_s:
            return self._short(vector, speech_s)
        enrolled = self.mode == "enrolled"
        verdicts = [user.judge(vector, speech_s, self._profile, enrolled=enrolled) for user in self._users]
        return min(verdicts, key=lambda verdict: (_ORDER.index(verdict.speaker), -(verdict.similarity or 0.0)))

    def _short(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        similarity = max(float(user.mean @ vector) for user in self._users)
        before = self._other_before
        is_other = before is not None and speech_s >= SHORTEST_S and float(before @ vector) > similarity + NEARER
        return SpeakerVerdict(TurnSpeaker.OTHER if is_other else TurnSpeaker.UNDECIDED, similarity)

    def _learn(self, vector: Pcm, speech_s: float, takes: Sequence[Pcm]) -> None:
        """Move the nearest of the user's voices towards the vector, and the noisy voices towards `takes`, if their
        numbers match.
        """
        max(self._users, key=lambda user: float(user.mean @ vector)).learn(vector, speech_s)
        if len(takes) == len(self._users) - 1:
            for user, take in zip(self._users[1:], takes, strict=True):
                user.learn(take, speech_s)
        self._num_turns += 1
        self._rival = None

    def _challenge(self, vector: Pcm, speech_s: float) -> None:
        """Count a turn of a voice other than the first. After TAKEOVER_TURNS turns it replaces the first voice."""
        if self._rival is None or self._rival.judge(vector, speech_s, self._profile).speaker is TurnSpeaker.OTHER:
            self._rival = _Voice(vector, speech_s)
            return
        self._rival.learn(vector, speech_s)
        if self._rival.num_turns >= TAKEOVER_TURNS:
            self._users, self._num_turns, self._rival = [self._rival], self._rival.num_turns, None
