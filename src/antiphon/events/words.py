"""A spoken word with its times in the audio, and how the words of two transcripts are compared."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence
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


def end_of(sent: Sequence[str], final: Sequence[str]) -> int:
    """Return the index in `final` of the first word that follows the words in `sent`.

    `final` is a new decode of the same audio and of the audio after it, so its words may differ. They are aligned by
    similarity, ignoring case and punctuation.
    """
    sent_words, final_words = [bare_word(text) for text in sent], [bare_word(text) for text in final]
    if sent_words == final_words[: len(sent_words)]:
        return len(sent_words)
    end = 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, sent_words, final_words, autojunk=False).get_opcodes():
        if tag == "equal":
            end = j2
        elif tag == "replace":
            end = min(j2, j1 + (i2 - i1)) if i2 == len(sent_words) else j2
        elif tag == "insert" and i2 < len(sent_words):
            end = j2
    return end
