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

# Seconds of speech after which an open turn may be judged, as an interruption has to be. The second look is the more
# reliable one.
EARLY_LOOKS_S = (0.6, 1.0)
# A turn that is too short to be judged by itself is another speaker's if it follows another speaker's turn and is
# nearer to that voice than to the user's by NEARER: a pause has cut it off. Turns shorter than SHORTEST_S have no
# voice.
NEARER, SHORTEST_S = 0.1, 0.2
# Once the user is known, shorter turns are judged, but nothing is learned from them.
MIN_LEARN_S = 1.0
# A voice's past counts as at most MAX_MEMORY_S seconds, so that the voice of a long conversation is still followed.
MAX_MEMORY_S = 30.0
# A turn counts as at most MAX_TURN_S seconds, so that no single one outweighs several.
MAX_TURN_S = 5.0
# A voice is accepted as the user's after SURE_TURNS turns. Until then no turn is ignored: the first one may have been a
# television's, or a cough.
SURE_TURNS = 2
# Until then, another voice with TAKEOVER_TURNS turns in a row replaces the first one.
TAKEOVER_TURNS = 3


class TurnSpeaker(Enum):
    """Who said a turn. UNDECIDED counts as the user: losing a user's turn costs more than answering one too many."""

    USER = "user"
    OTHER = "other"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SpeakerVerdict:
    """Who said a turn, and the deciding similarity, in [-1, 1]; None if there was no voice to compare with."""

    speaker: TurnSpeaker
    similarity: float | None = None

    @property
    def is_other(self) -> bool:
        """Whether the turn is neither answered nor allowed to interrupt."""
        return self.speaker is TurnSpeaker.OTHER


@dataclass(slots=True)
class _Voice:
    """A voice as the mean of its turns' vectors, weighted by their seconds. `mean` float32 [size], length 1."""

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
        # Opposite vectors have no mean; the voice stays unchanged.
        if (length := float(np.linalg.norm(mean))) > 0:
            self.mean = np.asarray(mean / length, np.float32)
        self.heard_s = min(MAX_MEMORY_S, self.heard_s + speech_s)
        self.num_turns += 1


# Precedence of the verdicts of several enrolled voices.
_ORDER = (TurnSpeaker.USER, TurnSpeaker.UNDECIDED, TurnSpeaker.OTHER)


class PrimarySpeaker:
    """Tracks the user's voice in one conversation.

    Call `judge` early within a turn that may interrupt, and `heard` once for each turn that is over. In the mode `off`
    every verdict is UNDECIDED, and no vectors are needed.
    """

    def __init__(
        self, mode: PrimarySpeakerMode, profile: SpeakerProfile, enrolled: Sequence[EnrolledVoice] = ()
    ) -> None:
        """`profile`: of the encoder that makes all vectors. `enrolled`: the user's voices, in the mode `enrolled`;
        several may belong to one person, such as recordings in several rooms. Raises ValueError if that mode has none,
        if another mode has some, or if one has another size.
        """
        if (mode == "enrolled") != bool(enrolled):
            raise ValueError("the mode `enrolled` needs a voice, and the others take none")
        if any(voice.vector.shape != (profile.size,) or voice.speech_s <= 0 for voice in enrolled):
            raise ValueError(
                f"a voice for {profile.id} needs a vector of {profile.size} numbers and speech of more than 0 s"
            )
        self.mode = mode
        self._profile = profile
        # The user's voice, as heard and with noise added, or all enrolled voices.
        self._users = [_Voice(voice.vector, voice.speech_s) for voice in enrolled]
        self._num_turns = SURE_TURNS if enrolled else 0
        # The other voice heard last, while the first may still turn out to be the wrong one.
        self._rival: _Voice | None = None
        # The vector of the previous turn, if that was another speaker's.
        self._other_before: Pcm | None = None

    @property
    def knows_user(self) -> bool:
        """Whether the user's voice is known, so that a verdict may be OTHER."""
        return self._num_turns >= SURE_TURNS

    def judge(self, vector: Pcm, speech_s: float) -> SpeakerVerdict:
        """Return whose voice a vector is, of a whole turn or of its beginning. Learns nothing.

        `vector`: float32 [profile.size], length 1. `speech_s`: the seconds of speech that it was made from. Without a
        voice to compare with, the verdict is UNDECIDED, and before `knows_user` it is never OTHER. With less than
        `profile.least_s` of speech it is never USER, and OTHER only after a turn of another voice that it is nearer to.
        """
        verdict = self._compared(vector, speech_s)
        if verdict.speaker is TurnSpeaker.OTHER and not self.knows_user:
            return SpeakerVerdict(TurnSpeaker.UNDECIDED, verdict.similarity)
        return verdict

    def heard(self, vector: Pcm, speech_s: float, takes: Sequence[Pcm] = ()) -> SpeakerVerdict:
        """Judge a turn that is over, see `judge`, and in the mode `auto` learn from it.

        `takes`: the vectors of the turn's `enrolment_takes` (`turns/voices/enrolment.py`) with synthetic noise, which
        let the user be recognized if noise begins later. They are needed while `knows_user` is false; later ones are
        used too.

        The first turn is assumed to be the user's, and so are later turns that may have the same voice, until
        SURE_TURNS have been heard. Until then another voice with TAKEOVER_TURNS turns in a row replaces it. From then
        on, turns of MIN_LEARN_S that surely have the same voice move it, by less and less as more is heard.
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
        """Return the best verdict over the user's voices, even if little is known of them."""
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
        """Move the nearest of the user's voices, and the noisy ones if `takes` has as many vectors."""
        max(self._users, key=lambda user: float(user.mean @ vector)).learn(vector, speech_s)
        if len(takes) == len(self._users) - 1:
            for user, take in zip(self._users[1:], takes, strict=True):
                user.learn(take, speech_s)
        self._num_turns += 1
        self._rival = None

    def _challenge(self, vector: Pcm, speech_s: float) -> None:
        """Count a turn of another voice than the first one. With TAKEOVER_TURNS turns it replaces the first one."""
        if self._rival is None or self._rival.judge(vector, speech_s, self._profile).speaker is TurnSpeaker.OTHER:
            self._rival = _Voice(vector, speech_s)
            return
        self._rival.learn(vector, speech_s)
        if self._rival.num_turns >= TAKEOVER_TURNS:
            self._users, self._num_turns, self._rival = [self._rival], self._rival.num_turns, None
