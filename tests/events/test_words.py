"""The form in which words are compared."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.events.words import bare_word


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (" King.", "king"),
        ("don't", "don't"),
        ("\u017etext\u017f", "\u017etexts"),
        ("\uff21\uff22", "ab"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947!", "\u0928\u092e\u0938\u094d\u0924\u0947"),
        ("21st", "21st"),
        (" ... ", ""),
        ("", ""),
    ],
)
def test_a_word_is_compared_by_its_letters_marks_and_digits(text: str, bare: str) -> None:
    assert bare_word(text) == bare


@given(st.text(max_size=6))
def test_nothing_but_letters_marks_digits_and_apostrophes_is_left(text: str) -> None:
    folded = unicodedata.normalize("NFKC", text).casefold()
    assert bare_word(text) == "".join(c for c in folded if c == "'" or unicodedata.category(c)[0] in "LNM")
