"""Checks as early as possible whether the notes support an answer, because small language models make answers up. Pure.

The first meaningful word decides. If it was read or heard, the answer so far is released, and the rest is streamed. If
the word is neither in the notes nor in the question, the answer is made up. An answer that only repeats the question's
words is not released either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# Words that decide nothing: function words, and words with which an answer refers to a picture.
_FUNCTION_WORDS = (
    "a an and are as at be been being but by can cannot could did do does done for from had has have he her here "
    "hers him his how i if in into is it its just may might mostly much my no nobody nothing not now of on one "
    "only or our out over said same say says she should so some somebody something than that the their them then "
    "there these they this those to too under up very was we were what when where which while who whose will with "
    "would yes you your second seconds s shown shows show seen see screen camera picture text read reads written "
    "notes note time answer question currently displayed display displays word words visible"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
# Maximum characters of an answer that decide nothing. A small model may repeat the question without end.
MAX_UNDECIDED_CHARS = 200


def words(text: str) -> list[str]:
    """Return the words of a text in order, in lower case and without punctuation. Numbers are words too."""
    return [w.lower() for w in WORD.findall(text)]


class Grounding:
    """Holds an answer back until it is known whether it is grounded. Pass the answer's text to `feed` as it arrives.

    `known` are the texts that were read and heard. `grounded` is whether the answer uses them, or None while no word
    has decided. The decision is final. If no word of the first MAX_UNDECIDED_CHARS decides, the answer is not grounded.
    """

    def __init__(self, question: str, known: Iterable[str]) -> None:
        self._question_words = frozenset(words(question))
        self._known_words = frozenset(w for text in known for w in words(text)) - FUNCTION_WORDS
        self._held_back = ""
        self.grounded: bool | None = None

    def feed(self, text: str) -> str:
        """Add text of the answer, and return the part of the answer to send now: "" until it is grounded.

        A word can decide only after its end is known.
        """
        self._held_back += text
        self._decide(self._held_back.removesuffix(_last_word(self._held_back)))
        return self._released()

    def know(self, text: str) -> None:
        """Add a text whose words the answer may use."""
        self._known_words |= frozenset(words(text)) - FUNCTION_WORDS

    def finish(self) -> str:
        """End the answer, and return its rest if it is grounded. An undecided answer counts as not grounded."""
        self._decide(self._held_back)
        if self.grounded is None:
            self.grounded = False
        return self._released()

    def _decide(self, text: str) -> None:
        if self.grounded is not None:
            return
        for word in words(text):
            if word in FUNCTION_WORDS:
                continue
            if word in self._known_words:
                self.grounded = True
                return
            if word not in self._question_words:
                self.grounded = False
                return
        if len(text) > MAX_UNDECIDED_CHARS:
            self.grounded = False

    def _released(self) -> str:
        if not self.grounded:
            return ""
        out, self._held_back = self._held_back, ""
        return out


def _last_word(text: str) -> str:
    """Return the word at the end of the text, which may be incomplete. "" if the text does not end with a word."""
    found = WORD.findall(text)
    return found[-1] if found and text.endswith(found[-1]) else ""
