"""Splits text that arrives in chunks of any size into sentences, clauses or whole utterances that can be synthesized.

An ASCII terminator ends a sentence only before white space, because `3.14` and `e.g.` have it inside; a terminator of
another script ends one as soon as the next character is known. What stands at the end of the text so far is undecided
until more text comes or `flush` is called, so the sentences do not depend on how the text was cut. Time is linear in
the text.
"""

from __future__ import annotations

import re

from antiphon.events.speech import Granularity

# A word that is complete: white space follows it.
_WORD = re.compile(r"\S+(?=\s)")

_ASCII = {"sentence": ".!?", "clause": ".!?,;"}
_SCRIPT = {"sentence": "。！？…।॥؟", "clause": "。！？…।॥؟，；،؛"}
_CLOSERS = "\"'”’»)]}」』）】》"
_OPENERS = "\"'“‘«([{「『（【《"
# `No.` is an abbreviation only before a number, and not across more white space than this. Bounded, so that a long
# run of white space is not looked through again with each chunk.
MAX_NUMBER_GAP = 64
# A full stop after one of these ends nothing.
_ABBREVIATIONS = frozenset(
    [
        *("Dr", "Mr", "Mrs", "Ms", "Prof", "Sr", "Jr", "St", "Mt", "Fig", "vs", "etc", "approx", "Dept", "Inc", "Ltd"),
        *("Co", "al", "e.g", "i.e", "E.g", "I.e", "U.S", "U.K", "a.m", "p.m", "A.M", "P.M"),
        # German
        *("bzw", "usw", "z.B", "Z.B", "d.h", "D.h", "u.a", "ca", "Nr", "Str", "Hr", "Fr", "Abs", "Mio", "Mrd", "Jh"),
        *("vgl", "Vgl", "evtl", "ggf", "inkl", "zzgl", "geb", "Tel", "v.Chr", "n.Chr"),
        # French, Spanish, Italian, Portuguese
        *("Mme", "Mmes", "Mlle", "MM", "p.ex", "env", "cf", "Sra", "Srta", "Dra", "Ud", "Uds", "p.ej", "pág", "núm"),
        *("EE", "UU", "Sig", "Sigg", "Dott", "Ing", "Avv", "pag", "ecc", "p.es", "Exmo", "Exma", "Profa"),
    ]
)
# `am 3. Mai`: a number before one of these is an ordinal, as German writes them.
_AFTER_ORDINALS = frozenset(
    [
        *("Januar", "Jänner", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober"),
        *("November", "Dezember", "Jahrhundert", "Jahrhunderts", "Stock", "Klasse", "Platz", "Mal", "Woche", "Tag"),
    ]
)


class SentenceSplitter:
    """Splits one stream of text into sentences. Each sentence is stripped of white space and not empty; joined, they
    are the text but for the white space at the seams. An abbreviation's full stop ends nothing, nor does a single
    capital's.
    """

    def __init__(self, granularity: Granularity = "sentence") -> None:
        self.granularity = granularity
        self._text = ""
        # Up to `_scanned` nothing ends a sentence. From there to `_run_end` stands a run of marks that is undecided.
        self._scanned = self._run_end = 0

    @property
    def granularity(self) -> Granularity:
        """What ends a sentence: a sentence's mark, also a clause's (comma, semicolon), or with "none" only `flush`. It
        may be set between two calls of `feed`; marks that were already passed over stay passed over.
        """
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: Granularity) -> None:
        self._granularity = granularity
        self._ascii = frozenset(_ASCII.get(granularity, ""))
        self._script = frozenset(_SCRIPT.get(granularity, ""))

    @property
    def num_pending(self) -> int:
        """The number of characters that were fed and are not part of any sentence that was returned."""
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """Add text, and return the sentences that it completes, in order. A sentence is held back until the character
        behind its mark is known, and for ASCII marks until that is white space.
        """
        self._text += text
        return self._split(final=False)

    def flush(self) -> list[str]:
        """Return all that is left as the last sentences, also where no mark ends it. The splitter is then as new, with
        its granularity kept.
        """
        sentences = self._split(final=True)
        rest = self._text.strip()
        self.clear()
        return [*sentences, rest] if rest else sentences

    def cut_words(self, count: int, min_chars: int) -> str:
        """Remove the first words that are not part of a sentence yet, and return them as text: at least `count` whole
        words of together at least `min_chars` characters. Returns "" where there are fewer, or where a mark among them
        may still end a sentence. A voice begins with them before the sentence is complete.
        """
        at, found = 0, 0
        for match in _WORD.finditer(self._text):
            found, at = found + 1, match.end()
            if found >= count and at >= min_chars:
                break
        if found < count or at < min_chars or at > self._scanned:
            # The last word may go on, and a mark that is undecided may end a sentence.
            return ""
        return self._cut(at)

    def cut_clause(self, min_words: int) -> str:
        """Remove and return all whole words that are not part of a sentence yet, up to the last mark of a clause among
        them if that leaves `min_words` or more, otherwise all of them. Returns "" where there are fewer than
        `min_words`.
        """
        ends = [m.end() for m in _WORD.finditer(self._text) if m.end() <= self._scanned]
        marks = _ASCII["clause"] + _SCRIPT["clause"]
        best = next((k for k in range(len(ends), 0, -1) if self._text[ends[k - 1] - 1] in marks), 0)
        best = best if best >= min_words else len(ends)
        return self._cut(ends[best - 1]) if best >= min_words else ""

    def _cut(self, at: int) -> str:
        head, self._text = self._text[:at].strip(), self._text[at:]
        self._scanned, self._run_end = self._scanned - at, max(0, self._run_end - at)
        return head

    def clear(self) -> None:
        """Drop the text that is not part of any sentence yet; it is never returned. The granularity stays."""
        self._text, self._scanned, self._run_end = "", 0, 0

    def _split(self, *, final: bool) -> list[str]:
        """Remove the complete sentences from the text. `final`: no more text comes, so every mark can be decided."""
        text, start, at = self._text, 0, self._scanned
        sentences = []
        while at < len(text):
            if text[at] not in self._ascii and text[at] not in self._script:
                at += 1
                continue
            end = max(at + 1, self._run_end)
            while end < len(text) and (text[end] in self._ascii or text[end] in self._script or text[end] in _CLOSERS):
                end += 1
            closes = self._closes(text, start, at, end, final)
            if closes is None:
                self._run_end = end
                break
            self._run_end = 0
            if closes:
                sentences.append(text[start:end].strip())
                start = end
            at = end
        self._text, self._scanned, self._run_end = text[start:], at - start, max(0, self._run_end - start)
        return sentences

    def _closes(self, text: str, start: int, at: int, end: int, final: bool) -> bool | None:
        """Whether the run of marks text[at:end] ends a sentence; None while what follows it is not known."""
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
        if word.isdecimal() and len(word) <= 2:
            return self._no_ordinal(text, end, final)
        return not (word in _ABBREVIATIONS or (len(word) == 1 and word.isupper()))

    @staticmethod
    def _no_number(text: str, end: int, final: bool) -> bool | None:
        """Whether `No.` ends a sentence, which it does unless a number follows; None while that is not known."""
        far = end + MAX_NUMBER_GAP
        while end < min(len(text), far) and text[end].isspace():
            end += 1
        if end == len(text) and end < far:
            return True if final else None
        return end == far or not text[end].isdigit()

    @staticmethod
    def _no_ordinal(text: str, end: int, final: bool) -> bool | None:
        """Whether `3.` ends a sentence, which it does unless `Mai` follows; None while that is not known."""
        following = text[end : end + MAX_NUMBER_GAP].lstrip()
        word = re.match(r"\w*", following)
        assert word
        # What goes on may become a month, unless none begins so.
        is_open = word.end() == len(following) and len(text) - end < MAX_NUMBER_GAP and not final
        if is_open and any(one.startswith(following) for one in _AFTER_ORDINALS):
            return None
        return word[0] not in _AFTER_ORDINALS


def _word_before(text: str, sentence_start: int, at: int) -> str:
    """The word that ends at `at`, within the sentence that begins at `sentence_start`."""
    # The longest abbreviation is far shorter than 12: bounded, so that a long word costs no more than a short one.
    start = at
    while start > max(sentence_start, at - 12) and not text[start - 1].isspace():
        start -= 1
    return text[start:at].lstrip(_OPENERS)
