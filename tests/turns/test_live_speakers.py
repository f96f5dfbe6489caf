"""Labels of live turns, from vectors whose voices are known."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.contracts import speaker_label
from antiphon.contracts.speaker import SpeakerProfile, VoiceClustering, VoiceThreshold
from antiphon.events.transcription import KnownVoice
from antiphon.turns.voices.live_speakers import MAX_VOICES, LiveSpeakers

SIZE = 128
CHANNEL = np.eye(1, SIZE, SIZE - 1, dtype=np.float32)
CLUSTERING = VoiceClustering(1.6, 0.4, 0.3, 0.6, 0.5, 4.0, 0.5, 1.0, 0.5, CHANNEL)
PROFILE = SpeakerProfile("test", SIZE, 0.6, (VoiceThreshold(1.0, 0.3, 0.5),))


def speakers() -> LiveSpeakers:
    return LiveSpeakers(PROFILE, CLUSTERING)


def voice(number: int) -> Pcm:
    return np.eye(1, SIZE, number, dtype=np.float32)[0]


def turn(number: int, chance: np.random.Generator, speech_s: float, line: float = 0.0) -> Pcm:
    """Return the vector of a turn: the voice, a random part that is larger for a short turn, and the line."""
    noise = chance.normal(size=SIZE) * np.sqrt(0.5 / speech_s / SIZE)
    vector = voice(number) + noise + line * CHANNEL[0]
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def test_labels_are_in_the_order_in_which_voices_are_first_heard() -> None:
    found, chance = speakers(), np.random.default_rng(0)
    said = [7, 2, 7, 5, 2, 2, 7, 5]
    assert [found.label(turn(n, chance, 2.0), 2.0) for n in said] == ["A", "B", "A", "C", "B", "B", "A", "C"]


@pytest.mark.parametrize("speech_s", [0.7, 1.0, 3.0])
def test_turns_of_any_length_have_the_label_of_their_voice(speech_s: float) -> None:
    found, chance = speakers(), np.random.default_rng(1)
    for number in range(4):
        found.label(turn(number, chance, 3.0), 3.0)
    labels = [found.label(turn(k % 4, chance, speech_s), speech_s) for k in range(40)]
    assert np.mean([label == speaker_label(k % 4) for k, label in enumerate(labels)]) > 0.9


def test_a_turn_that_is_too_short_has_no_label() -> None:
    found = speakers()
    # 0.2 s of speech: the vector means nothing.
    assert found.label(voice(0), 0.2) == ""
    # Not long enough to begin a voice.
    assert found.label(voice(0), 0.7) == ""
    assert found.label(voice(0), 2.0) == "A"
    assert found.label(voice(0), 0.7) == "A"
    assert found.label(voice(1), 0.7) == ""


def test_a_short_turn_is_compared_by_what_can_be_expected_of_it() -> None:
    # As similar as a turn of 0.7 s of the same voice usually is, but too different for one of 20 s.
    halfway = np.asarray(0.45 * voice(0) + np.sqrt(1 - 0.45**2) * voice(1), np.float32)
    for speech_s, label in ((0.7, "A"), (20.0, "B")):
        found = speakers()
        found.label(voice(0), 20.0)
        assert found.label(halfway, speech_s) == label


def test_one_voice_is_one_speaker_however_long_it_speaks() -> None:
    found, chance = speakers(), np.random.default_rng(3)
    assert {found.label(turn(0, chance, 2.0), 2.0) for _ in range(1800)} == {"A"}


def test_forty_voices_are_forty_speakers() -> None:
    found, chance = speakers(), np.random.default_rng(4)
    labels = [found.label(turn(k % 40, chance, 3.0), 3.0) for k in range(120)]
    assert labels == [speaker_label(k % 40) for k in range(120)]


def test_the_number_of_voices_is_bounded() -> None:
    found = speakers()
    for k in range(MAX_VOICES):
        found.label(voice(k), 3.0)
    assert found.label(voice(MAX_VOICES + 1), 3.0) in map(speaker_label, range(MAX_VOICES))
    assert found.num_labels == MAX_VOICES


def test_a_line_that_all_voices_share_does_not_make_them_one() -> None:
    found, chance = speakers(), np.random.default_rng(5)
    assert [found.label(turn(n, chance, 3.0, line=3.0), 3.0) for n in (0, 1, 0)] == ["A", "B", "A"]


def test_known_speakers_have_their_names_and_no_label_is_a_name() -> None:
    found = speakers()
    found.know((KnownVoice("Ann", voice(4), 5.0), KnownVoice("A", voice(9), 5.0)))
    assert [found.label(voice(n), 2.0) for n in (4, 3, 9, 3, 4)] == ["Ann", "B", "A", "B", "Ann"]
    # From now on, nobody has a name. A voice that had one gets a label.
    found.know(())
    assert [found.label(voice(n), 2.0) for n in (3, 4)] == ["B", "C"]


def test_a_session_that_goes_on_elsewhere_gives_no_label_twice() -> None:
    found = speakers()
    for number in range(3):
        found.label(voice(number), 2.0)
    later = speakers()
    later.num_labels = found.num_labels
    assert [later.label(voice(n), 2.0) for n in (2, 5, 2)] == ["D", "E", "D"]


def test_a_label_never_stands_for_another_voice() -> None:
    """However turns vary, a voice keeps its label: a mixture of two voices does not move it to the other one."""
    found, chance = speakers(), np.random.default_rng(6)
    found.label(voice(0), 5.0), found.label(voice(1), 5.0)
    for _ in range(50):
        mixed = turn(0, chance, 2.0) + turn(1, chance, 2.0)
        found.label(np.asarray(mixed / np.linalg.norm(mixed), np.float32), 2.0)
    assert [found.label(voice(n), 3.0) for n in (0, 1)] == ["A", "B"]


def test_labels_after_z_have_two_letters() -> None:
    assert [*islice(map(speaker_label, range(25, 28)), 3)] == ["Z", "AA", "AB"]
