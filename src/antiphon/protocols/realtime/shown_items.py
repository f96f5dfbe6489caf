"""Items and responses in the form that a client sees, as in OpenAI's Realtime API: docs/wire/openai-realtime.md.

They are copies that are made when an event is written. Later changes of the item or response do not affect them.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.events.conversation import ContentPart, ContentPosition, Item, Metadata, Response
from antiphon.protocols.realtime.input_fields import AudioFormat
from antiphon.protocols.realtime.items import VoiceId


class ShownPart(msgspec.Struct):
    """A content part as the client sees it, with the fields of its type."""

    type: str
    text: str | UnsetType = UNSET
    transcript: str | UnsetType | None = UNSET
    image_url: str | UnsetType = UNSET


class ShownItem(msgspec.Struct, kw_only=True):
    """An item as the client sees it, with the fields of its type."""

    # The item's id.
    id: str
    # Object type in OpenAI's API.
    object: str = "realtime.item"
    # `in_progress`, `completed` or `incomplete`.
    status: str
    # `message`, `function_call` or `function_call_output`.
    type: str
    # For a message: `system`, `user` or `assistant`.
    role: str | UnsetType = UNSET
    # For a message: its content parts.
    content: list[ShownPart] | UnsetType = UNSET
    # For a user's turn that continues an earlier item after a false start: the id of that item. An extension.
    continues: str | UnsetType = UNSET
    # For a function call or its result: the call's id.
    call_id: str | UnsetType = UNSET
    # For a function call: the function's name.
    name: str | UnsetType = UNSET
    # For a function call: its arguments, as JSON text.
    arguments: str | UnsetType = UNSET
    # For a function call's result: its text.
    output: str | UnsetType = UNSET


class ShownCallFailure(msgspec.Struct, omit_defaults=True):
    """Why a tool server's call failed. `code`: for errors of the protocol and of HTTP; 0 if it is not known."""

    type: str
    message: str
    code: int | UnsetType = UNSET


class ShownServerCall(msgspec.Struct, kw_only=True):
    """A call that a tool server carries out, as the client sees it. OpenAI's item has neither `object` nor `status`."""

    # The item's id.
    id: str
    # Object type in OpenAI's API.
    type: str = "mcp_call"
    # The label of the tool's server.
    server_label: str
    # The tool's name at its server.
    name: str
    # The arguments, as JSON text.
    arguments: str
    # The result; null until it is known, and for a failed call.
    output: str | None = None
    # Why the call failed; null if it did not.
    error: ShownCallFailure | None = None
    # The id of the request with which the call was approved.
    approval_request_id: str | UnsetType = UNSET


class ShownTool(msgspec.Struct):
    """A tool of a tool server, as the client sees it."""

    name: str
    description: str
    # JSON schema of the arguments.
    input_schema: object
    # What the server says of the tool: `readOnlyHint`.
    annotations: dict[str, bool]


class ShownToolList(msgspec.Struct, kw_only=True):
    """The tools of a tool server that the session names, as the client sees them. Empty until they are known."""

    # The item's id.
    id: str
    # Object type in OpenAI's API.
    type: str = "mcp_list_tools"
    # The server's label.
    server_label: str
    # The tools that the session may use.
    tools: list[ShownTool]


class ShownApprovalRequest(msgspec.Struct, kw_only=True):
    """A call of a tool server's tool that waits for an approval, as the client sees it."""

    # The item's id.
    id: str
    # Object type in OpenAI's API.
    type: str = "mcp_approval_request"
    # The label of the tool's server.
    server_label: str
    # The tool's name at its server.
    name: str
    # The arguments, as JSON text.
    arguments: str


class ShownApproval(msgspec.Struct, kw_only=True):
    """The client's answer to an approval request, as the client sees it."""

    # The item's id.
    id: str
    # Object type in OpenAI's API.
    type: str = "mcp_approval_response"
    # The id of the request.
    approval_request_id: str
    # Whether the call is approved.
    approve: bool
    # The client's reason.
    reason: str | None = None


