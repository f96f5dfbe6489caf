"""A spoken word and its times in the audio, and the form in which words are compared."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One spoken word: its text without surrounding spaces, its start and end in seconds, and the model's probability
    of it in [0, 1].

    Times count from the start of whatever the word is reported with: a session's audio, a window, a file, a sentence or
    a content part. Code that passes a word on shifts its times. A word with estimated times has the probability 1.
    """

    text: str
    start_s: float
    end_s: float
    probability: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a transcript: its text in UTF-8, which may end inside a character, and the natural logarithm of its
    probability.

    The joined texts of a word's tokens are the word as the model spelled it.
    """

    utf8: bytes
    logprob: float


def bare_word(text: str) -> str:
    """Return the form of a word used for comparison: letters, marks, digits and apostrophes only, with case folded and
    compatibility forms (full-width letters, ligatures) unified. Punctuation and white space give an empty string.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().strip()
    if folded.isalnum():
        return folded
    return "".join(c for c in folded if c == "'" or unicodedata.category(c)[0] in "LNM")
