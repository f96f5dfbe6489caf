"""Words guessed into sound."""

from __future__ import annotations

import pytest

from antiphon.text.word_timing import LETTERS_PER_S, WordPacer


def test_words_come_when_their_letters_were_spoken() -> None:
    paced = WordPacer()
    paced.feed("abc def gh")
    assert paced.advance(2.9 / LETTERS_PER_S) == ()
    (first,) = paced.advance(0.2 / LETTERS_PER_S)
    assert (first.text, first.start_s, first.end_s) == ("abc", 0.0, pytest.approx(3 / LETTERS_PER_S))
    # The second; the third may be written on.
    assert [w.text for w in paced.advance(20 / LETTERS_PER_S)] == ["def"]
    paced.feed("i jk")
    assert [w.text for w in paced.advance(0.0)] == ["ghi"]
    assert [w.text for w in paced.finish()] == ["jk"]
    assert paced.finish() == ()


def test_what_is_left_ends_with_the_sound() -> None:
    paced = WordPacer()
    paced.feed("one two threefour")
    assert [w.text for w in paced.advance(3 / LETTERS_PER_S)] == ["one"]
    paced.advance(1 / LETTERS_PER_S)
    two, last = paced.finish()
    assert two.start_s == pytest.approx(3 / LETTERS_PER_S)
    assert last.end_s == pytest.approx(4 / LETTERS_PER_S)
    assert two.end_s - two.start_s == pytest.approx(0.25 / LETTERS_PER_S)


def test_ideographs_take_longer() -> None:
    paced = WordPacer()
    paced.feed("\u4f60\u597d x\u4f60")
    assert paced.advance(2.9 / LETTERS_PER_S) == ()
    assert [w.text for w in paced.advance(0.2 / LETTERS_PER_S)] == ["\u4f60"]
    assert [w.text for w in paced.advance(3 / LETTERS_PER_S)] == ["\u597d"]
    assert [w.text for w in paced.advance(1 / LETTERS_PER_S)] == ["x"]
    (last,) = paced.finish()
    assert last.text == "\u4f60"
