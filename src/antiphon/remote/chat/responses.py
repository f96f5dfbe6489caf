"""OpenAI's Responses API from the client's side: the body of a request, and the events of its answer. Pure.

The server stores nothing: each request carries the whole conversation as it was heard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.contracts import Message, Reply, ReplyOptions
from antiphon.errors import RemoteError
from antiphon.remote.chat.messages import SentPart, content_part, sent_arguments, sent_parameters, sent_schema
from antiphon.remote.chat.replies import CallBuffer, Count, ThoughtFilter, done
from antiphon.remote.http import decoded, error_text, optional


class _Item(msgspec.Struct):
    type: str = ""
    call_id: str = ""
    name: str = ""


class _InputDetails(msgspec.Struct):
    cached_tokens: Count | None = 0


class _Usage(msgspec.Struct):
    input_tokens: Count | None = 0
    output_tokens: Count | None = 0
    input_tokens_details: _InputDetails | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    # Any type, because servers differ.
    usage: msgspec.Raw = msgspec.Raw(b"null")
    incomplete_details: _Incomplete | None = None
    # An object with a message, or a message: servers differ.
    error: Any = None


class _Event(msgspec.Struct):
    """An event of the answer."""

    # The name of the event.
    type: str
    # More text, or more of a call's arguments.
    delta: str = ""
    # The position of the item in the output.
    output_index: int = 0
    # The item that was added.
    item: _Item | None = None
    # The response, in its last event.
    response: _Response | None = None
    # The message of an error event.
    message: str | None = None


class _AnyEvent(msgspec.Struct):
    """An event of any type. The fields of types that are not used may have any form."""

    type: str


_type_decoder = msgspec.json.Decoder(_AnyEvent)
_decoder, _usage_decoder = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Usage | None, strict=False)
_READ = {
    "response.output_text.delta",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
}


class _Said(msgspec.Struct, tag="output_text"):
    text: str
    annotations: tuple[()] = ()


class _SentItem(msgspec.Struct, kw_only=True):
    """An item of the input: a message, a function's call or its result. Fields that do not apply are unset."""

    # The kind of the item; unset for the user's messages.
    type: str | UnsetType = UNSET
    # The id of an assistant's message.
    id: str | UnsetType = UNSET
    # The status of an assistant's message: always "completed".
    status: str | UnsetType = UNSET
    # The role of a message's author.
    role: str | UnsetType = UNSET
    # The content of a message.
    content: str | list[SentPart] | list[_Said] | UnsetType = UNSET
    # The id that links a call and its result.
    call_id: str | UnsetType = UNSET
    # The function that a call names.
    name: str | UnsetType = UNSET
    # The arguments of a call, as JSON text.
    arguments: str | UnsetType = UNSET
    # The text of a result.
    output: str | UnsetType = UNSET


class _SentTool(msgspec.Struct, tag="function"):
    name: str
    description: str | UnsetType = UNSET
    parameters: msgspec.Raw | UnsetType = UNSET


class _Format(msgspec.Struct, tag="json_schema"):
    name: str
    schema: msgspec.Raw


class _Body(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a request. Fields that are None are not sent."""

    # The model's name at the server.
    model: str
    # The conversation without system messages.
    input: list[_SentItem]
    # Whether the reply is streamed; always True.
    stream: bool
    # Whether the server keeps the reply; always False.
    store: bool
    # The system messages.
    instructions: str | None = None
    # The maximum number of tokens of the reply.
    max_output_tokens: int | None = None
    # The temperature; 0 samples the likeliest token.
    temperature: float | None = None
    # The share of probability that may be sampled.
    top_p: float | None = None
    # The functions that the model may call.
    tools: list[_SentTool] | None = None
    # Whether the model must make a call: "auto", "required", or the function that it must call.
    tool_choice: str | _SentTool | None = None
    # False allows only one call.
    parallel_tool_calls: bool | None = None
    # The JSON schema of the text.
    text: dict[str, _Format] | None = None


def body(model: str, messages: Sequence[Message], options: ReplyOptions) -> bytes:
    """Return the body of a request. Options that the API lacks (seeds, penalties, stops, biases) are not sent."""
    out = _Body(
        model=model,
        input=[item for n, m in enumerate(messages) if m.role != "system" for item in _items(n, m)],
        stream=True,
        store=False,
        instructions="\n\n".join(m.text for m in messages if m.role == "system") or None,
        max_output_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    if options.tools and options.tool_choice != "none":
        out.tools = [_SentTool(t.name, t.description, sent_parameters(t)) for t in options.tools]
        choice = options.tool_choice
        out.tool_choice = choice if choice in ("auto", "required") else _SentTool(choice)
        if not options.parallel_tool_calls:
            out.parallel_tool_calls = False
    if options.schema is not None:
        out.text = {"format": _Format("answer", sent_schema(options.schema))}
    return msgspec.json.encode(out)


def _items(number: int, message: Message) -> list[_SentItem]:
    if message.role == "tool":
        return [_SentItem(type="function_call_output", call_id=message.tool_call_id, output=message.text)]
    items: list[_SentItem] = []
    if message.role == "assistant":
        if message.text:
            # The long form, because llama.cpp's server accepts no other.
            said, name = [_Said(message.text)], f"msg_{number}"
            items.append(_SentItem(type="message", id=name, status="completed", role="assistant", content=said))
    else:
        parts = [content_part(part, "responses") for part in message.parts]
        items.append(_SentItem(role=message.role, content=parts or message.text))
    items += [
        _SentItem(type="function_call", call_id=c.id, name=c.name, arguments=sent_arguments(c))
        for c in message.tool_calls
    ]
    return items


class ResponsesReader:
    """A ReplyReader of the Responses API's events."""

    def __init__(self) -> None:
        self.done = False
        self._reason: str | None = None
        self._calls = CallBuffer()
        self._thoughts = ThoughtFilter()
        self._usage = (0, 0, 0)

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Yield the content of one event; see ReplyReader. Events of other types are ignored."""
        if data == b"[DONE]":
            return
        if decoded(_type_decoder, data, "event of an answer").type not in _READ:
            return
        event = decoded(_decoder, data, "event of an answer")
        match event.type:
            case "response.output_text.delta":
                yield from self._thoughts.feed(event.delta)
            case "response.output_item.added":
                if event.item and event.item.type == "function_call":
                    yield from self._calls.add(event.output_index, event.item.call_id, event.item.name, "")
            case "response.function_call_arguments.delta":
                yield from self._calls.add(event.output_index, "", "", event.delta)
            case "response.completed" | "response.incomplete":
                self._end(event.response or _Response())
            case _:
                failed = event.response and event.response.error
                raise RemoteError(f"the model's server failed in its answer: {error_text(failed or event.message)}")

    def _end(self, response: _Response) -> None:
        self.done = True
        if usage := optional(_usage_decoder, response.usage):
            cached = (usage.input_tokens_details and usage.input_tokens_details.cached_tokens) or 0
            self._usage = (usage.input_tokens or 0, cached, usage.output_tokens or 0)
        details = response.incomplete_details
        self._reason = "length" if details and details.reason == "max_output_tokens" else None

    def end(self) -> Iterator[Reply]:
        """Yield the remaining content; see ReplyReader."""
        yield from self._thoughts.end()
        yield from self._calls.end()
        yield done(self._reason, len(self._calls), self._usage)
