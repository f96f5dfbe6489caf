"""Finds tool calls that a model writes as JSON into its text, and checks whether they relate to the conversation."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence

import regex

from antiphon.events.tools import Tool

# Two words count as forms of one word if their first ALIKE_LETTERS letters are the same ("rain", "raining"; "Londres",
# "London"). For a word of three letters, all three have to be the same ("Rom", "Rome").
ALIKE_LETTERS = 4
# A word of a tool's description is a keyword if it has at least TELLING_LETTERS letters and is not in UNTELLING.
TELLING_LETTERS = 4
UNTELLING = regex.compile(
    "the|and|for|you|are|can|has|not|"
    "about|after|also|another|anything|before|call|called|does|from|function|give|given|have|into|know|need|only|other|"
    "please|should|some|somebody|something|tell|that|their|them|then|there|these|they|this|tool|user|want|wants|what|"
    "when|where|which|will|with|would|your"
)
_WORD = regex.compile(r"\p{L}+")
# Maximum number of characters from the beginning of a possible call up to the tool's name. A longer beginning is prose
# and is not held back.
MAX_HEAD_CHARS = 200
# Matches the place inside a name at which a new word begins.
_HUMP = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})")


class WrittenCallFinder:
    """Finds the beginning of JSON that calls one of the tools with these `names`. The JSON may be bare, fenced, in a
    list, in tags of another form, or wrapped as in the APIs of servers. A call of an unknown tool is found only when
    its arguments begin.
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
        # `regex` supports partial matches, but takes quadratic time; `re` finds full matches in linear time.
        self._whole, self._partial = re.compile(pattern), regex.compile(pattern)

    def find(self, before: str, text: str) -> tuple[int, str | None]:
        """Return the index at which a call begins, or may begin if more text follows, or len(text) if none does. Also
        returns the name of the tool. It is "" for an unknown tool, and None if the beginning of the call is incomplete.

        `before` is the character before the text, "" for none. It determines whether a call can begin at the start of
        the text. A beginning that has more than MAX_HEAD_CHARS characters up to the name does not count.
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
    """Return whether a call relates to the conversation. It does if an argument has a word in common with the
    conversation, or the user's last message has a word in common with the tool's description. Also True if this cannot
    be judged, because the call has no free text or the message is not in Latin script.

    `said` are the roles and texts of the conversation's messages, in order. `arguments` is JSON text. The check is
    needed because small models call tools for any message, with arguments that nobody has said.
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
    """Yield the words of a tool's name and description, and of those of its parameters."""
    properties = tool.parameters.get("properties")
    listed = properties.items() if isinstance(properties, Mapping) else ()
    texts = [tool.name, tool.description]
    for key, schema in listed:
        texts += [key, str(schema.get("description", "")) if isinstance(schema, Mapping) else ""]
    yield from _words(_HUMP.sub(" ", " ".join(texts)).replace("_", " "))


def _is_chosen(tool: Tool, key: str) -> bool:
    """Return whether an argument may be chosen from a list: if its schema has an enum, a constant or no type."""
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return False
    inner = schema.get("items")
    return any(
        "enum" in one or "const" in one or "type" not in one for one in (schema, inner) if isinstance(one, Mapping)
    )


def _words_in(value: object) -> Iterator[str]:
    """Yield the words of all strings in a JSON value."""
    if isinstance(value, str):
        yield from _words(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words_in(inner)


def _words(text: str) -> set[str]:
    """Return the words of a text in lower case, without accents."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return {word.lower() for word in _WORD.findall(plain)}


def _tells(word: str, letters: int) -> bool:
    return len(word) >= letters and not UNTELLING.fullmatch(word)


def _meet(some: Collection[str], others: Collection[str]) -> bool:
    """Return whether a word is in both collections, or a word of one begins like a word of the other."""
    return bool(
        set(some) & set(others)
        or _beginnings(some, ALIKE_LETTERS) & _beginnings(others, ALIKE_LETTERS)
        or {word for word in some if len(word) == 3} & _beginnings(others, 3)
        or {word for word in others if len(word) == 3} & _beginnings(some, 3)
    )


def _beginnings(words: Collection[str], letters: int) -> set[str]:
    return {word[:letters] for word in words if len(word) >= letters}
