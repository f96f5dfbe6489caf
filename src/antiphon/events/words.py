"""A spoken word with its times in the audio, and the form of words that is used for comparisons."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One spoken word: its text without surrounding spaces, its start and end in seconds, and its probability.

    The probability is the model's, in [0, 1]; it is 1 if the times are estimated. Times are measured from the start of
    the audio to which the word belongs: a session, a window, a file, a sentence or a content part. Code that moves a
    word from one to another adjusts its times.
    """

    text: str
    start_s: float
    end_s: float
    probability: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a transcript: its text as UTF-8 bytes, and the natural logarithm of its probability.

    The text may end inside a character. The joined texts of a word's tokens are the word as the model spelled it.
    """

    utf8: bytes
    logprob: float


def bare_word(text: str) -> str:
    """Normalize a word for comparisons. Only letters, marks, digits and apostrophes stay.

    Case is folded, and compatibility forms (full-width letters, ligatures) are unified. Punctuation and white space
    become an empty string.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().strip()
    if folded.isalnum():
        return folded
    return "".join(c for c in folded if c == "'" or unicodedata.category(c)[0] in "LNM")
