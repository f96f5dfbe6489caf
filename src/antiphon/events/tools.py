"""Functions that a model may call in a conversation, and the calls that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
