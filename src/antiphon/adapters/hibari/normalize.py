"""Written text made speakable word by word, so that every spoken word knows the written one it stands for.

What a phonemizer of English is not made for is taken care of here: emoji and control characters are left out, letters of
scripts the voice does not know are left out and reported, addresses are spelled as people say them, and the marks of Markdown are not read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from antiphon.text.sentences import SentenceSplitter

# A text longer than this is spoken in several parts: the model reads a part at once, at 0.1 ms a character.
MAX_PART_CHARS = 300
_ADDRESS = re.compile(
    r"^(?P<open>[(\[<\"'“]*)(?:(?P<scheme>[a-z]+)://)?(?P<user>[\w.+-]+@)?"
    r"(?P<host>(?:[A-Za-z0-9-]+\.)+(?P<top>[A-Za-z]{2,}))(?P<port>:\d+)?(?P<path>/[^\s?#]*?)?(?P<query>[?#]\S*?)?(?P<close>[)\]>\"'”.,;:!?]*)$"
)
# A bare word with a full stop inside is an address only if it ends in one of these.
_TOPS = frozenset(
    [
        "com",
        "org",
        "net",
        "io",
        "ai",
        "dev",
        "edu",
        "gov",
        "app",
        "info",
        "uk",
        "de",
        "fr",
        "eu",
        "nl",
        "ca",
        "au",
        "co",
        "us",
        "me",
        "tv",
    ]
)
_SAID = {".": " dot ", "/": " slash ", "-": " dash ", "_": " underscore ", "@": " at ", "+": " plus ", "~": " tilde "}
_MARKUP = re.compile(r"^[#*_`~|]+$")
# At a word's edge only: `2*3` and `snake_case` keep theirs.
_EMPHASIS = re.compile(r"(?<![^\W_])(?:\*{1,3}|_{1,3}|`+|~~)|(?:\*{1,3}|_{1,3}|`+|~~)(?![^\W_])")
# Bounded, and no two parts of it can match the same character: a text of brackets costs no more than another.
_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\(([^()\s]{0,1000})(?: [^()\n]{0,300})?\)")
_PUNCTUATION = str.maketrans("。！？、，；：（）【】「」『』…", '.!?,,;:()()""""…')
_CUT = re.compile(r"[,;:—–]\s+")


@dataclass(frozen=True, slots=True)
class SpokenPart:
    """A part of a text: its written words, and what is said for each (empty: nothing)."""

    written: tuple[str, ...]
    said: tuple[str, ...]
    skipped: str

    @property
    def text(self) -> str:
        """What is to be said, in a row."""
        return " ".join(s for s in self.said if s)


def parts(text: str) -> Iterator[SpokenPart]:
    """The parts of a text in order: sentences, and pieces of those that are too long to be read at once."""
    for sentence in _sentences(_unlink(text)):
        for piece in _pieces(sentence):
            written = tuple(piece.split())
            said, skipped = [], []
            for word in written:
                spoken, dropped = _say(word)
                said.append(spoken)
                skipped.append(dropped)
            yield SpokenPart(written, tuple(said), "".join(skipped))


def owners(said: Sequence[str], normal: Sequence[str]) -> list[int]:
    """For each word of a normalized text the index in `said` of the word it stands for.

    Normalizing rewrites some words ("$5" to "five dollars"): those between two words that stayed share the ones rewritten.
    """
    out: list[int] = []
    flat = [(i, word) for i, phrase in enumerate(said) for word in phrase.split()]
    for tag, a, b, c, d in SequenceMatcher(None, [w for _, w in flat], normal, autojunk=False).get_opcodes():
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
    """Cut at the last clause that fits, else at the last white space, else through."""
    while len(sentence) > MAX_PART_CHARS:
        head = sentence[:MAX_PART_CHARS]
        clauses = [m.end() for m in _CUT.finditer(head) if m.end() > MAX_PART_CHARS // 4]
        at = clauses[-1] if clauses else head.rfind(" ") + 1 or MAX_PART_CHARS
        yield sentence[:at]
        sentence = sentence[at:]
    if sentence.strip():
        yield sentence


def _unlink(text: str) -> str:
    """A Markdown link is its text; one with a pronunciation, `[word](/phonemes/)`, stays."""
    return _LINK.sub(lambda m: m[0] if re.fullmatch(r"/.+/", m[2]) else m[1], text)


def _say(word: str) -> tuple[str, str]:
    """What is said for one written word, and the letters of it that cannot be."""
    if _MARKUP.match(word):
        return "", ""
    if (found := _ADDRESS.match(word)) and (found["scheme"] or found["user"] or found["top"] in _TOPS):
        return _address(found), ""
    kept, dropped = [], []
    for char in word.translate(_PUNCTUATION):
        spoken = _char(char)
        if spoken is None:
            dropped.append(char)
        else:
            kept.append(spoken)
    said = _EMPHASIS.sub("", "".join(kept)) if not word.startswith("[") else "".join(kept)
    return said, "".join(dropped)


def _char(char: str) -> str | None:
    """What stands for a character: itself, nothing, or None for a letter the voice cannot speak."""
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
    """`https://a-b.com/c?d=1` as it is said: "a dash b dot com slash c". Queries and fragments are left out."""
    host, top = found["host"], found["top"]
    if len(top) == 2:
        host = host[:-2] + " ".join(top.upper())
    path = (found["path"] or "").rstrip("/")
    port = f" port {found['port'][1:]}" if found["port"] else ""
    close = found["close"]
    said = "".join(_SAID.get(c, c) for c in (found["user"] or "") + host) + port
    said += "".join(_SAID.get(c, c if c.isalnum() else " ") for c in path)
    return " ".join(said.split()) + close
