"""OpenAI's Chat Completions from the client's side: the body of a request, and the chunks of its answer. Pure.

vLLM, SGLang, llama.cpp, Ollama, antiphon itself and the hosted services speak it. What is sent beyond OpenAI's fields
(`top_k`, `min_p`, `repetition_penalty`) is sent only where a client asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from antiphon.contracts import Message, Reply, ReplyOptions
from antiphon.errors import RemoteError
from antiphon.remote.media import content_part
from antiphon.remote.messages import sent_arguments
from antiphon.remote.replies import CallBuffer, Count, ThoughtFilter, done
from antiphon.upstream.http import decoded, error_text, optional


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = 0
    completion_tokens: Count | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    # Any type, as with servers of others.
    usage: msgspec.Raw = msgspec.Raw(b"null")
    # An error has a message, or is one: servers differ.
    error: Any = None


_decoder, _usage_decoder = msgspec.json.Decoder(_Chunk), msgspec.json.Decoder(_Usage | None, strict=False)


def body(
    model: str, messages: Sequence[Message], options: ReplyOptions, *, limit_field: str, salt: str = ""
) -> dict[str, Any]:
    """The body of a request. `limit_field`: the name that the server has for the most tokens of the reply. `salt`: for
    vLLM, which keeps what it has cached for one salt from requests with another.
    """
    out: dict[str, Any] = {
        "model": model,
        "messages": [_message(m, salt) for m in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if salt:
        out["cache_salt"] = salt
    chosen = {
        limit_field: options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty or None,
        "frequency_penalty": options.frequency_penalty or None,
        "seed": options.seed,
        "stop": list(options.stop) or None,
        "logit_bias": {str(token): bias for token, bias in options.bias.items()} or None,
    }
    out |= {name: value for name, value in chosen.items() if value is not None}
    if options.tools and options.tool_choice != "none":
        out["tools"] = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": schema(t.parameters)},
            }
            for t in options.tools
        ]
        if options.tool_choice == "required":
            out["tool_choice"] = "required"
        elif options.tool_choice != "auto":
            out["tool_choice"] = {"type": "function", "function": {"name": options.tool_choice}}
        if not options.parallel_tool_calls:
            out["parallel_tool_calls"] = False
    if options.schema is not None:
        out["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": dict(options.schema)},
        }
    return out


# A JSON schema has keys and values of any kind.
def schema(parameters: Any) -> dict[str, Any]:
    """A function's parameters, where none are an object without fields: servers refuse an empty schema."""
    return dict(parameters) or {"type": "object", "properties": {}}


def _message(message: Message, salt: str) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.text}
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.parts:
        out["content"] = [content_part(part, "chat_completions", salt) for part in message.parts]
    if message.tool_calls:
        out["content"] = message.text or None
        out["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": sent_arguments(c)}}
            for c in message.tool_calls
        ]
    return out


class ChatReader:
    """A ReplyReader of Chat Completions."""

    def __init__(self) -> None:
        self.done = False
        self._reason: str | None = None
        self._calls = CallBuffer()
        # The number and the id of the newest call with an index.
        self._call_at: dict[int, tuple[int, str]] = {}
        self._num_calls = 0
        self._thoughts = ThoughtFilter()
        self._usage = (0, 0, 0)

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Yield what one chunk says; see ReplyReader."""
        if data == b"[DONE]":
            self.done = True
            return
        chunk = decoded(_decoder, data, "chunk of an answer")
        if chunk.error is not None:
            raise RemoteError(f"the model's server failed in its answer: {error_text(chunk.error)}")
        if usage := optional(_usage_decoder, chunk.usage):
            cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
            self._usage = (usage.prompt_tokens or 0, cached, usage.completion_tokens or 0)
        for choice in chunk.choices[:1]:
            if choice.delta.content:
                yield from self._thoughts.feed(choice.delta.content)
            for call in choice.delta.tool_calls or ():
                name, arguments = call.function.name or "", call.function.arguments or ""
                yield from self._calls.add(self._number_of(call), call.id or "", name, arguments)
            if choice.finish_reason:
                # Some servers close the connection behind it and never send [DONE].
                self._reason, self.done = choice.finish_reason, True

    def _number_of(self, call: _Call) -> int:
        """Which call of the reply this is a part of. Ollama before 0.9 gives all calls the index 0, each whole."""
        known = self._call_at.get(call.index)
        is_new = known is None or (call.function.name and call.id and call.id != known[1])
        if known is None or is_new:
            self._num_calls += 1
            known = self._call_at[call.index] = self._num_calls, call.id or ""
        return known[0]

    def end(self) -> Iterator[Reply]:
        """Yield what is left; see ReplyReader."""
        yield from self._thoughts.end()
        yield from self._calls.end()
        yield done(self._reason, len(self._calls), self._usage)
