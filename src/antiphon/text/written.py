"""Converts written text to spoken text for every voice: signs, ranges, addresses and Markdown become words.

Numbers, dates, money and units are left to each voice, which knows how its language reads them. Every written word,
delimited by white space, keeps its place. Its spoken form consists of one word, several words or none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# The spoken form of `−` and of the dash in `10–12`, for languages whose voices do not know these signs.
MINUS = {"en": "minus", "de": "minus", "fr": "moins", "es": "menos", "it": "meno", "pt": "menos", "nl": "min"}
TO = {"en": "to", "de": "bis", "fr": "à", "es": "a", "it": "a", "pt": "a", "nl": "tot", "pl": "do", "sv": "till"}
TO |= {"da": "til", "no": "til", "ro": "până la", "cs": "až"}
# Mathematical signs that English voices leave out.
_ENGLISH = {"≈": "about", "≤": "at most", "≥": "at least", "≠": "is not", "÷": "divided by", "№": "number"}
# The spoken forms of the marks of an address: . / - _ @ + ~ #
_ADDRESS_WORDS = {
    "en": ("dot", "slash", "dash", "underscore", "at", "plus", "tilde", "hash"),
    "de": ("Punkt", "Schrägstrich", "Strich", "Unterstrich", "at", "plus", "Tilde", "Raute"),
    "fr": ("point", "barre", "tiret", "tiret bas", "arobase", "plus", "tilde", "dièse"),
    "es": ("punto", "barra", "guion", "guion bajo", "arroba", "más", "tilde", "almohadilla"),
    "it": ("punto", "barra", "trattino", "trattino basso", "chiocciola", "più", "tilde", "cancelletto"),
    "pt": ("ponto", "barra", "hífen", "sublinhado", "arroba", "mais", "til", "cerquilha"),
    "nl": ("punt", "slash", "streepje", "underscore", "apenstaartje", "plus", "tilde", "hekje"),
}
_ADDRESS_MARKS = "./-_@+~#"
_ADDRESS = re.compile(
    r"^(?P<open>[(\[<\"'“]*)(?:(?P<scheme>[a-z]+)://)?(?P<user>[\w.+-]+@)?"
    r"(?P<host>(?:[A-Za-z0-9-]+\.)+(?P<top>[A-Za-z]{2,}))(?P<port>:\d+)?"
    r"(?P<path>/[^\s?#]*?)?(?P<query>\?[^\s#]*?)?(?P<fragment>#\S*?)?(?P<close>[)\]>\"'”.,;:!?]*)$"
)
# A word without a scheme that contains a full stop is an address only if it ends in one of these.
_TOP_LEVEL_DOMAINS = frozenset([
    "com", "org", "net", "io", "ai", "dev", "edu", "gov", "app", "info", "uk", "de", "fr", "eu", "nl", "ca", "au", "co",
    "us", "me", "tv",
])  # fmt: skip
# The pattern is bounded, and no two adjacent parts can match the same character, so text with many brackets takes
# linear time.
_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\(([^()\s]{0,1000})(?: [^()\n]{0,300})?\)")
_OPEN_LINK = re.compile(r"\[[^\[\]\n]{0,300}(?:\](?:\([^()\n]{0,1000})?)?")
MAX_LINK_CHARS = 1300
# Matches the end of a complete word. A word is complete if the next word has begun, or if it ends with a Chinese,
# Japanese or Korean character. A word of letters is complete before white space, because only the spoken form of signs
# and numbers depends on the next word.
_WORD_ENDS = re.compile(r"\S(?=\s+\S)|[^\W\d_][,.;:!?]*(?=\s)|[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef](?=\S)")
# Maximum length of a text without white space that a reader holds back.
MAX_HELD_CHARS = 400
_PRONUNCIATION = re.compile(r"/.+/")
_MARKUP = re.compile(r"^[#*_`~|]+$")
# Matches marks of emphasis only at the edge of a word, so `2*3` and `snake_case` keep their marks.
_EMPHASIS = re.compile(r"(?<![^\W_])(?:\*{1,3}|_{1,3}|`+|~~)|(?:\*{1,3}|_{1,3}|`+|~~)(?![^\W_])")
_DASHES = r"\-‐‑‒–—−﹣－"
_NUMBER = r"[$€£¥]?\d[\d.,:]*(?<=\d)"
_RANGE = re.compile(rf"(?<![\w.,:/{_DASHES}])({_NUMBER}%?)([-‒–—])({_NUMBER})(?=[%°a-zA-Zµ²³]*(?:$|[^\w{_DASHES}]))")
# Matches telephone numbers such as `555-1234`, and years such as `2023-24`.
_PHONE = re.compile(r"\d{3}-\d{4}|\d+-0\d+")
_SIGN = re.compile(r"(?<![^\s(\[{\"'“„«:;,/])[-−﹣－](?=[$€£¥]?[.,]?\d)")
_INNER_MINUS = re.compile(r"(?<=[\w)])[−﹣－](?=[\w(])")
_MINUS_SIGNS = re.compile("[−﹣－]")
_DEGREES_BELOW = re.compile(r"^–(?=\d[\d.,]*(?:[°%]|$))")
_POWER = re.compile(r"(?<=[\w)])(?:\*\*|\^)(?=-?\d)|(?<=\b[A-Za-z])\*\*(?=[A-Za-z]\b)")
_TIMES = re.compile(r"(?<=\d)\*(?=\d)")
# Characters that are spoken although they are neither letters nor digits.
_HEARD = frozenset("%&@+=<>$€£¥°§^×÷±√∞≈≤≥≠→№")


@dataclass(frozen=True, slots=True)
class SaidWord:
    """A written word, delimited by white space, and its spoken form, which may be empty. `before` is the white space
    before the word.
    """

    before: str
    written: str
    said: str


def said_words(text: str, language: str | None) -> Iterator[SaidWord]:
    """Yield the words of a text in order. Each takes about 10 us. `language` is ISO 639-1. If it is None, only signs
    that can be spoken in any language are converted. A Markdown link becomes its text, but a link with a pronunciation,
    `[word](/phonemes/)`, stays.
    """
    text = _LINK.sub(lambda m: m[0] if _PRONUNCIATION.fullmatch(m[2]) else m[1], text)
    words = re.findall(r"(\s*)(\S+)", text.rstrip())
    plain: list[str] = []
    for at, (space, word) in enumerate(words):
        plain += ("".join(map(_plain_char, w)) for _, w in words[len(plain) : at + 2])
        yield SaidWord(space, word, _said(plain, at, language, on_line="\n" not in space))


def said_text(words: Iterable[SaidWord]) -> str:
    """Return the spoken forms of the words as one text, with the written white space."""
    return "".join(w.before + w.said for w in words if w.said)


def is_heard(text: str) -> bool:
    """Return whether a voice speaks any part of the text: a letter, a digit, or a sign that has a name."""
    return any(c.isalnum() or c in _HEARD for c in text)


class WrittenReader:
    """Reads one text that arrives in pieces of any size. The concatenation of the returned pieces is the `said_text` of
    the whole text. Returned pieces end between words.
    """

    def __init__(self, language: str | None) -> None:
        self._language = language
        # The incomplete rest of the text, and the word before it.
        self._held = self._before = ""

    def feed(self, text: str) -> str:
        """Append text, and return the spoken form of the complete words. A word of letters is complete when white space
        follows it, any other word when the next word begins.
        """
        self._held += text
        links = [m.span() for m in _LINK.finditer(self._held)]
        ends = [m.end() for m in _WORD_ENDS.finditer(self._held, 0, _open_link(self._held))]
        ends = [end for end in ends if not any(first < end < last for first, last in links)]
        # The spoken form of a sign depends on the words on both sides of it.
        while ends and not any(c.isalnum() for c in self._held[: ends[-1]].split()[-1]):
            ends.pop()
        if not ends and len(self._held) <= MAX_HELD_CHARS:
            return ""
        return self._take(ends[-1] if ends else len(self._held))

    def flush(self) -> str:
        """End the text, and return the spoken form of the rest."""
        return self._take(len(self._held))

    def _take(self, at: int) -> str:
        text, self._held = self._held[:at], self._held[at:]
        # The word before a sign is passed on for its meaning only, and is not spoken again.
        before = self._before if text[:1].isspace() else ""
        words = list(said_words(before + text, self._language))
        self._before = words[-1].written if words else ""
        return said_text(words[1:] if before else words)


def _open_link(text: str) -> int:
    """Return the index of a Markdown link that the text has begun but may not have ended, else the text's length."""
    at = text.rfind("[", max(0, len(text) - MAX_LINK_CHARS))
    is_open = at >= 0 and _OPEN_LINK.fullmatch(text, at)
    return at if is_open else len(text)


