"""Words guessed into sound."""

from __future__ import annotations

import pytest

from antiphon.text.word_timing import PACE, WordPacer


def test_words_come_when_their_letters_were_spoken() -> None:
    paced = WordPacer()
    paced.write("abc def gh")
    assert paced.sound(2.9 / PACE) == ()
    (first,) = paced.sound(0.2 / PACE)
    assert (first.text, first.start_s, first.end_s) == ("abc", 0.0, pytest.approx(3 / PACE))
    # The second; the third may be written on.
    assert [w.text for w in paced.sound(20 / PACE)] == ["def"]
    paced.write("i jk")
    assert [w.text for w in paced.sound(0.0)] == ["ghi"]
    assert [w.text for w in paced.end()] == ["jk"]
    assert paced.end() == ()


def test_what_is_left_ends_with_the_sound() -> None:
    paced = WordPacer()
    paced.write("one two threefour")
    assert [w.text for w in paced.sound(3 / PACE)] == ["one"]
    paced.sound(1 / PACE)
    two, last = paced.end()
    assert two.start_s == pytest.approx(3 / PACE)
    assert last.end_s == pytest.approx(4 / PACE)
    assert two.end_s - two.start_s == pytest.approx(0.25 / PACE)


def test_ideographs_take_longer() -> None:
    paced = WordPacer()
    paced.write("\u4f60\u597d x\u4f60")
    assert paced.sound(2.9 / PACE) == ()
    assert [w.text for w in paced.sound(0.2 / PACE)] == ["\u4f60"]
    assert [w.text for w in paced.sound(3 / PACE)] == ["\u597d"]
    assert [w.text for w in paced.sound(1 / PACE)] == ["x"]
    (last,) = paced.end()
    assert last.text == "\u4f60"
