"""Normalizes text for hibari word by word, so that every spoken word can be traced back to a written one.

`text/written.py` has already removed what no voice can speak. This module drops and reports letters of scripts that the
voice does not know, and splits long words. The phonemizer itself normalizes numbers and dates.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from textwrap import wrap

from antiphon.text.sentences import spoken_parts

# A longer text is synthesized in several parts. The model reads a part in one pass, at 0.1 ms per character.
MAX_PART_CHARS = 300
_PUNCTUATION = str.maketrans("。！？、，；：（）【】「」『』…", '.!?,,;:()()""""…')
# The phonemizer truncates unknown words that are longer than this.
MAX_WORD_CHARS = 20
_LONG_WORD = re.compile(rf"[^\W\d_]{{{MAX_WORD_CHARS + 1},}}")


@dataclass(frozen=True, slots=True)
class SpokenPart:
    """A part of a text that is synthesized in one pass.

    `written`: its words, split at white space. `spoken`: the spoken form of each written word, which may be several
    words, or "" if the word is silent. `skipped`: the letters of the part that the voice cannot speak.
    """

    written: tuple[str, ...]
    spoken: tuple[str, ...]
    skipped: str

    @property
    def text(self) -> str:
        """The spoken form of the whole part, with single spaces between words; "" if the part is silent."""
        return " ".join(s for s in self.spoken if s)


def parts(text: str) -> Iterator[SpokenPart]:
    """Yield the parts of a text in order: its sentences, and pieces of sentences longer than MAX_PART_CHARS.

    Each written word of the text is in exactly one part. Accepts any text.
    """
    for part in spoken_parts(text, MAX_PART_CHARS):
        written = tuple(part.split())
        spoken, skipped = [], []
        for word in written:
            speakable, dropped = _speakable(word)
            spoken.append(speakable)
            skipped.append(dropped)
        yield SpokenPart(written, tuple(spoken), " ".join(filter(None, skipped)))


def source_words(spoken: Sequence[str], normalized: Sequence[str]) -> list[int]:
    """Return, for each word of a normalized text, the index of its source phrase in `spoken`.

    Normalizing rewrites some words ("$5" to "five dollars"). A run of rewritten words is distributed evenly, in order,
    over the phrases that it replaces. An inserted word belongs to the phrase before it.
    """
    out: list[int] = []
    flat = [(i, word) for i, phrase in enumerate(spoken) for word in phrase.split()]
    for tag, a, b, c, d in SequenceMatcher(None, [w for _, w in flat], normalized, autojunk=False).get_opcodes():
        if tag == "delete":
            continue
        for k in range(c, d):
            at = a + (k - c) * (b - a) // (d - c) if b > a else max(0, a - 1)
            out.append(flat[min(at, len(flat) - 1)][0])
    return out


def _speakable(word: str) -> tuple[str, str]:
    """Return the spoken form of a written word, and those of its letters that the voice cannot speak."""
    kept, dropped = [], []
    for char in word.translate(_PUNCTUATION):
        spoken = _char(char)
        if spoken is None:
            dropped.append(char)
        else:
            kept.append(spoken)
    # A word in brackets may contain its pronunciation, so it is not split.
    speakable = "".join(kept)
    return speakable if word.startswith("[") else _LONG_WORD.sub(_cut, speakable), "".join(dropped)


def _cut(word: re.Match[str]) -> str:
    """Split a long word into pieces of about equal length that the phonemizer can read."""
    return " ".join(wrap(word[0], -(-len(word[0]) // -(-len(word[0]) // MAX_WORD_CHARS))))


def _char(char: str) -> str | None:
    """Return the replacement of a character: often itself, "" to drop it, or None if the voice cannot speak it."""
    if char.isascii():
        return char if char.isprintable() else ""
    kind = unicodedata.category(char)
    if kind == "Nd":
        return str(unicodedata.digit(char))
    if 0xFF01 <= ord(char) <= 0xFF5E:
        return chr(ord(char) - 0xFEE0)
    if kind[0] == "L":
        return char if ord(char) < 0x0100 or unicodedata.name(char, "").startswith(("LATIN", "MODIFIER")) else None
    if kind[0] == "M":
        # Accents of Latin letters are kept. The marks of other scripts are dropped with their letters.
        return char if ord(char) < 0x0370 else ""
    if kind[0] == "C" or (kind in ("So", "Sk") and ord(char) >= 0x2190):
        return ""
    return char
