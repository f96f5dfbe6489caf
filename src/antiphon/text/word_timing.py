"""Estimates the times of words in the audio of a voice that does not report them. The estimate uses the number of
letters of each word and the typical pace of speech.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence

from antiphon.events.words import Word
from antiphon.text.markup import pause_s

# Letters per second of read speech, without spaces. An ideograph takes the time of about three letters.
LETTERS_PER_S, IDEOGRAPH_LETTERS = 13.0, 3.0


class WordPacer:
    """Estimates the times of one spoken text's words while its audio is generated.

    Text may arrive before its audio or at the same time. A word is returned when the audio is long enough for its
    letters and all letters before it, at LETTERS_PER_S. The words left at the end share the rest of the audio. An
    ideograph counts as a word. A pause mark (`markup.py`) takes the time of its pause, but is not a word.
    """

    def __init__(self) -> None:
        # The text whose words have no times yet.
        self._text = ""
        # The seconds of audio so far, and the end of the last word that has a time.
        self._audio_s = 0.0
        self._timed_s = 0.0

    def feed(self, text: str) -> None:
        """Append text to be spoken. The text may end within a word, because a word is complete only when white space or
        an ideograph follows it.
        """
        self._text += text

    @property
    def rest(self) -> str:
        """The text whose words have no times yet."""
        return self._text

    @property
    def timed_s(self) -> float:
        """The end of the last word that has a time, in seconds from the start of the audio."""
        return self._timed_s

    def advance(self, length_s: float, until_s: float = math.inf) -> tuple[Word, ...]:
        """Add `length_s` seconds of audio, and return the words that end within the audio so far, in order, each once.
        Times are seconds from the start of the audio.

        Words that end after `until_s` are kept for a later call. Their times are more accurate when all audio is known.
        """
        self._audio_s += length_s
        out: list[Word] = []
        while word := _first_word(self._text):
            rest = self._text[self._text.index(word) + len(word) :]
            # The last word may be incomplete.
            if not rest and not _is_ideograph(word):
                break
            end_s = self._timed_s + _length_s(word)
            if end_s > min(self._audio_s, until_s):
                break
            if not pause_s(word):
                out.append(Word(word, self._timed_s, end_s, 1.0))
            self._text, self._timed_s = rest, end_s
        return tuple(out)

    def finish(self, spread: Callable[[Sequence[float]], Sequence[float]] | None = None) -> tuple[Word, ...]:
        """Return the remaining words, stretched or compressed over the remaining audio, so that the last word ends with
        the audio. After that, the next text may be fed, whose times continue from there.

        `spread`: divides the audio after `timed_s` in proportion to weights, and returns the borders of the parts in
        seconds. It knows where the audio pauses. Without it, the words divide the audio evenly.
        """
        words = list[str]()
        while word := _first_word(self._text):
            words.append(word)
            self._text = self._text[self._text.index(word) + len(word) :]
        start_s = min(self._timed_s, self._audio_s)
        if spread and words and not any(map(pause_s, words)):
            borders = spread([_length_s(word) for word in words])
            times = zip(words, borders, borders[1:], strict=False)
            out = [Word(word, start_s + from_s, start_s + to_s, 1.0) for word, from_s, to_s in times]
        else:
            out = [w for w in spread_words(words, start_s, self._audio_s - start_s, _length_s) if not pause_s(w.text)]
        self._text, self._timed_s = "", self._audio_s
        return tuple(out)


def spread_words(
    words: Sequence[str], start_s: float, length_s: float, weight: Callable[[str], float] = len
) -> list[Word]:
    """Return `words` with times, without gaps between them. The words divide `length_s` seconds of audio, which begin
    at `start_s`, in proportion to their weights, by default their numbers of letters. The probability of each word is
    1.
    """
    whole, at_s = sum(map(weight, words)), start_s
    out = list[Word]()
    for word in words:
        end_s = at_s + length_s * weight(word) / whole
        out.append(Word(word, at_s, end_s, 1.0))
        at_s = end_s
    return out


def _first_word(text: str) -> str:
    """Return the first word, or an empty string."""
    text = text.lstrip()
    if _is_ideograph(text):
        return text[0]
    end = next((i for i, c in enumerate(text) if c.isspace() or _is_ideograph(c)), len(text))
    return text[:end]


def _is_ideograph(text: str) -> bool:
    """Whether the text begins with an ideograph (or another wide or full-width character)."""
    return bool(text) and unicodedata.east_asian_width(text[0]) in "WF"


def _length_s(word: str) -> float:
    if pause := pause_s(word):
        return pause
    return sum(IDEOGRAPH_LETTERS if _is_ideograph(c) else 1.0 for c in word) / LETTERS_PER_S
