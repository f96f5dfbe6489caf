"""Extracts plain text from text with markup that arrives in pieces of any size.

Removes tags of SSML, HTML and XML, special tokens of language models, code fences and a model's reasoning
(`<think>…</think>`). Entities become their characters. An SSML pause becomes a single character, its mark, so that the
pause keeps its place while the text is cut into sentences.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

# The mark of a pause is a character of a private plane. Its distance from _FIRST_MARK is the pause in hundredths of a
# second.
_FIRST_MARK, MAX_PAUSE_S = 0xF0000, 10.0
_MARKS = re.compile("[\U000f0000-\U000ffffd]")
_STRENGTHS_S = {"none": 0.0, "x-weak": 0.1, "weak": 0.2, "medium": 0.4, "strong": 0.7, "x-strong": 1.2}
_TIME = re.compile(r"\+?(\d{0,6}(?:\.\d{1,6})?)\s*(ms|s)")

# Every part of these patterns is bounded, and no two adjacent parts can match the same character, so text with many
# brackets takes linear time.
_NAME = r"[A-Za-z][\w.-]{0,40}(?::[\w-]{1,40})?"
_ATTRIBUTE = r"\s{1,20}[\w:.-]{1,60}\s{0,9}=\s{0,9}(?:\"[^\"<>]{0,300}\"|'[^'<>]{0,300}'|[^\s\"'<>=/]{1,100})"
_TAG = re.compile(
    rf"<(?P<end>/?)(?P<name>{_NAME})(?P<attributes>(?:{_ATTRIBUTE}){{0,20}})\s{{0,20}}/?>"
    r"|<!--|<\?[A-Za-z][^<>]{0,300}>|<![A-Za-z][^<>]{0,300}>|<\|[\w ./-]{1,60}\|>"
)
# Matches the beginning of a tag at the end of the text so far.
_OPEN_TAG = re.compile(
    rf"<(?:/?(?:{_NAME}:?(?:{_ATTRIBUTE}){{0,20}}(?:\s{{1,20}}(?:[\w:.-]{{1,60}}\s{{0,9}}"
    r"(?:=\s{0,9}(?:\"[^\"<>]{0,300}|'[^'<>]{0,300}|[^\s\"'<>=/]{1,100})?)?)?)?\s{0,20}/?)?"
    r"|!-?|[?!][A-Za-z][^<>]{0,300}|\?|\|[\w ./-]{0,60}\|?)\Z"
)
_ATTRIBUTES = re.compile(r"([\w:.-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'<>=/]+))")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_OPEN_ENTITY = re.compile(r"&#?\w{0,31}\Z")
# A fence is a line by itself, optionally with the name of a language.
_FENCE_LINE = r"[ \t]{0,9}(?:`{3,9}|~{3,9})[ \t]{0,9}[\w+#.-]{0,40}[ \t]{0,9}\r?"
_FENCE, _LAST_FENCE = re.compile(rf"{_FENCE_LINE}\n"), re.compile(rf"{_FENCE_LINE}(?:\n|\Z)")
_OPEN_FENCE = re.compile(r"[ \t]{0,9}(?:`{1,2}|~{1,2}|(?:`{3,9}|~{3,9})[ \t]{0,9}[\w+#.-]{0,40}[ \t]{0,9}\r?)?\Z")

_THOUGHTS = frozenset(["think", "thinking", "thought", "reasoning"])
# Elements whose content is not spoken.
_SILENT = frozenset(["script", "style", "metadata", "desc", "title", "head"]) | _THOUGHTS
# Elements whose tags do not end a word. All other tags do.
_INLINE = frozenset(["b", "i", "u", "em", "strong", "span", "a", "sub", "sup", "mark", "small", "code", "font", "ins"])
_INLINE |= {"del", "kbd", "emphasis", "prosody", "phoneme", "say-as", "voice", "lang", "w", "abbr", "q", "cite"}
# Values of `interpret-as` that make `say-as` spell its content. With other values, the content is read as written.
_SPELLED = frozenset(["characters", "spell-out", "verbatim", "digits", "telephone"])
_COMMENT = "--"
# Matches text up to the end of the line or to the next tag.
_RUN = re.compile(r"\n|[^\n][^\n<]*\n?")


def pause_mark(seconds: float) -> str:
    """Return the character that stands for a pause of at most MAX_PAUSE_S; "" for no pause."""
    steps = round(min(seconds, MAX_PAUSE_S) * 100)
    return chr(_FIRST_MARK + steps) if steps > 0 else ""


def pause_s(mark: str) -> float:
    """Return the seconds of the pause that a mark stands for, or 0 for any other text."""
    return (ord(mark) - _FIRST_MARK) / 100 if len(mark) == 1 and _MARKS.match(mark) else 0.0


def without_pauses(text: str) -> str:
    """Return the text without pause marks, as clients get it."""
    return " ".join(_MARKS.sub(" ", text).split()) if _MARKS.search(text) else text


def split_pauses(text: str) -> Iterator[str]:
    """Yield the pause marks of a text and the texts between them, in order."""
    at = 0
    for mark in _MARKS.finditer(text):
        if between := text[at : mark.start()]:
            yield between
        yield mark[0]
        at = mark.end()
    if text[at:]:
        yield text[at:]


def plain(text: str) -> str:
    """Return the plain text, with pause marks, of a complete text with markup."""
    reader = MarkupReader()
    return reader.feed(text) + reader.flush()


class MarkupReader:
    """Reads one text with markup. Characters that may begin markup, up to 7,000, are held back until that is decided.

    The concatenation of the returned pieces does not depend on how the text was cut.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        # The held characters of a possible entity, and of a possible tag or fence.
        self._entity = self._held = ""
        # The element whose content is being removed ("" for none), and whether the content of a `say-as` is spelled.
        self._silent = ""
        self._spells = False
        self._line_starts, self._last = True, ""

    def feed(self, text: str) -> str:
        """Append text, and return the part that is known to be plain."""
        text = _MARKS.sub("", self._entity + text)
        held = _OPEN_ENTITY.search(text, max(0, len(text) - 40))
        self._entity = text[held.start() :] if held else ""
        return self._read(_decoded(text[: held.start()] if held else text), final=False)

    def flush(self) -> str:
        """End the text, and return the rest of it. If a removed element is not closed, everything after its beginning
        is removed. Resets the reader.
        """
        out = self._read(self._entity, final=True)
        self._clear()
        return out

    def _read(self, text: str, *, final: bool) -> str:
        text, at, out = self._held + text, 0, list[str]()
        self._held = ""
        while at < len(text):
            if self._silent:
                end = self._silence_end(text, at)
                if end is None:
                    self._held = text[max(at, len(text) - 64) :]
                    break
                at, self._silent = end, ""
                continue
            if self._line_starts:
                if fence := (_LAST_FENCE if final else _FENCE).match(text, at):
                    at = fence.end()
                    continue
                if not final and _OPEN_FENCE.match(text, at):
                    self._held = text[at:]
                    break
            if text[at] == "<":
                if (tag := _TAG.match(text, at)) and not self._is_generic(tag):
                    out.append(self._tag(tag))
                    at = tag.end()
                    continue
                if not tag and not final and _OPEN_TAG.match(text, at):
                    self._held = text[at:]
                    break
            run = _RUN.match(text, at)
            assert run
            out.append(self._plain(run[0]))
            at = run.end()
        return "".join(out)

    def _silence_end(self, text: str, at: int) -> int | None:
        """Return the index at which the removed element ends, or None if its end has not arrived."""
        if self._silent == _COMMENT:
            found = text.find("-->", at)
            return found + 3 if found >= 0 else None
        closing = re.compile(rf"</{re.escape(self._silent)}\s{{0,20}}>", re.IGNORECASE).search(text, at)
        return closing.end() if closing else None

    def _plain(self, text: str) -> str:
        self._line_starts, self._last = text.endswith("\n"), text[-1]
        if self._spells:
            return "".join(f"{c} " for c in text if not c.isspace())
        return text

    def _is_generic(self, tag: re.Match[str]) -> bool:
        """Whether the match is not a tag but a type parameter, such as the `<String>` of `List<String>`."""
        name = tag["name"] or ""
        return self._last.isalnum() and name[:1].isupper() and not tag["end"] and not tag["attributes"]

    def _tag(self, tag: re.Match[str]) -> str:
        """Return the replacement for a tag, which is mostly an empty string or white space."""
        self._last = ""
        name = (tag["name"] or "").lower()
        if not name:
            self._silent = _COMMENT if tag[0] == "<!--" else ""
            return " "
        attributes = {key.lower(): a or b or c for key, a, b, c in _ATTRIBUTES.findall(tag["attributes"] or "")}
        closes, is_empty = bool(tag["end"]), tag[0].endswith("/>")
        if name == "break":
            mark = "" if closes else pause_mark(_break_s(attributes))
            return f" {mark} " if mark else " "
        if name == "say-as":
            self._spells = not closes and not is_empty and attributes.get("interpret-as", "").lower() in _SPELLED
            return " " if self._spells or closes else ""
        if not closes and not is_empty:
            if name == "sub" and "alias" in attributes:
                self._silent = name
                return str(attributes["alias"])
            if name in _SILENT:
                self._silent = name
                return " "
        if name in _INLINE:
            return ""
        self._line_starts = True
        return "\n"


def _decoded(text: str) -> str:
    return _ENTITY.sub(lambda found: _MARKS.sub("", html.unescape(found[0])), text)


def _break_s(attributes: dict[str, str]) -> float:
    time = _TIME.fullmatch(attributes.get("time", "").strip().lower())
    if time and time[1]:
        return float(time[1]) / (1000 if time[2] == "ms" else 1)
    return _STRENGTHS_S.get(attributes.get("strength", "medium").lower(), _STRENGTHS_S["medium"])