def address_words(found: re.Match[str], language: str | None) -> str:
    """Return the spoken form of an address, without its query: "a dash b dot com slash c hash d" for
    `https://a-b.com/c?d=1#d`.
    """
    names = dict(zip(_ADDRESS_MARKS, _ADDRESS_WORDS.get(language or "", _ADDRESS_MARKS), strict=True))

    def spelled(part: str, *, only_names: bool) -> str:
        said = (f" {names[c]} " if c in names else c if only_names or c.isalnum() else " " for c in part)
        return "".join(said)

    host, top = found["host"], found["top"]
    if len(top) == 2:
        host = host[:-2] + " ".join(top.upper())
    port = f" port {found['port'][1:]}" if found["port"] else ""
    fragment = found["fragment"] or ""
    spoken = spelled((found["user"] or "") + host, only_names=True) + port
    spoken += spelled((found["path"] or "").rstrip("/"), only_names=False)
    spoken += spelled(fragment if len(fragment) > 1 else "", only_names=False)
    return " ".join(spoken.split()) + found["close"]


def _said(plain: Sequence[str], at: int, language: str | None, *, on_line: bool) -> str:
    """Return the spoken form of the word `plain[at]`. `plain` are the text's words without unspoken characters."""
    word = plain[at]
    before = plain[at - 1] if at and on_line else ""
    after = plain[at + 1] if at + 1 < len(plain) else ""
    if operator := _operator(word, before, after, language):
        return operator
    if not word or _MARKUP.match(word):
        return ""
    if (found := _ADDRESS.match(word)) and (found["scheme"] or found["user"] or found["top"] in _TOP_LEVEL_DOMAINS):
        return address_words(found, language) if language in _ADDRESS_WORDS else word
    if word.startswith("["):
        # A word in brackets may carry its pronunciation, whose marks are not emphasis.
        return word
    minus = f"{MINUS[language]} " if language in MINUS else "-"
    word = _DEGREES_BELOW.sub(minus, word) if after[:1] in ("°", "%") or word[-1:] in "°%" else word
    word = _SIGN.sub(minus, word)
    word = _INNER_MINUS.sub(f" {minus}" if language in MINUS else "-", word)
    if language in TO and not _PHONE.fullmatch(word.strip("().,;:!?")):
        word = _RANGE.sub(rf"\1 {TO[language]} \3", word)
    word = _POWER.sub(" to the power of " if language == "en" else "^", word)
    if language == "en":
        word = _TIMES.sub(" times ", word)
        word = " ".join("".join(f" {_ENGLISH[c]} " if c in _ENGLISH else c for c in word).split())
    return _MINUS_SIGNS.sub("-", _EMPHASIS.sub("", word))


