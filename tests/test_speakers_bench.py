"""The figures of `bench/turn_taking/speakers.py`: disjoint turns, stretches of one speaker, intervals."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from bench.speakers import scored
from bench.turn_taking import dialogues
from bench.turn_taking.dialogues import HALVES, PAUSE_S, TURN_S, mixed, voices_of
from bench.turn_taking.enrolled import (
    ENROLLED_S,
    MOST_OTHER,
    NOISES,
    READERS_UNKNOWN,
    Speaker,
    by_reader,
    least_of_each,
    others_of,
    parted,
)
from bench.turn_taking.speakers import (
    FIRST_S,
    LENGTHS_S,
    MOST_TURNS,
    Outcome,
    Turn,
    Voice,
    alone,
    cut,
    interval,
    may_be_same,
    read_voices,
)

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import TranscriptSegment
from antiphon.events.words import Word
from tests.conftest import DATA
from tests.scripted import ScriptedDetector


def test_turns_share_no_sample_and_there_are_as_many_of_each_length() -> None:
    # Each sample has a distinct value.
    speech = np.linspace(0.1, 0.2, 60 * SAMPLE_RATE_HZ, dtype=np.float32)
    turns = cut([speech])
    assert [turn.length_s for turn in turns[: len(FIRST_S)]] == list(FIRST_S)
    counted = [turn.length_s for turn in turns[len(FIRST_S) :]]
    assert {length_s: counted.count(length_s) for length_s in LENGTHS_S} == dict.fromkeys(LENGTHS_S, MOST_TURNS)
    for turn, following in pairwise(turns):
        assert turn.pcm[-1] < following.pcm[0]
    # A short recording yields turns that are shorter.
    assert [turn.length_s for turn in cut([speech[: 5 * SAMPLE_RATE_HZ]])] == [2.0, 1.0, 2.0]


def test_a_speaker_of_a_meeting_is_taken_where_nobody_else_speaks() -> None:
    rttm = [(0.0, 4.0, "A"), (3.0, 6.0, "B"), (5.5, 9.0, "A")]
    assert alone(rttm, "A") == [(0.0, 3.0), (6.0, 9.0)]
    assert alone(rttm, "B") == [(4.0, 5.5)]


def test_an_interval_is_never_a_point() -> None:
    outcomes = [Outcome(f"user-{k % 20}", "quiet", "auto", 2.0, True, False) for k in range(100)]
    assert interval(outcomes, lambda o: o.other) == [0.0, pytest.approx(16.8, abs=0.1)]
    assert interval(outcomes, lambda o: o.own) == [pytest.approx(83.2, abs=0.1), 100.0]


def test_voices_of_a_crowd_may_be_one_speaker() -> None:
    voices = {voice.name: voice for voice in read_voices(DATA)}
    assert not may_be_same(voices["lj"], voices["jfk"])
    assert may_be_same(voices["lj"], voices["lj"])
    assert not may_be_same(voices["fleurs-de-001"], voices["fleurs-es-000"])


def test_a_user_is_enrolled_with_other_speech_than_is_judged() -> None:
    # Each sample has a distinct value.
    speech = np.linspace(0.1, 0.2, 60 * SAMPLE_RATE_HZ, dtype=np.float32)
    most = int(ENROLLED_S[-1] * SAMPLE_RATE_HZ)
    for recordings, is_apart in (([speech], False), (np.split(speech, 6), True)):
        enrolled, rest, apart = asyncio.run(parted(recordings, ScriptedDetector()))
        assert apart == is_apart
        assert len(enrolled) == most
        assert enrolled.max() < min(pcm.min() for pcm in rest)
    # With too little speech of the voice, all of it counts as another voice.
    enrolled, rest, _ = asyncio.run(parted([speech[: 6 * SAMPLE_RATE_HZ]], ScriptedDetector()))
    assert (len(enrolled), sum(map(len, rest))) == (0, 6 * SAMPLE_RATE_HZ)


def test_readers_whose_names_are_unknown_are_no_other_voices_of_each_other() -> None:
    pcm = np.zeros(4, np.float32)
    found = {("one", "read", "en"): [pcm, pcm], ("many", READERS_UNKNOWN, "fr"): [pcm, pcm]}
    assert [name for (name, *_), _ in by_reader(found)] == ["one", "many-0", "many-1"]
    turns = tuple(Turn(2.0, pcm) for _ in range(MOST_OTHER + 2))
    one, *many = [
        Speaker(Voice(name, corpus, language, (), turns), {}, False, dict.fromkeys(NOISES, turns))
        for (name, corpus, language), _ in by_reader(found)
    ]
    assert others_of(one, [one, *many]) == many
    assert others_of(many[0], [one, *many]) == [one]
    assert len(least_of_each(one, NOISES[0])) == MOST_OTHER


def test_no_voice_is_in_both_halves_of_the_dialogues() -> None:
    halves = [voices_of(DATA, half) for half in HALVES]
    assert all(halves)
    for one in halves[0]:
        for other in halves[1]:
            assert not may_be_same(one, other)


def test_a_dialogue_has_each_voice_and_no_sample_twice() -> None:
    voices = {Voice(name, name, "en", (), ()): [ramp(low)] for name, low in (("a", 0.1), ("b", 0.3))}
    dialogue = mixed("one", voices, "quiet", [], np.random.default_rng(0))
    assert dialogue.speakers == {"a", "b"}
    lengths = [turn.end_s - turn.start_s for turn in dialogue.turns]
    assert min(lengths) >= TURN_S[0] - 0.01
    assert max(lengths) <= TURN_S[1] + 0.4
    total_s = sum(turn.end_s - turn.start_s for turn in dialogue.turns)
    assert total_s <= 2 * 30 + 0.01
    assert dialogue.turns[-1].end_s <= len(dialogue.pcm) / SAMPLE_RATE_HZ
    # The next speaker interrupts the previous one, or speaks after a pause.
    for turn, following in pairwise(dialogue.turns):
        assert following.start_s - turn.end_s <= PAUSE_S[1] + 0.01


def ramp(low: float) -> Pcm:
    """Return 30 s of noise that never falls silent."""
    noise = np.random.default_rng(1).normal(0, 0.02, 30 * SAMPLE_RATE_HZ)
    return np.asarray(np.clip(noise + low, low / 2, 2 * low), np.float32)


def segment(speaker: str, *middles_s: float) -> TranscriptSegment:
    words = tuple(Word("x", middle - 0.1, middle + 0.1, 1.0) for middle in middles_s)
    return TranscriptSegment(0, 0, 0.0, 1.0, "x", (), 0.0, 0.0, 1.0, 0.0, words, (), speaker)


def test_a_word_is_wrong_if_none_of_those_who_speak_has_its_label() -> None:
    turns = [dialogues.Turn(0, 2, "ann"), dialogues.Turn(1.5, 4, "bob"), dialogues.Turn(6, 6.5, "ann")]
    segments = [segment("A", 0.5, 1.0, 1.7), segment("B", 1.8, 2.5, 6.3), segment("C", 3.0), segment("A", 9.0)]
    words = scored(segments, turns)
    # 1.7 and 1.8 are overlapped, 6.3 is Ann's, C is nobody's label, and nobody speaks at 9.0.
    assert [(word.user, word.wrong) for word in words] == [
        *(("ann", False), ("ann", False), ("ann", False)),
        *(("bob", False), ("bob", False), ("ann", True), ("bob", True)),
    ]
    assert [word.turn_s for word in words][-2:] == [0.5, 2.5]
