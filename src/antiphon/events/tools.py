"""Functions that a model may call in a conversation, and the calls that it makes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

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
