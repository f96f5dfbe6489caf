"""The functions that a model may call in a conversation, and the model's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The JSON schema of an object. Only the model's prompt and grammar use its content.
JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model made.

    `arguments` is JSON text as the model wrote it. It may not match the schema. The result of the call refers to `id`.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; empty if it has none."""

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)
