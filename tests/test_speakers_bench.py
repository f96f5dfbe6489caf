"""The figures of `bench/turn_taking/speakers.py`: disjoint turns, stretches of one speaker, intervals."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
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

from antiphon.audio import SAMPLE_RATE_HZ
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
