"""The functions that a model may call in a conversation, the model's calls, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


# Why a call has no result: the tool reported an error, its server broke the protocol or took too long, or its server
# could not be reached. "": the call has a result. The values are those of OpenAI's `mcp_call.error.type`.
ToolFailure = Literal["", "tool_execution_error", "protocol_error", "http_error"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; empty if it has none.

    `server` is the label of the tool server that carries it out. If it is empty, the client carries it out.
    `read_only`: a call changes nothing, so that it may be cancelled at any time.
    """

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)
    server: str = ""
    read_only: bool = False

    def labelled(self) -> Tool:
        """Return the tool with its server's label and `__` before its name, for a name that is taken."""
        return replace(self, name=f"{self.server}__{self.name}")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool server returned for a call: the text for the model. If the call failed, the text says why."""

    text: str
    failure: ToolFailure = ""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What happens in a conversation while the results of function calls are not known yet.

    The defaults are the behaviour of OpenAI's API. All times count from the end of the response that calls.
    """

    # The fillers, of which each response with calls takes the next one; empty for none.
    fillers: tuple[str, ...] = ()
    # Whether the model words the fillers itself. `fillers` is then empty.
    generates_fillers: bool = False
    # The time without a result after which a filler is said, in milliseconds.
    filler_after_ms: float = 500.0
    # Whether the results of the client's functions are answered without a request, as those of tool servers are.
    answers_results: bool = False
    # The time after which a call has failed, in milliseconds; None: tool servers have limits of their own, and clients
    # have none.
    deadline_ms: float | None = None

    @property
    def has_fillers(self) -> bool:
        """Whether fillers are said."""
        return bool(self.fillers) or self.generates_fillers


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """A tool server carries out a function call, the item `item_id` at `output_index` of its response's output."""

    item_id: str
    output_index: int


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A tool server has returned the result of a function call, or the call has failed. An ItemDone follows."""

    item_id: str
    output_index: int
    failure: ToolFailure


ToolEvent = ToolCallBegan | ToolCallEnded
