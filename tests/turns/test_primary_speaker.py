"""Recognizes the user, with synthetic voices: each voice is a direction, and each turn adds a random part to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.contracts import SpeakerProfile, VoiceThreshold
from antiphon.events.transcription import EnrolledVoice
from antiphon.turns.voices.primary_speaker import (
    MAX_MEMORY_S,
    SURE_TURNS,
    TAKEOVER_TURNS,
    PrimarySpeaker,
    TurnSpeaker,
)

SIZE = 64
PROFILE = SpeakerProfile("toy", SIZE, 0.6, (VoiceThreshold(0.5, 0.2, 0.4), VoiceThreshold(1.5, 0.4, 0.6)))


class Person:
    """A voice. `turn` returns the vector of a turn. Its random part is `spread` times as long as the voice's vector."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self.voice = self._vector()

    def turn(self, spread: float = 0.3) -> Pcm:
        mixed = self.voice + spread * self._vector()
        return np.asarray(mixed / np.linalg.norm(mixed), np.float32)

    def _vector(self) -> Pcm:
        vector = self._chance.normal(size=SIZE)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def known(user: Person) -> PrimarySpeaker:
    """Return a conversation in which the user has said two turns."""
    speaker = PrimarySpeaker("auto", PROFILE)
    for _ in range(SURE_TURNS):
        speaker.heard(user.turn(), 2.0)
    assert speaker.knows_user
    return speaker


def test_when_the_user_was_heard_twice_then_another_voice_is_told_apart() -> None:
    user, television = Person(1), Person(2)
    speaker = PrimarySpeaker("auto", PROFILE)
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.UNDECIDED
    # A single turn may be a television, so no turn is ignored yet.
    assert not speaker.knows_user
    verdict = speaker.heard(television.turn(), 2.0)
    assert verdict.speaker is TurnSpeaker.UNDECIDED
    assert verdict.similarity is not None
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER
    assert speaker.knows_user
    for _ in range(5):
        assert speaker.heard(television.turn(), 3.0).is_other
        assert speaker.heard(user.turn(), 3.0).speaker is TurnSpeaker.USER


def test_when_a_turn_goes_on_then_it_is_judged_and_nothing_is_learned() -> None:
    user, television = Person(3), Person(4)
    speaker = known(user)
    for _ in range(20):
        assert speaker.judge(television.turn(), 0.6).is_other
    assert not speaker.judge(user.turn(), 0.6).is_other


def test_when_a_turn_has_too_little_speech_then_it_is_the_users() -> None:
    speaker = known(Person(5))
    assert speaker.heard(Person(6).turn(), 0.5).speaker is TurnSpeaker.UNDECIDED
    assert speaker.heard(Person(6).turn(), 0.6).is_other


def test_when_a_turn_is_too_short_to_be_judged_then_it_is_not_learned() -> None:
    speaker, user = PrimarySpeaker("auto", PROFILE), Person(7)
    speaker.heard(Person(8).turn(), 0.5)
    for _ in range(SURE_TURNS):
        speaker.heard(user.turn(), 1.0)
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER
    assert speaker.heard(Person(8).turn(), 2.0).is_other


def test_when_the_first_turn_was_a_televisions_then_the_user_takes_its_place() -> None:
    user, television = Person(9), Person(10)
    speaker = PrimarySpeaker("auto", PROFILE)
    speaker.heard(television.turn(), 4.0)
    # None of the user's turns is lost meanwhile.
    assert [speaker.heard(user.turn(), 2.0).speaker for _ in range(TAKEOVER_TURNS)] == [TurnSpeaker.UNDECIDED] * 3
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER
    assert speaker.heard(television.turn(), 4.0).is_other


def test_when_a_pause_cuts_off_the_end_of_anothers_turn_then_that_is_anothers_too() -> None:
    user, television = Person(25), Person(26)
    speaker = known(user)
    # No turn preceded it.
    assert speaker.heard(television.turn(), 0.4).speaker is TurnSpeaker.UNDECIDED
    assert speaker.heard(television.turn(), 2.0).is_other
    assert speaker.heard(television.turn(), 0.4).is_other
    assert speaker.heard(television.turn(), 0.4).is_other
    # A turn that is equally near to both voices is the user's, and so is a turn that is too short to have a voice.
    both = user.voice + television.voice
    assert not speaker.judge(np.asarray(both / np.linalg.norm(both), np.float32), 0.4).is_other
    assert not speaker.judge(television.turn(), 0.1).is_other
    assert not speaker.judge(user.turn(), 0.4).is_other
    # The user has spoken since then, if only a word.
    assert speaker.heard(user.turn(), 0.4).speaker is TurnSpeaker.UNDECIDED
    assert not speaker.heard(television.turn(), 0.4).is_other


