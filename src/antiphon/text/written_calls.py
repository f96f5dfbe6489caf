"""Calls of tools that a model writes as JSON into its text: where they begin, and whether they are of what was said."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence

import regex

from antiphon.events.tools import Tool

# Words that begin alike for so many letters, or for all three of a short one, are taken for forms of one word ("rain",
# "raining"; "Londres", "London"; "Rom", "Rome").
ALIKE_LETTERS = 4
# A word of a tool's description tells what it is about if it has so many letters, and is none of these.
TELLING_LETTERS = 4
UNTELLING = regex.compile(
    "the|and|for|you|are|can|has|not|"
    "about|after|also|another|anything|before|call|called|does|from|function|give|given|have|into|know|need|only|other|"
    "please|should|some|somebody|something|tell|that|their|them|then|there|these|they|this|tool|user|want|wants|what|"
    "when|where|which|will|with|would|your"
)
_WORD = regex.compile(r"\p{L}+")
# How much of what may become the beginning of a call is held back, up to the name: one that is longer is prose.
MAX_HEAD_CHARS = 200
# Where a word begins inside a name.
_HUMP = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})")


class WrittenCallFinder:
    """Finds where JSON begins in a text that calls a tool of one of `names`: bare, fenced, in a list, in tags of
    another form, or wrapped as the APIs of servers wrap it. A call of what is no tool is found where its arguments
    begin.
    """

    def __init__(self, names: Collection[str]) -> None:
        names_of_tools = "|".join(regex.escape(name) for name in sorted(names, key=len, reverse=True))
        pattern = (
            r"(?<!\w)(?:```\w*\s*)?"
            r"(?:<(?:tools?|tool_calls?|function|functions|function_call|tool_code)>\s*)?"
            r"(?:\[\s*)?"
            r'(?:\{\s*"(?:tool_calls?|function_call|calls?|tools?)"\s*:\s*(?:\[\s*)?)?'
            r"\{\s*"
            r'(?:"id"\s*:\s*"[^"]*"\s*,\s*)?(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
            r'"(?:name|function|function_name|tool|tool_name)"\s*:\s*'
            rf'(?:"(?P<name>{names_of_tools})"|"(?:[^"\\]|\\.)*"\s*,\s*"(?:arguments|args|input)"\s*:\s*"?\s*\{{)'
        )
        # `regex` finds what may become a match, for which it takes quadratic time; `re` takes linear time for matches.
        self._whole, self._partial = re.compile(pattern), regex.compile(pattern)

    def find(self, before: str, text: str) -> tuple[int, str | None]:
        """Return where in the text a call begins, or may begin with what follows the text; len(text) where none does.
        Second the name of the call's tool, "" where it calls no tool; None where it is no call yet.

        `before`: the character before the text, "" for none: it decides what begins there. Beginnings of more than
        MAX_HEAD_CHARS, up to the name, are none.
        """
        whole, at = before + text, len(before)
        while found := self._whole.search(whole, at):
            if found.end() - found.start() <= MAX_HEAD_CHARS:
                return found.start() - len(before), found["name"] or ""
            at = found.start() + 1
        at = max(at, len(whole) - MAX_HEAD_CHARS)
        begun = self._partial.search(whole, at, partial=True)
        return (begun.start() - len(before) if begun else len(text)), None


def has_what_was_said(tools: Sequence[Tool], said: Sequence[tuple[str, str]], name: str, arguments: str) -> bool:
    """Return whether a call has anything of a conversation: a word of it in an argument, or in the user's last message
    a word of what the tool is about. True where that cannot be judged: a call of no free text, or what was said in
    another script than Latin.

    `said`: the roles and texts of the conversation's messages, in their order. `arguments`: JSON text. Small models
    make a call of anything, with arguments that nobody has said.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
    try:
        given = json.loads(arguments)
    except ValueError:
        return True
    if tool is None or not isinstance(given, dict):
        return True
    values = {word for key, value in given.items() if not _is_chosen(tool, key) for word in _words_in(value)}
    values = {word for word in values if _tells(word, 3)} or values
    asked = _words(next((text for role, text in reversed(said) if role == "user"), ""))
    if not values or not asked or not all(word.isascii() for word in asked):
        return True
    about = {word for word in _words_about(tool) if _tells(word, TELLING_LETTERS)}
    return _meet(values, _words(" ".join(text for _, text in said))) or _meet(about, asked)


def _words_about(tool: Tool) -> Iterator[str]:
    """The words of a tool's name and description, and of those of its parameters."""
    properties = tool.parameters.get("properties")
    listed = properties.items() if isinstance(properties, Mapping) else ()
    told = [tool.name, tool.description]
    for key, schema in listed:
        told += [key, str(schema.get("description", "")) if isinstance(schema, Mapping) else ""]
    yield from _words(_HUMP.sub(" ", " ".join(told)).replace("_", " "))


def _is_chosen(tool: Tool, key: str) -> bool:
    """Whether an argument is one of a list, of which any may be meant, or may be: its schema says no plain type."""
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return False
    inner = schema.get("items")
    return any(
        "enum" in one or "const" in one or "type" not in one for one in (schema, inner) if isinstance(one, Mapping)
    )


def _words_in(value: object) -> Iterator[str]:
    """The words of all texts in a JSON value."""
    if isinstance(value, str):
        yield from _words(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words_in(inner)


def _words(text: str) -> set[str]:
    """The words of a text in lower case, without accents."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return {word.lower() for word in _WORD.findall(plain)}


def _tells(word: str, letters: int) -> bool:
    return len(word) >= letters and not UNTELLING.fullmatch(word)


def _meet(some: Collection[str], others: Collection[str]) -> bool:
    """Whether a word is in both, or begins alike."""
    return bool(
        set(some) & set(others)
        or _beginnings(some, ALIKE_LETTERS) & _beginnings(others, ALIKE_LETTERS)
        or {word for word in some if len(word) == 3} & _beginnings(others, 3)
        or {word for word in others if len(word) == 3} & _beginnings(some, 3)
    )


def _beginnings(words: Collection[str], letters: int) -> set[str]:
    return {word[:letters] for word in words if len(word) >= letters}
