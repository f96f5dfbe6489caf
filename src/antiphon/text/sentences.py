"""Splits text that arrives in chunks of any size into sentences, clauses or whole utterances that can be synthesized.

An ASCII terminator ends a sentence only before white space, because `3.14` and `e.g.` contain one. A terminator of
another script ends a sentence as soon as the next character is known. The end of the text so far is undecided until
more text arrives or `flush` is called, so the sentences do not depend on how the text was cut. Time is linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from antiphon.events.speech import Granularity

# Matches a complete word, which is followed by white space.
_WORD = re.compile(r"\S+(?=\s)")

_ASCII = {"sentence": ".!?", "clause": ".!?,;"}
_SCRIPT = {"sentence": "。！？…।॥؟", "clause": "。！？…।॥؟，；،؛"}
_CLOSERS = "\"'”’»)]}」』）】》"
_OPENERS = "\"'“‘«([{「『（【《"
# `No.` is an abbreviation only before a number, with at most MAX_NUMBER_GAP characters of white space between them. The
# bound avoids that a long run of white space is scanned again with each chunk.
MAX_NUMBER_GAP = 64
# A full stop after one of these does not end a sentence.
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
# In German, a number before one of these words is an ordinal, as in `am 3. Mai`.
_AFTER_ORDINALS = frozenset(
    [
        *("Januar", "Jänner", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober"),
        *("November", "Dezember", "Jahrhundert", "Jahrhunderts", "Stock", "Klasse", "Platz", "Mal", "Woche", "Tag"),
    ]
)

# The end of a clause within a sentence, at which a long sentence is divided.
_CLAUSE_END = re.compile(r"[,;:—–]\s+")


class SentenceSplitter:
    """Splits one stream of text into sentences. Each sentence is stripped of white space and not empty. Together they
    are the whole text, except for the white space between them. The full stop of an abbreviation or after a single
    capital letter does not end a sentence.
    """

    def __init__(self, granularity: Granularity = "sentence") -> None:
        self.granularity = granularity
        self._text = ""
        # No mark before `_scanned` ends a sentence. The characters from `_scanned` to `_run_end` are an undecided run
        # of marks.
        self._scanned = self._run_end = 0

    @property
    def granularity(self) -> Granularity:
        """The marks that end a sentence. "sentence": the marks of sentences. "clause": also those of clauses (comma,
        semicolon). "none": no marks, only `flush`. May be set between two calls of `feed`, but marks that were already
        scanned are not reconsidered.
        """
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: Granularity) -> None:
        self._granularity = granularity
        self._ascii = frozenset(_ASCII.get(granularity, ""))
        self._script = frozenset(_SCRIPT.get(granularity, ""))

    @property
    def num_pending(self) -> int:
        """Number of characters that were fed and are not part of a returned sentence."""
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """Append text, and return the sentences that it completes, in order. A sentence is held back until the
        character after its mark is known. After an ASCII mark, this character has to be white space.
        """
        self._text += text
        return self._split(final=False)

    def flush(self) -> list[str]:
        """Return the remaining text as the last sentences, even without a mark at the end. Resets the splitter, except
        for its granularity.
        """
        sentences = self._split(final=True)
        rest = self._text.strip()
        self.clear()
        return [*sentences, rest] if rest else sentences

    def cut_words(self, count: int, min_chars: int) -> str:
        """Remove and return the first words of the incomplete sentence, so that a voice can begin before the sentence
        is complete: at least `count` whole words with a total of at least `min_chars` characters. Returns "" if there
        are fewer, or if a mark among them may still end a sentence.
        """
        at, found = 0, 0
        for match in _WORD.finditer(self._text):
            found, at = found + 1, match.end()
            if found >= count and at >= min_chars:
                break
        if found < count or at < min_chars or at > self._scanned:
            # The last word may be incomplete, and an undecided mark may end a sentence.
            return ""
        return self._cut(at)

    def cut_clause(self, min_words: int) -> str:
        """Remove and return whole words of the incomplete sentence: the words up to the last mark of a clause, if these
        are `min_words` or more, otherwise all whole words. Returns "" if there are fewer than `min_words`.
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
        """Drop the text of the incomplete sentence, which is then never returned. The granularity stays."""
        self._text, self._scanned, self._run_end = "", 0, 0

    def _split(self, *, final: bool) -> list[str]:
        """Remove and return the complete sentences. `final`: no more text arrives, so every mark can be decided."""
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
        """Return whether the run of marks text[at:end] ends a sentence, or None while the text after it is unknown."""
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
        """Return whether `No.` ends a sentence, which it does unless a number follows. None while that is unknown."""
        far = end + MAX_NUMBER_GAP
        while end < min(len(text), far) and text[end].isspace():
            end += 1
        if end == len(text) and end < far:
            return True if final else None
        return end == far or not text[end].isdigit()

    @staticmethod
    def _no_ordinal(text: str, end: int, final: bool) -> bool | None:
        """Return whether `3.` ends a sentence, which it does unless a word such as `Mai` follows. None while that is
        unknown.
        """
        following = text[end : end + MAX_NUMBER_GAP].lstrip()
        word = re.match(r"\w*", following)
        assert word
        # An incomplete word may still become one of these words, unless none begins like it.
        is_open = word.end() == len(following) and len(text) - end < MAX_NUMBER_GAP and not final
        if is_open and any(one.startswith(following) for one in _AFTER_ORDINALS):
            return None
        return word[0] not in _AFTER_ORDINALS


def spoken_parts(text: str, max_chars: int) -> Iterator[str]:
    """Yield the sentences of a text in order, longer ones in pieces of at most `max_chars` characters.

    A line break ends a sentence. Each word of the text, split at white space, is in exactly one part, unless it is
    longer than a part.
    """
    for line in text.splitlines():
        splitter = SentenceSplitter()
        for sentence in [*splitter.feed(line), *splitter.flush()]:
            yield from _pieces(sentence, max_chars)


def _pieces(sentence: str, max_chars: int) -> Iterator[str]:
    """Split a sentence at the last clause end that fits, else at the last white space, else anywhere."""
    while len(sentence) > max_chars:
        head = sentence[:max_chars]
        clauses = [m.end() for m in _CLAUSE_END.finditer(head) if m.end() > max_chars // 4]
        at = clauses[-1] if clauses else head.rfind(" ") + 1 or max_chars
        yield sentence[:at]
        sentence = sentence[at:]
    if sentence.strip():
        yield sentence


def _word_before(text: str, sentence_start: int, at: int) -> str:
    """Return the word that ends at `at`, within the sentence that begins at `sentence_start`."""
    # All abbreviations are shorter than 12 characters. The bound keeps the time for long words constant.
    start = at
    while start > max(sentence_start, at - 12) and not text[start - 1].isspace():
        start -= 1
    return text[start:at].lstrip(_OPENERS)
