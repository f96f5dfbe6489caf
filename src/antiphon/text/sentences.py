"""Text that arrives in pieces of any size, cut into units that can be spoken: sentences, clauses, or all of it.

An ASCII terminator ends a unit only before white space, as `3.14` and `e.g.` have it inside; one of another script as soon as the
next character is known. What stands at the end of the text so far is undecided until more comes or `flush` is called, so the
units do not depend on how the text was cut. Time is linear in the text.
"""

from __future__ import annotations

import re

from antiphon.events.speech import Granularity

# A word that is known to be complete: white space follows.
_WORD = re.compile(r"\S+(?=\s)")

_ASCII = {"sentence": ".!?", "clause": ".!?,;"}
_SCRIPT = {"sentence": "。！？…।॥؟", "clause": "。！？…।॥؟，；،؛"}
_CLOSERS = "\"'”’»)]}」』）】》"
_OPENERS = "\"'“‘«([{「『（【《"
# A full stop after one of these ends nothing. `No.` does so only before a number.
# `No.` and more white space than this is not the number of anything.
MAX_SPACE = 64
_ABBREVIATIONS = frozenset(
    [
        "Dr",
        "Mr",
        "Mrs",
        "Ms",
        "Prof",
        "Sr",
        "Jr",
        "St",
        "Mt",
        "Fig",
        "vs",
        "etc",
        "approx",
        "Dept",
        "Inc",
        "Ltd",
        "Co",
        "al",
        "e.g",
        "i.e",
        "E.g",
        "I.e",
        "U.S",
        "U.K",
        "a.m",
        "p.m",
        "A.M",
        "P.M",
    ]
)


class SentenceSplitter:
    """Feed text, take units. Each unit is stripped and not empty; joined they are the text but for white space at the seams."""

    def __init__(self, granularity: Granularity = "sentence") -> None:
        self.granularity = granularity
        self._text = ""
        # Where to go on: before it nothing ends a unit; up to `_run` stands a run of marks that is undecided.
        self._seen = self._run = 0

    @property
    def granularity(self) -> Granularity:
        """What ends a unit. It may be changed between pieces of text: what was passed over stays so."""
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: Granularity) -> None:
        self._granularity = granularity
        self._ascii = frozenset(_ASCII.get(granularity, ""))
        self._script = frozenset(_SCRIPT.get(granularity, ""))

    @property
    def num_pending(self) -> int:
        """Characters that belong to no unit yet."""
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """The units that `text` completes."""
        self._text += text
        return self._take(final=False)

    def flush(self) -> list[str]:
        """What is left, as the last units. The splitter starts anew."""
        units = self._take(final=True)
        rest = self._text.strip()
        self.clear()
        return [*units, rest] if rest else units

    def cut_words(self, count: int, least: int) -> str:
        """Take `count` whole words of what belongs to no unit yet, of `least` characters or more; "" where there are none."""
        at, found = 0, 0
        for match in _WORD.finditer(self._text):
            found, at = found + 1, match.end()
            if found >= count and at >= least:
                break
        if found < count or at < least or at > self._seen:
            # The last word may go on, and a mark that is undecided may end a unit.
            return ""
        return self._cut(at)

    def cut_clause(self, least: int) -> str:
        """Take all whole words of what belongs to no unit yet, up to the last mark among them; "" where that is fewer than `least` words."""
        ends = [m.end() for m in _WORD.finditer(self._text) if m.end() <= self._seen]
        marks = _ASCII["clause"] + _SCRIPT["clause"]
        best = next((k for k in range(len(ends), 0, -1) if self._text[ends[k - 1] - 1] in marks), 0)
        best = best if best >= least else len(ends)
        return self._cut(ends[best - 1]) if best >= least else ""

    def _cut(self, at: int) -> str:
        head, self._text = self._text[:at].strip(), self._text[at:]
        self._seen, self._run = self._seen - at, max(0, self._run - at)
        return head

    def clear(self) -> None:
        """Forget what is left."""
        self._text, self._seen, self._run = "", 0, 0

    def _take(self, *, final: bool) -> list[str]:
        text, start, at = self._text, 0, self._seen
        units = []
        while at < len(text):
            if text[at] not in self._ascii and text[at] not in self._script:
                at += 1
                continue
            end = max(at + 1, self._run)
            while end < len(text) and (text[end] in self._ascii or text[end] in self._script or text[end] in _CLOSERS):
                end += 1
            closes = self._closes(text, start, at, end, final)
            if closes is None:
                self._run = end
                break
            self._run = 0
            if closes:
                units.append(text[start:end].strip())
                start = end
            at = end
        self._text, self._seen, self._run = text[start:], at - start, max(0, self._run - start)
        return units

    def _closes(self, text: str, start: int, at: int, end: int, final: bool) -> bool | None:
        """Whether the run text[at:end] ends a unit; None while what follows it is not known."""
        if end == len(text) and not final:
            return None
        if any(c in self._script for c in text[at:end]):
            return True
        if end < len(text) and not text[end].isspace():
            return False
        if text[at] != "." or any(c in self._ascii for c in text[at + 1 : end]):
            return True
        word = _word_before(text, start, at)
        if word == "No":
            return self._no_number(text, end, final)
        return not (word in _ABBREVIATIONS or (len(word) == 1 and word.isupper()))

    @staticmethod
    def _no_number(text: str, end: int, final: bool) -> bool | None:
        """`No.` ends a unit unless a number follows; None while that is not known."""
        far = end + MAX_SPACE
        while end < min(len(text), far) and text[end].isspace():
            end += 1
        if end == len(text) and end < far:
            return True if final else None
        return end == far or not text[end].isdigit()


def _word_before(text: str, unit: int, at: int) -> str:
    """The word that ends at `at`, of the unit that begins at `unit`."""
    # The longest abbreviation is far shorter than 12: bounded, so that a long word costs no more than a short one.
    start = at
    while start > max(unit, at - 12) and not text[start - 1].isspace():
        start -= 1
    return text[start:at].lstrip(_OPENERS)
