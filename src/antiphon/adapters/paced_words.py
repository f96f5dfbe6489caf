"""Where words lie in the sound of a voice that does not say: guessed from the pace of speech."""

from __future__ import annotations

import unicodedata

from antiphon.events import Word

# Letters a second of read speech, spaces not counted; an ideograph is said in the time of about three letters.
PACE, WIDE = 13.0, 3.0


class PacedWords:
    """One spoken text's words, handed out as its sound comes.

    Text may come before its sound, or while there is some. A word is said when as much was spoken as its letters
    and all before them take; what is left at the end ends with the sound.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at_s = 0.0
        self._said_s = 0.0

    def write(self, text: str) -> None:
        """Text to be spoken, as it is written: words are ended by white space."""
        self._text += text

    def sound(self, length_s: float) -> tuple[Word, ...]:
        """`length_s` more of sound: the words that were said to their end."""
        self._at_s += length_s
        out: list[Word] = []
        while found := self._text.split(maxsplit=1):
            # The last word may still be written on.
            if len(found) == 1 and not self._text[-1:].isspace():
                break
            end_s = self._said_s + _length_s(found[0])
            if end_s > self._at_s:
                break
            out.append(Word(found[0], self._said_s, end_s, 1.0))
            self._text, self._said_s = found[1] if len(found) > 1 else "", end_s
        return tuple(out)

    def end(self) -> tuple[Word, ...]:
        """No more sound: the words that are left, up to its end."""
        words = self._text.split()
        each = sum(map(_length_s, words))
        out = []
        start_s = min(self._said_s, self._at_s)
        for word in words:
            end_s = start_s + (self._at_s - min(self._said_s, self._at_s)) * _length_s(word) / each
            out.append(Word(word, start_s, end_s, 1.0))
            start_s = end_s
        self._text, self._said_s = "", self._at_s
        return tuple(out)


def _length_s(word: str) -> float:
    return sum(WIDE if unicodedata.east_asian_width(c) in "WF" else 1.0 for c in word) / PACE