AnyShownItem = ShownItem | ShownServerCall | ShownToolList | ShownApprovalRequest | ShownApproval


class ShownFailure(msgspec.Struct):
    """The error of a failed response."""

    type: str
    code: str
    message: str


VENDORS_REASONS = frozenset({"turn_detected", "client_cancelled", "max_output_tokens"})


class StatusDetails(msgspec.Struct):
    """Why a response is not complete. `reason` has a value that OpenAI uses, because some clients check it."""

    type: str
    reason: str | UnsetType = UNSET
    error: ShownFailure | UnsetType = UNSET


class CachedTokens(msgspec.Struct):
    """The number of cached prompt tokens, which were not computed again. All of them count as text."""

    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0


class InputTokens(msgspec.Struct):
    """The number of tokens in a prompt. All of them count as text."""

    text_tokens: int
    audio_tokens: int
    image_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokens


class OutputTokens(msgspec.Struct):
    """The number of tokens in a response. All of them count as text."""

    text_tokens: int
    audio_tokens: int = 0


class ShownUsage(msgspec.Struct):
    """The numbers of tokens in a response and its prompt."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokens
    output_token_details: OutputTokens


class ShownOutput(msgspec.Struct):
    """Format and voice of a response's audio, in the form that the session shows."""

    format: AudioFormat
    voice: VoiceId | str


class ShownAudio(msgspec.Struct):
    """`response.audio` as the client sees it."""

    output: ShownOutput


class ShownResponse(msgspec.Struct, kw_only=True):
    """A response as the client sees it."""

    # The response's id.
    id: str
    # Object type in OpenAI's API.
    object: str = "realtime.response"
    # `in_progress`, `completed`, `cancelled`, `incomplete` or `failed`.
    status: str
    # Why the response is not complete; null if it is.
    status_details: StatusDetails | None
    # The items that exist so far.
    output: list[AnyShownItem]
    # Output modalities with GA names: `["audio"]` or `["text"]`.
    output_modalities: list[str] | UnsetType = UNSET
    # Maximum number of tokens, or "inf".
    max_output_tokens: int | str
    # The client's own data.
    metadata: Metadata | None
    # Token counts; null while the response is in progress.
    usage: ShownUsage | None
    # Id of the conversation; missing for a response outside of the conversation.
    conversation_id: str | UnsetType = UNSET
    # Output modalities with beta names: `["audio", "text"]` or `["text"]`.
    modalities: list[str] | UnsetType = UNSET
    # Format and voice; only with GA names.
    audio: ShownAudio | UnsetType = UNSET


class OutputPlace(TypedDict):
    """The place of an item in a response, as fields of an event."""

    response_id: str
    item_id: str
    output_index: int


class ContentPlace(OutputPlace):
    """The place of a content part in a response, as fields of an event."""

    content_index: int


def response_json(
    response: Response, session_id: str, output: ShownOutput, *, beta: bool, shows_server_calls: bool = False
) -> ShownResponse:
    """Return the current state of a response, with its items so far. `output`: the format and voice of its audio.

    The usage is null while the response is in progress. Without `shows_server_calls`, the calls of tool servers are
    left out.
    """
    shown = ShownResponse(
        id=response.id,
        status=response.status,
        status_details=_status_details(response),
        output=[item_json(i, beta=beta) for i in response.output if shows_server_calls or not i.server],
        max_output_tokens=response.max_tokens or "inf",
        metadata=response.metadata,
        usage=None if response.status == "in_progress" else _usage_json(response),
    )
    if response.stored:
        shown.conversation_id = f"conv_{session_id.removeprefix('sess-')}"
    if beta:
        shown.modalities = ["audio", "text"] if response.audio_output else ["text"]
    else:
        shown.output_modalities = ["audio"] if response.audio_output else ["text"]
        shown.audio = ShownAudio(output)
    return shown


