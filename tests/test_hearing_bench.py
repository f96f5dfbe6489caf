"""The figures of `antiphon bench asr`: word errors, first words, and differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.hearing.client import FileText, Heard
from bench.hearing.clips import Clip, spread
from bench.hearing.figures import difference, errors_row, first_words_s, matches, readings, word_delays
from bench.hearing.ghosts import FLOORS, pieces_of
from bench.words import score

from antiphon.audio import SAMPLE_RATE_HZ


def clip(text: str, name: str = "a", *, language: str = "en", speech_start: float = 0.0) -> Clip:
    return Clip(name, Path(), 2.0, text, language, "asr_read", speech_start, 2.0)


def final(*turns: str) -> Heard:
    return Heard(finals=[(1.0, t) for t in turns], turns=[(t, t) for t in turns])


def test_difference_is_paired():
    # Two systems make errors on the same clips and differ on only one clip, although the clips themselves vary widely.
    found = difference([(9, 9), (0, 0), (5, 5), (1, 0)], [10, 10, 10, 10])
    assert found.points == pytest.approx(2.5)
    assert found.low == 0.0
    assert 2.5 < found.high <= 10.0


def test_difference_of_the_same_errors_has_no_width():
    found = difference([(3, 3), (1, 1)], [10, 20])
    assert (found.points, found.low, found.high) == (0.0, 0.0, 0.0)


def test_difference_prints_its_interval():
    assert str(difference([(1, 0)], [10])) == "+10.0 [+10.0, +10.0]"


def test_errors_row_counts_each_reading_against_the_text():
    one = clip("she had your dark suit")
    heard = Heard(finals=[(1.0, "She had"), (2.0, "dark suit")], turns=[("she had your", "She had"), ("", "dark suit")])
    row = errors_row(readings([one], {"a": heard}, {"a": FileText("She had your dark suit.", "en")}))
    assert (row["live"], row["shown"], row["file"]) == (20.0, 40.0, 0.0)
    assert row["live_minus_file"] == (20.0, 20.0, 20.0)
    assert (row["words"], row["turns_a_clip"], row["failures"]) == (5, 2.0, 0)


def test_scripts_without_spaces_are_counted_by_characters():
    one = clip("今天天气", language="zh")
    row = errors_row(readings([one], {"a": final("今天 天气")}, {"a": FileText("今天天", "zh")}))
    assert (row["words"], row["live"], row["file"]) == (4, 0.0, 25.0)


def test_a_numeral_may_stand_for_its_digits():
    assert score("order number one two three four", "Order number 1234.") == (0, 6)
    assert score("one thousand two hundred thirty four", "1234") == (0, 6)


def test_first_words_that_were_not_said_do_not_count():
    one = clip("she had your dark suit", speech_start=0.25)
    heard = Heard(deltas=[(0.5, "Thank you."), (1.0, " She"), (1.5, " had")])
    assert first_words_s(one, heard) == 0.75


def test_later_words_are_no_first_words():
    one = clip("she had your dark suit in greasy wash water")
    assert first_words_s(one, Heard(deltas=[(1.0, "dark suit")])) is None
    assert first_words_s(one, Heard()) is None


def test_word_delays_are_from_the_end_of_each_word():
    heard = Heard(deltas=[(1.0, "She"), (1.5, " had suits")])
    spoken = [("She", 0.1, 0.25), (" had", 0.25, 0.5), (" dark", 0.5, 0.75)]
    assert word_delays(clip("she had dark"), heard, spoken) == [0.75, 1.0]


def test_matches_are_in_order():
    assert matches(["a", "b", "c"], ["b", "x", "c"]) == [(1, 0), (2, 2)]


def test_noise_lasts_the_minutes_and_repeats_after_every_clip_was_heard():
    clips = [clip("", str(k)) for k in range(5)]
    for one in clips:
        one.pcm = np.ones(SAMPLE_RATE_HZ, np.float32)
    pieces = pieces_of(clips, 2.0)
    assert sum(len(pcm) for _, pcm in pieces) >= 120 * SAMPLE_RATE_HZ
    one_round = len(clips) + len(FLOORS)
    assert len({name for name, _ in pieces[:one_round]}) == one_round
    assert [n for n, _ in pieces[one_round : 2 * one_round]] != [n for n, _ in pieces[:one_round]]


def test_spread_takes_clips_from_all_over():
    clips = [clip("", f"{k:02}") for k in range(10)]
    assert [c.id for c in spread(clips, 5)] == ["00", "02", "04", "06", "08"]
    assert len(spread(clips, 0)) == 10
