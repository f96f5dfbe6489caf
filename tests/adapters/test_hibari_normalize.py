"""Normalization for speech: the spoken form of written text, with every written word in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.adapters.hibari.normalize import MAX_PART_CHARS, parts, source_words


def said(text: str) -> str:
    return " ".join(p.text for p in parts(text) if p.text)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Hello, world!", "Hello, world!"),
        ("a\x00b\x07c \u200bd", "abc d"),
        ("say [read](/ɹˈɛd/) so", "say [read](/ɹˈɛd/) so"),
        ("٣ and ３", "3 and 3"),
        ("He said：“Ｙｅｓ！”", "He said:“Yes!”"),
        ("naïve café", "naïve café"),
        # The phonemizer truncates longer words.
        ("ha" * 400 + "!", " ".join(["ha" * 10] * 40) + "!"),
        ("Donaudampfschifffahrtsgesellschaft", "Donaudampfschifff ahrtsgesellschaft"),
        ("5 km at -3°C for $5", "5 km at -3°C for $5"),
    ],
)
def test_written_text_is_made_speakable(written: str, spoken: str) -> None:
    assert said(written) == spoken


def test_when_letters_are_of_other_scripts_then_they_are_skipped_and_reported() -> None:
    (part,) = parts("The word 你好 means hello, Привет too")
    assert part.text == "The word means hello, too"
    assert part.skipped == "你好 Привет"


def test_parts_are_sentences_and_pieces_of_long_ones() -> None:
    assert [p.text for p in parts("One. Two? Dr. Who.\nThree")] == ["One.", "Two?", "Dr. Who.", "Three"]
    long = "and so it went on, " * 60
    pieces = list(parts(long))
    assert all(len(" ".join(p.written)) <= MAX_PART_CHARS for p in pieces)
    assert all(p.text.endswith(",") for p in pieces)
    assert [w for p in pieces for w in p.written] == long.split()
    assert max(len("".join(p.written)) for p in parts("x" * 100_000)) == MAX_PART_CHARS


@given(st.text(max_size=200))
def test_any_text_keeps_its_words_in_order(text: str) -> None:
    pieces = list(parts(text))
    for piece in pieces:
        assert len(piece.written) == len(piece.spoken)
        assert piece.written
    assert "".join(w for p in pieces for w in p.written) == "".join(text.split())


@pytest.mark.parametrize(
    ("said", "normal", "expected"),
    [
        (["it", "is", "five"], ["it", "is", "five"], [0, 1, 2]),
        (["on", "3/4/2021", "there"], ["on", "March", "fourth,", "2021", "there"], [0, 1, 1, 1, 2]),
        (["a", "b dot com", "c"], ["a", "b", "dot", "com", "c"], [0, 1, 1, 1, 2]),
        (["Dr.", "Who"], ["Dr", "Who"], [0, 1]),
        (["x"], [], []),
        (["x"], ["y", "z"], [0, 0]),
    ],
)
def test_words_of_a_normalized_text_have_the_phrase_they_came_from(
    said: list[str], normal: list[str], expected: list[int]
) -> None:
    assert source_words(said, normal) == expected
