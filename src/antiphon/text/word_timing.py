"""Where words lie in the sound of a voice that does not say: guessed from the pace of speech."""

from __future__ import annotations

import unicodedata

from antiphon.events.words import Word

# Letters a second of read speech, spaces not counted; an ideograph is said in the time of about three letters.
LETTERS_PER_S, IDEOGRAPH_LETTERS = 13.0, 3.0


class WordPacer:
    """One spoken text's words, handed out as its sound comes.

    Text may come before its sound, or while there is some. A word is said when as much was spoken as its letters
    and all before them take; what is left at the end ends with the sound. An ideograph is a word of its own.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at_s = 0.0
        self._said_s = 0.0

    def feed(self, text: str) -> None:
        """Text to be spoken, as it is written: words are ended by white space, or by an ideograph."""
        self._text += text

    def advance(self, length_s: float) -> tuple[Word, ...]:
        """`length_s` more of sound: the words that were said to their end."""
        self._at_s += length_s
        out: list[Word] = []
        while word := _first(self._text):
            rest = self._text[self._text.index(word) + len(word) :]
            # The last word may still be written on.
            if not rest and not _wide(word):
                break
            end_s = self._said_s + _length_s(word)
            if end_s > self._at_s:
                break
            out.append(Word(word, self._said_s, end_s, 1.0))
            self._text, self._said_s = rest, end_s
        return tuple(out)

    def finish(self) -> tuple[Word, ...]:
        """No more sound: the words that are left, up to its end."""
        words = list[str]()
        while word := _first(self._text):
            words.append(word)
            self._text = self._text[self._text.index(word) + len(word) :]
        each = sum(map(_length_s, words))
        out = []
        start_s = min(self._said_s, self._at_s)
        for word in words:
            end_s = start_s + (self._at_s - min(self._said_s, self._at_s)) * _length_s(word) / each
            out.append(Word(word, start_s, end_s, 1.0))
            start_s = end_s
        self._text, self._said_s = "", self._at_s
        return tuple(out)


def _first(text: str) -> str:
    """The first word; empty where there is none."""
    text = text.lstrip()
    if _wide(text):
        return text[0]
    end = next((i for i, c in enumerate(text) if c.isspace() or _wide(c)), len(text))
    return text[:end]


def _wide(text: str) -> bool:
    """It begins with an ideograph."""
    return bool(text) and unicodedata.east_asian_width(text[0]) in "WF"


def _length_s(word: str) -> float:
    return sum(IDEOGRAPH_LETTERS if _wide(c) else 1.0 for c in word) / LETTERS_PER_S