def test_until_the_user_is_known_short_turns_that_may_be_of_the_same_voice_teach_too() -> None:
    user, television = Person(22), Person(23)
    speaker = PrimarySpeaker("auto", PROFILE)
    speaker.heard(user.turn(), 0.7)
    # This voice is similar to the user's, but not surely the user's.
    alike = user.voice + 3.5 * television.voice
    assert speaker.heard(np.asarray(alike / np.linalg.norm(alike), np.float32), 0.7).speaker is TurnSpeaker.UNDECIDED
    assert speaker.knows_user
    for _ in range(3):
        assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER
    assert speaker.heard(Person(24).turn(), 2.0).is_other
    # From now on, short or doubtful turns are judged but not learned.
    before = speaker.judge(user.voice, 2.0).similarity
    speaker.heard(user.voice, 0.9)
    assert speaker.judge(user.voice, 2.0).similarity == before


def test_when_the_user_is_known_then_no_other_voice_takes_the_place() -> None:
    user, television = Person(11), Person(12)
    speaker = known(user)
    assert all(speaker.heard(television.turn(), 4.0).is_other for _ in range(20))
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER


def test_when_the_voice_changes_slowly_then_it_is_followed() -> None:
    user, hoarse = Person(13), Person(14)
    speaker = known(user)
    for step in range(60):
        share = step / 60
        vector = (1 - share) * user.voice + share * hoarse.voice
        assert not speaker.heard(np.asarray(vector / np.linalg.norm(vector), np.float32), 4.0).is_other
    assert speaker.heard(hoarse.turn(), 4.0).speaker is TurnSpeaker.USER


def test_when_one_wrong_turn_is_learned_then_the_user_stays() -> None:
    user, other = Person(15), Person(16)
    speaker = known(user)
    for _ in range(int(MAX_MEMORY_S / 4)):
        speaker.heard(user.turn(), 4.0)
    wrong = user.voice + 0.8 * other.voice
    assert speaker.heard(np.asarray(wrong / np.linalg.norm(wrong), np.float32), 60.0).speaker is TurnSpeaker.USER
    assert speaker.heard(other.turn(), 2.0).is_other
    assert speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER


def test_when_noise_begins_later_then_the_user_is_known_by_the_takes() -> None:
    user, noise = Person(17), Person(18)
    noisy = np.asarray((user.voice + 6 * noise.voice) / np.linalg.norm(user.voice + 6 * noise.voice), np.float32)
    alone, with_takes = PrimarySpeaker("auto", PROFILE), PrimarySpeaker("auto", PROFILE)
    for _ in range(SURE_TURNS):
        alone.heard(user.turn(), 2.0)
        with_takes.heard(user.turn(), 2.0, [noisy])
    assert alone.judge(noisy, 2.0).is_other
    assert with_takes.heard(noisy, 2.0).speaker is TurnSpeaker.USER
    assert with_takes.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER


def test_when_voices_are_enrolled_then_only_they_are_the_user_and_nothing_is_learned() -> None:
    users, other = (Person(19), Person(20)), Person(21)
    speaker = PrimarySpeaker("enrolled", PROFILE, [EnrolledVoice(user.voice, 10.0) for user in users])
    assert speaker.knows_user
    for _ in range(10):
        assert speaker.heard(other.turn(), 2.0).is_other
        assert all(speaker.heard(user.turn(), 2.0).speaker is TurnSpeaker.USER for user in users)
    speaker.forget()
    assert speaker.knows_user


def test_when_the_user_is_forgotten_then_the_next_voice_is_learned() -> None:
    speaker, second = known(Person(22)), Person(23)
    speaker.forget()
    assert not speaker.knows_user
    assert [speaker.heard(second.turn(), 2.0).speaker for _ in range(2)] == [TurnSpeaker.UNDECIDED, TurnSpeaker.USER]


def test_when_it_is_off_then_everything_is_undecided() -> None:
    speaker = PrimarySpeaker("off", PROFILE)
    for seed in (24, 25, 25):
        assert speaker.heard(Person(seed).turn(), 4.0).speaker is TurnSpeaker.UNDECIDED
    assert not speaker.knows_user


def test_when_voices_do_not_fit_the_mode_or_the_encoder_then_it_is_an_error() -> None:
    voice = EnrolledVoice(Person(26).voice, 3.0)
    for mode, voices in (("enrolled", []), ("auto", [voice]), ("off", [voice])):
        with pytest.raises(ValueError, match="mode"):
            PrimarySpeaker(mode, PROFILE, voices)  # type: ignore[arg-type]
    for wrong in (EnrolledVoice(np.ones(3, np.float32), 3.0), EnrolledVoice(voice.vector, 0.0)):
        with pytest.raises(ValueError, match="64 numbers"):
            PrimarySpeaker("enrolled", PROFILE, [wrong])


def test_when_the_profile_has_thresholds_for_enrolled_voices_then_they_hold_for_these_alone() -> None:
    profile = replace(PROFILE, enrolled=(VoiceThreshold(1.0, 0.8, 0.9),))
    user = np.asarray([1, 0], np.float32)
    near = np.asarray([0.7, np.sqrt(1 - 0.49)], np.float32)
    assert profile.threshold(4.0, 10.0) == PROFILE.threshold(4.0, 10.0)
    for made, expected in ((profile, TurnSpeaker.OTHER), (PROFILE, TurnSpeaker.USER)):
        speaker = PrimarySpeaker("enrolled", replace(made, size=2), [EnrolledVoice(user, 10.0)])
        assert speaker.judge(near, 4.0).speaker is expected
