"""Turns a text into the phonemes that a Piper voice reads, and remembers the written word of each.

eSpeak NG makes the phonemes of a clause. As in piper-tts, the mark at a clause's end is added to them, because the
voices were trained with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from antiphon.adapters.espeak import run_espeak
from antiphon.adapters.piper.files import BEGIN, END, PAD, VoiceFields

# The marks that end a clause, and the mark that a voice reads for each: that of eSpeak NG's kind of clause.
_MARKS = {
    **dict.fromkeys(",،、，", ","),
    **dict.fromkeys(":：", ":"),
    **dict.fromkeys(";؛；—–…", ";"),
    **dict.fromkeys(".。।॥", "."),
    **dict.fromkeys("!！", "!"),
    **dict.fromkeys("?？؟", "?"),
}
_CLOSERS = "\"'”’»)]}」』）】》"
# What is removed from the end of a word.
_CLAUSE_ENDS = "".join(_MARKS) + _CLOSERS
# eSpeak NG marks words that it reads in another language, as in `(en)wɜːld(de)`.
_SWITCH = re.compile(r"\([^)]+\)")


@dataclass(frozen=True, slots=True)
class Phonemes:
    """The ids that a voice reads, and for each the index of its written word; None for a pause between words."""

    ids: tuple[int, ...]
    words: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Clause:
    """Words that eSpeak NG reads at once: their indices, and the mark that follows them, "" at an open end."""

    words: tuple[int, ...]
    mark: str


class Phonemizer:
    """Makes the phonemes of one voice. It has no state, so threads may share it."""

    def __init__(self, fields: VoiceFields) -> None:
        self._fields = fields
        clusters = sorted(("".join(one) for one in fields.vowel_clusters or ()), key=len, reverse=True)
        self._symbols = re.compile("|".join([*map(re.escape, clusters), "."]), re.DOTALL)

    def phonemes(self, words: Sequence[str]) -> Phonemes:
        """Return what a voice reads for the words of a sentence, which are split at white space.

        A word without letters and digits is silent. Phonemes that the voice does not have are left out; if it has none
        of them, there are no ids. Raises ModelError if eSpeak NG fails.
        """
        clauses = list(_clauses(words))
        ids, sources = list[int](), list[int | None]()
        lines = self._lines([_text([words[i] for i in clause.words]) for clause in clauses])
        for clause, said in zip(clauses, lines, strict=True):
            groups = said.split()
            if len(groups) == len(clause.words):
                numbers = [k for k, group in enumerate(groups) for _ in group]
            else:
                numbers = _sources("".join(groups), self._lines([_text([words[i]]) for i in clause.words]))
            if ids:
                self._add(" ", None, ids, sources)
            at = 0
            for group in groups:
                if at:
                    self._add(" ", None, ids, sources)
                for symbol in self._symbols.finditer(group):
                    self._add(symbol[0], clause.words[numbers[at + symbol.start()]], ids, sources)
                at += len(group)
            if clause.mark:
                self._add(clause.mark, None, ids, sources)
        if all(word is None for word in sources):
            return Phonemes((), ())
        ids_of = self._fields.phoneme_id_map
        begin, end = (*ids_of[BEGIN], *ids_of[PAD]), ids_of[END]
        return Phonemes((*begin, *ids, *end), (*[None] * len(begin), *sources, *[None] * len(end)))

    def _add(self, symbol: str, word: int | None, ids: list[int], sources: list[int | None]) -> None:
        """Append the ids of a symbol and the pause after it, if the voice has the symbol."""
        if own := self._fields.phoneme_id_map.get(symbol):
            added = (*own, *self._fields.phoneme_id_map[PAD])
            ids += added
            sources += [word] * len(added)

    def _lines(self, texts: Sequence[str]) -> list[str]:
        """Return the phonemes of each text, with spaces between groups: those of eSpeak NG, or the letters.

        eSpeak NG writes a line for each clause. If it divides one of the texts further, each gets a run of its own.
        """
        if self._fields.phoneme_type == "text" or not texts:
            return [unicodedata.normalize("NFD", text) for text in texts]
        written = run_espeak(["-q", "--ipa", "-b", "1", "-v", self._fields.espeak.voice], "\n".join(texts) + "\n")
        lines = [_SWITCH.sub("", line).strip() for line in written.decode(errors="replace").splitlines()]
        lines = [unicodedata.normalize("NFD", line) for line in lines]
        if len(texts) == 1:
            return [" ".join(lines)]
        return lines if len(lines) == len(texts) else [line for text in texts for line in self._lines([text])]


def _clauses(words: Sequence[str]) -> Iterator[_Clause]:
    """Yield the clauses of a sentence. Words without letters and digits are in none of them."""
    spoken = list[int]()
    for i, word in enumerate(words):
        if any(map(str.isalnum, word)):
            spoken.append(i)
        mark = _MARKS.get(word.rstrip(_CLOSERS)[-1:], "")
        if mark == "." and i + 1 < len(words):
            # An abbreviation: the end of a sentence would have been found before.
            mark = ""
        if mark and spoken:
            yield _Clause(tuple(spoken), mark)
            spoken = []
    if spoken:
        yield _Clause(tuple(spoken), "")


def _text(words: Sequence[str]) -> str:
    """Return a clause as eSpeak NG gets it: without what it would take for an end within it, or for phonemes."""
    return " ".join(word.replace("[[", "[").rstrip(_CLAUSE_ENDS) for word in words)


def _sources(said: str, alone: Sequence[str]) -> list[int]:
    """Return, for each character of a clause's phonemes, the number of its word.

    `alone`: the phonemes of each word as it is read alone. In a clause, some sound differently, and some are one group
    of phonemes ("of the"), so the two are compared.
    """
    flat = [(k, symbol) for k, word in enumerate(alone) for symbol in word]
    found = list[int]()
    for _, a, b, c, d in SequenceMatcher(None, [one for _, one in flat], said, autojunk=False).get_opcodes():
        # What replaces other phonemes divides their words evenly; what is added belongs to the word before it.
        found += [flat[a + (k - c) * (b - a) // (d - c) if b > a else max(0, a - 1)][0] for k in range(c, d)]
    return found
