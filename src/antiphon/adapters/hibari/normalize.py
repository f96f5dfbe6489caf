"""Written text made speakable word by word, so that every spoken word knows the written one it stands for.

A phonemizer of English is not made for everything that is written. Here emoji and control characters are left out,
letters of scripts that the voice does not know are left out and reported, addresses are spelled as people say them, and
the marks of Markdown are not read. Numbers and dates are left to the phonemizer's own normalization.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from antiphon.text.sentences import SentenceSplitter

# A longer text is synthesized in several parts: the model reads a part at once, at 0.1 ms a character.
MAX_PART_CHARS = 300
_ADDRESS = re.compile(
    r"^(?P<open>[(\[<\"'“]*)(?:(?P<scheme>[a-z]+)://)?(?P<user>[\w.+-]+@)?"
    r"(?P<host>(?:[A-Za-z0-9-]+\.)+(?P<top>[A-Za-z]{2,}))(?P<port>:\d+)?"
    r"(?P<path>/[^\s?#]*?)?(?P<query>[?#]\S*?)?(?P<close>[)\]>\"'”.,;:!?]*)$"
)
# A bare word with a full stop inside is an address only if it ends in one of these.
_TOP_LEVEL_DOMAINS = frozenset([
    "com", "org", "net", "io", "ai", "dev", "edu", "gov", "app", "info", "uk", "de", "fr", "eu", "nl", "ca", "au", "co",
    "us", "me", "tv",
])  # fmt: skip
_SYMBOL_NAMES = {
    ".": " dot ",
    "/": " slash ",
    "-": " dash ",
    "_": " underscore ",
    "@": " at ",
    "+": " plus ",
    "~": " tilde ",
}
_MARKUP = re.compile(r"^[#*_`~|]+$")
# At a word's edge only: `2*3` and `snake_case` keep theirs.
_EMPHASIS = re.compile(r"(?<![^\W_])(?:\*{1,3}|_{1,3}|`+|~~)|(?:\*{1,3}|_{1,3}|`+|~~)(?![^\W_])")
# Bounded, and no two parts of it can match the same character: a text of brackets costs no more than another.
_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\(([^()\s]{0,1000})(?: [^()\n]{0,300})?\)")
_PUNCTUATION = str.maketrans("。！？、，；：（）【】「」『』…", '.!?,,;:()()""""…')
_CLAUSE_END = re.compile(r"[,;:—–]\s+")


@dataclass(frozen=True, slots=True)
class SpokenPart:
    """A part of a text that is synthesized at once.

    `written`: its words, as white space divides them. `spoken`: for each written word what is said for it, which may be
    several words, or "" for nothing. `skipped`: the letters of the part that the voice cannot speak.
    """

    written: tuple[str, ...]
    spoken: tuple[str, ...]
    skipped: str

    @property
    def text(self) -> str:
        """What is said for the whole part, words separated by single spaces; "" where nothing of it is said."""
        return " ".join(s for s in self.spoken if s)


def parts(text: str) -> Iterator[SpokenPart]:
    """Yield the parts of a text in order: its sentences, and pieces of those longer than MAX_PART_CHARS.

    Each written word of the text is in one part, in its order; a Markdown link is replaced by its text. A text of only
    emoji yields parts that say nothing; no text raises.
    """
    for sentence in _sentences(_unlink(text)):
        for piece in _pieces(sentence):
            written = tuple(piece.split())
            spoken, skipped = [], []
            for word in written:
                speakable, dropped = _speakable(word)
                spoken.append(speakable)
                skipped.append(dropped)
            yield SpokenPart(written, tuple(spoken), " ".join(filter(None, skipped)))


def source_words(spoken: Sequence[str], normalized: Sequence[str]) -> list[int]:
    """Return, for each word of a normalized text, the index of the phrase in `spoken` that it came from.

    Normalizing rewrites some words ("$5" to "five dollars"). The rewritten words between two that stayed the same are
    shared out evenly among the phrases there, in order; a word that was added belongs to the phrase before it.
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


def _sentences(text: str) -> Iterator[str]:
    for line in text.splitlines():
        splitter = SentenceSplitter()
        yield from splitter.feed(line)
        yield from splitter.flush()


def _pieces(sentence: str) -> Iterator[str]:
    """Cut a sentence at the last clause that fits, else at the last white space, else anywhere."""
    while len(sentence) > MAX_PART_CHARS:
        head = sentence[:MAX_PART_CHARS]
        clauses = [m.end() for m in _CLAUSE_END.finditer(head) if m.end() > MAX_PART_CHARS // 4]
        at = clauses[-1] if clauses else head.rfind(" ") + 1 or MAX_PART_CHARS
        yield sentence[:at]
        sentence = sentence[at:]
    if sentence.strip():
        yield sentence


def _unlink(text: str) -> str:
    """A Markdown link is its text; one with a pronunciation, `[word](/phonemes/)`, stays."""
    return _LINK.sub(lambda m: m[0] if re.fullmatch(r"/.+/", m[2]) else m[1], text)


def _speakable(word: str) -> tuple[str, str]:
    """Return what is said for one written word, and the letters of it that cannot be said."""
    if _MARKUP.match(word):
        return "", ""
    if (found := _ADDRESS.match(word)) and (found["scheme"] or found["user"] or found["top"] in _TOP_LEVEL_DOMAINS):
        return _address(found), ""
    kept, dropped = [], []
    for char in word.translate(_PUNCTUATION):
        spoken = _char(char)
        if spoken is None:
            dropped.append(char)
        else:
            kept.append(spoken)
    # A word in brackets may carry its pronunciation, whose marks are no emphasis.
    speakable = "".join(kept) if word.startswith("[") else _EMPHASIS.sub("", "".join(kept))
    return speakable, "".join(dropped)


def _char(char: str) -> str | None:
    """Return what stands for a character: itself, "" for nothing, or None for a letter the voice cannot speak."""
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
        # Accents stay on Latin letters; other scripts' marks go with their letters.
        return char if ord(char) < 0x0370 else ""
    if kind[0] == "C" or (kind in ("So", "Sk") and ord(char) >= 0x2190):
        return ""
    return char


def _address(found: re.Match[str]) -> str:
    """Return an address as it is said: "a dash b dot com slash c" for `https://a-b.com/c?d=1`, without the query."""
    host, top = found["host"], found["top"]
    if len(top) == 2:
        host = host[:-2] + " ".join(top.upper())
    path = (found["path"] or "").rstrip("/")
    port = f" port {found['port'][1:]}" if found["port"] else ""
    close = found["close"]
    spoken = "".join(_SYMBOL_NAMES.get(c, c) for c in (found["user"] or "") + host) + port
    spoken += "".join(_SYMBOL_NAMES.get(c, c if c.isalnum() else " ") for c in path)
    return " ".join(spoken.split()) + close
