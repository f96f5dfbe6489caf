"""Functions that a model may call in a conversation, and the calls that it makes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

# Words of so many letters that begin alike are taken for forms of one word ("rain", "raining"; "Rom", "Rome").
ALIKE_LETTERS = 5
# A word of a tool's description tells what it is about if it has so many letters, and is none of these.
TELLING_LETTERS = 4
UNTELLING = regex.compile(
    "about|after|also|another|anything|before|call|called|does|from|function|give|given|have|into|know|need|only|other|"
    "please|should|some|somebody|something|tell|that|their|them|then|there|these|they|this|tool|user|want|wants|what|"
    "when|where|which|will|with|would|your"
)
_WORD = regex.compile(r"\p{L}+")
# The JSON schema of an object. A model is shown it, and its grammar keeps to it: nothing else looks into it.
JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model made. `arguments` is JSON text as the model wrote it, which may not fit the
    schema; `id` is what the call's result refers to.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; empty: it takes none."""

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)


def written_call(names: Collection[str]) -> regex.Pattern[str]:
    """Return a pattern that matches where JSON begins that calls a tool of one of `names`, up to its name, which is the
    group `name`: bare, fenced, in a list, in tags of another form, or wrapped as the APIs of servers wrap it. The group
    is empty where the form is that of a call, up to its arguments, and there is no such tool.
    """
    names_of_tools = "|".join(regex.escape(name) for name in sorted(names, key=len, reverse=True))
    return regex.compile(
        r"(?<!\w)(?:```\w*\s*)?"
        r"(?:<(?:tools?|tool_calls?|function|functions|function_call|tool_code)>\s*)?"
        r"(?:\[\s*)?"
        r'(?:\{\s*"(?:tool_calls?|function_call|calls?|tools?)"\s*:\s*(?:\[\s*)?)?'
        r"\{\s*"
        r'(?:"id"\s*:\s*"[^"]*"\s*,\s*)?(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
        r'"(?:name|function|function_name|tool|tool_name)"\s*:\s*'
        rf'(?:"(?P<name>{names_of_tools})"|"(?:[^"\\]|\\.)*"\s*,\s*"(?:arguments|args|input)"\s*:\s*"?\s*\{{)'
    )


def has_what_was_said(tools: Sequence[Tool], said: Sequence[str], name: str, arguments: str) -> bool:
    """Return whether a call has anything of a conversation: a word of it in an argument, or in its last message a word
    of what the tool is about. True where that cannot be judged: a call of no free text, or in another script.

    `said`: the texts of the conversation's messages, in their order. `arguments`: JSON text. Small models make a call
    of anything, with arguments that nobody has said.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
    try:
        given = json.loads(arguments)
    except ValueError:
        return True
    if tool is None or not isinstance(given, dict):
        return True
    values = [word for key, value in given.items() if not _is_chosen(tool, key) for word in _words_in(value)]
    heard = _words(" ".join(said))
    if not values or not any(word.isascii() for word in heard):
        return True
    about = _words(json.dumps([tool.name.replace("_", " "), tool.description, tool.parameters.get("properties")]))
    telling = {word for word in about if len(word) >= TELLING_LETTERS and not UNTELLING.fullmatch(word)}
    latest = next((text for text in reversed(said) if text.strip()), "")
    return _meet(values, heard) or _meet(telling, _words(latest))


def _is_chosen(tool: Tool, key: str) -> bool:
    """Whether an argument is one of a list, of which any may be meant."""
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(schema, Mapping) and ("enum" in schema or "const" in schema)


def _words_in(value: Any) -> Iterator[str]:
    """The words of all texts in a JSON value."""
    if isinstance(value, str):
        yield from _words(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words_in(inner)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _meet(some: Collection[str], others: Collection[str]) -> bool:
    """Whether a word is in both, or begins alike."""
    return any(
        one == other
        or (min(len(one), len(other)) > 2 and one[:ALIKE_LETTERS] == other[:ALIKE_LETTERS])
        or (len(one) > 2 < len(other) and (one.startswith(other) or other.startswith(one)))
        for one in some
        for other in others
    )
