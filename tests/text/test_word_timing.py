"""Times of words, estimated from the pace of speech."""

from __future__ import annotations

import pytest

from antiphon.text.word_timing import LETTERS_PER_S, WordPacer, spread_words


def test_when_there_is_audio_for_a_words_letters_then_the_word_is_returned() -> None:
    pacer = WordPacer()
    pacer.feed("abc def gh")
    assert pacer.advance(2.9 / LETTERS_PER_S) == ()
    (first,) = pacer.advance(0.2 / LETTERS_PER_S)
    assert (first.text, first.start_s, first.end_s) == ("abc", 0.0, pytest.approx(3 / LETTERS_PER_S))
    # Only the second word: the third may be incomplete.
    assert [w.text for w in pacer.advance(20 / LETTERS_PER_S)] == ["def"]
    pacer.feed("i jk")
    assert [w.text for w in pacer.advance(0.0)] == ["ghi"]
    assert [w.text for w in pacer.finish()] == ["jk"]
    assert pacer.finish() == ()


def test_when_the_audio_is_over_then_the_words_that_are_left_share_the_rest() -> None:
    pacer = WordPacer()
    pacer.feed("one two threefour")
    assert [w.text for w in pacer.advance(3 / LETTERS_PER_S)] == ["one"]
    pacer.advance(1 / LETTERS_PER_S)
    two, last = pacer.finish()
    assert two.start_s == pytest.approx(3 / LETTERS_PER_S)
    assert last.end_s == pytest.approx(4 / LETTERS_PER_S)
    assert two.end_s - two.start_s == pytest.approx(0.25 / LETTERS_PER_S)


def test_when_words_are_spread_then_they_share_the_audio_by_their_letters() -> None:
    first, second = spread_words(["one", "seven"], 2.0, 4.0)
    assert (first.text, first.start_s, first.end_s) == ("one", 2.0, 3.5)
    assert (second.text, second.start_s, second.end_s) == ("seven", 3.5, 6.0)
    assert spread_words([], 1.0, 1.0) == []


def test_when_text_has_ideographs_then_each_takes_longer_than_a_letter() -> None:
    pacer = WordPacer()
    pacer.feed("\u4f60\u597d x\u4f60")
    assert pacer.advance(2.9 / LETTERS_PER_S) == ()
    assert [w.text for w in pacer.advance(0.2 / LETTERS_PER_S)] == ["\u4f60"]
    assert [w.text for w in pacer.advance(3 / LETTERS_PER_S)] == ["\u597d"]
    assert [w.text for w in pacer.advance(1 / LETTERS_PER_S)] == ["x"]
    (last,) = pacer.finish()
    assert last.text == "\u4f60"