def _operator(word: str, before: str, after: str, language: str | None) -> str:
    """Return the spoken form of a word that is a sign between two other words, or "" for any other word."""
    if not before[-1:].isalnum() and before[-1:] not in (")", "²", "³", "%", "°"):
        return ""
    if not (after[:1].isalnum() or after[:1] in ("(", "-", "−", "$", "€", "√")):
        return ""
    minus = MINUS.get(language or "", "-")
    if word in ("−", "﹣", "－"):
        return minus
    if word == "-" and _value(before) is not None and _value(after) is not None:
        return minus if (_value(before) or 0) >= (_value(after) or 0) else ""
    is_english = language == "en"
    if word in ("**", "^"):
        return "to the power of" if is_english else "^"
    return "times" if is_english and word == "*" else ""


def _value(word: str) -> float | None:
    try:
        return float(word.strip("().,;:!?"))
    except ValueError:
        return None


def _plain_char(char: str) -> str:
    """Return the character, or "" if it is never spoken: emoji, control characters, zero-width marks."""
    if char.isascii():
        return char if char.isprintable() else ""
    kind = unicodedata.category(char)
    if kind == "Cf":
        # The zero-width joiner and non-joiner matter in Arabic and Indian scripts.
        return char if char in "\u200c\u200d" else ""
    if kind[0] == "C" or char == "\ufe0f" or (kind in ("So", "Sk") and ord(char) >= 0x2190):
        return ""
    return char
