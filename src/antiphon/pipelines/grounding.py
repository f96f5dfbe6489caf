"""Whether an answer says what its notes say, told as early as can be: a small language model makes up the rest. Pure.

The first word with a meaning decides. One that was read or heard lets the answer out, and the rest of it streams; one that is neither there nor in the
question is made up. An answer that only gives the question's words back says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# Words without a meaning of their own.
EMPTY = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "being",
        "but",
        "by",
        "can",
        "cannot",
        "could",
        "did",
        "do",
        "does",
        "done",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "here",
        "hers",
        "him",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "just",
        "may",
        "might",
        "mostly",
        "much",
        "my",
        "no",
        "nobody",
        "nothing",
        "not",
        "now",
        "of",
        "on",
        "one",
        "only",
        "or",
        "our",
        "out",
        "over",
        "said",
        "same",
        "say",
        "says",
        "she",
        "should",
        "so",
        "some",
        "somebody",
        "something",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "to",
        "too",
        "under",
        "up",
        "very",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "while",
        "who",
        "whose",
        "will",
        "with",
        "would",
        "yes",
        "you",
        "your",
        "second",
        "seconds",
        "s",
        "shown",
        "shows",
        "show",
        "seen",
        "see",
        "screen",
        "camera",
        "picture",
        "text",
        "read",
        "reads",
        "written",
        "notes",
        "note",
        "time",
        "answer",
        "question",
        "currently",
        "displayed",
        "display",
        "displays",
        "word",
        "words",
        "visible",
    ]
)


def words(text: str) -> list[str]:
    """In lower case."""
    return [w.lower() for w in WORD.findall(text)]


class Grounding:
    """Feed an answer's text as it comes. `known`: what was read and heard."""

    def __init__(self, question: str, known: Iterable[str]) -> None:
        self._asked = frozenset(words(question))
        self._known = frozenset(w for text in known for w in words(text)) - EMPTY
        self._held = ""
        # None: not decided yet.
        self.grounded: bool | None = None

    def feed(self, text: str) -> str:
        """What of the answer may be said now."""
        self._held += text
        # The last word may go on.
        self._decide(self._held.removesuffix(_last_word(self._held)))
        return self._let_out()

    def end(self) -> str:
        """The rest, where it is grounded."""
        self._decide(self._held)
        if self.grounded is None:
            self.grounded = False
        return self._let_out()

    def _decide(self, text: str) -> None:
        if self.grounded is not None:
            return
        for word in words(text):
            if word in EMPTY:
                continue
            if word in self._known:
                self.grounded = True
                return
            if word not in self._asked:
                self.grounded = False
                return

    def _let_out(self) -> str:
        if not self.grounded:
            return ""
        out, self._held = self._held, ""
        return out


def _last_word(text: str) -> str:
    found = WORD.findall(text)
    return found[-1] if found and text.endswith(found[-1]) else ""