def _status_details(response: Response) -> StatusDetails | None:
    if response.status == "failed":
        kind = "server_error" if response.code == "server_error" else "invalid_request_error"
        return StatusDetails("failed", error=ShownFailure(kind, response.code, response.error))
    if response.status in ("cancelled", "incomplete"):
        return StatusDetails(response.status, response.reason if response.reason in VENDORS_REASONS else UNSET)
    return None


def _usage_json(response: Response) -> ShownUsage:
    used = response.usage
    prompt, cached, completion = (used.prompt_tokens, used.cached_tokens, used.completion_tokens) if used else (0, 0, 0)
    inputs = InputTokens(prompt, 0, 0, cached, CachedTokens(cached))
    return ShownUsage(prompt + completion, prompt, completion, inputs, OutputTokens(completion))


def item_json(item: Item, *, beta: bool) -> AnyShownItem:
    """Return the current state of an item, without audio. Skips content parts of a response that are still empty."""
    if item.kind == "tool_list":
        tools = [ShownTool(t.name, t.description, t.parameters, {"readOnlyHint": t.read_only}) for t in item.tools]
        return ShownToolList(id=item.id, server_label=item.server, tools=tools)
    if item.kind == "approval":
        reason = item.output or None
        return ShownApproval(id=item.id, approval_request_id=item.approval_id, approve=item.approves, reason=reason)
    if item.needs_approval:
        return ShownApprovalRequest(
            id=item.id, server_label=item.server, name=_own_name(item), arguments=item.arguments
        )
    if item.server:
        return _server_call(item)
    shown = ShownItem(id=item.id, status=item.status, type=item.kind)
    match item.kind:
        case "message":
            shown.role = item.role
            shown.continues = item.continues or UNSET
            shown.content = [
                _content(p, beta=beta)
                for p in item.parts
                if p.text or item.status != "in_progress" or p.kind[:2] == "in"
            ]
        case "function_call":
            shown.call_id, shown.name, shown.arguments = item.call_id, item.name, item.arguments
        case "function_call_output":
            shown.call_id, shown.output = item.call_id, item.output
    return shown


def _server_call(item: Item) -> ShownServerCall:
    shown = ShownServerCall(
        id=item.id,
        server_label=item.server,
        name=_own_name(item),
        arguments=item.arguments,
        approval_request_id=item.approval_id or UNSET,
    )
    if item.failure:
        code = UNSET if item.failure == "tool_execution_error" else 0
        shown.error = ShownCallFailure(item.failure, item.output, code)
    elif item.status == "completed":
        shown.output = item.output
    return shown


def _own_name(item: Item) -> str:
    return item.name.removeprefix(f"{item.server}__")


def output_place(position: ContentPosition) -> OutputPlace:
    """Return the place of an item in a response, as fields of an event."""
    return {
        "response_id": position.response_id,
        "item_id": position.item_id,
        "output_index": position.output_index,
    }


def content_place(position: ContentPosition) -> ContentPlace:
    """Return the place of a content part in a response, as fields of an event."""
    return {
        "response_id": position.response_id,
        "item_id": position.item_id,
        "output_index": position.output_index,
        "content_index": position.content_index,
    }


def part_json(part: ContentPart) -> ShownPart:
    """Return a content part of a response. Its type is `audio` or `text`, even with GA names."""
    if part.kind == "output_audio":
        return ShownPart("audio", transcript=part.text)
    return ShownPart("text", part.text)


def _content(part: ContentPart, *, beta: bool) -> ShownPart:
    match part.kind:
        case "input_text":
            return ShownPart("input_text", part.text)
        case "input_audio":
            return ShownPart("input_audio", transcript=part.text or None)
        case "input_image":
            return ShownPart("input_image", image_url=part.image)
        case "output_text":
            return ShownPart("text" if beta else "output_text", part.text)
        case "output_audio":
            return ShownPart("audio" if beta else "output_audio", transcript=part.text)
