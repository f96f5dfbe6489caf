"""OpenAI's Chat Completions from the client's side: the body of a request, and the chunks of its answer. Pure.

vLLM, SGLang, llama.cpp, Ollama, antiphon itself and the hosted services offer this API. Fields beyond OpenAI's
(`top_k`, `min_p`, `repetition_penalty`) are sent only if a client set them.
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
    # Any type, because servers differ.
    usage: msgspec.Raw = msgspec.Raw(b"null")
    # An object with a message, or a message: servers differ.
    error: Any = None


_decoder, _usage_decoder = msgspec.json.Decoder(_Chunk), msgspec.json.Decoder(_Usage | None, strict=False)


class _Called(msgspec.Struct):
    name: str
    arguments: str


class _SentCall(msgspec.Struct, tag="function"):
    id: str
    function: _Called


class _SentMessage(msgspec.Struct):
    role: str
    content: str | list[SentPart] | None
    tool_calls: list[_SentCall] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class _Offered(msgspec.Struct):
    name: str
    description: str | UnsetType = UNSET
    parameters: msgspec.Raw | UnsetType = UNSET


class _SentTool(msgspec.Struct, tag="function"):
    function: _Offered


class _Schema(msgspec.Struct):
    name: str
    schema: msgspec.Raw


class _Format(msgspec.Struct, tag="json_schema"):
    json_schema: _Schema


class _Body(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a request. Fields that are None are not sent."""

    # The model's name at the server.
    model: str
    # The whole conversation.
    messages: list[_SentMessage]
    # Whether the reply is streamed; always True.
    stream: bool
    # Asks for token counts at the end.
    stream_options: dict[str, bool]
    # For vLLM: requests with different salts share no KV.
    cache_salt: str | None = None
    # The maximum number of tokens of the reply.
    max_tokens: int | None = None
    # The same limit, under the name that OpenAI's models since o1 use.
    max_completion_tokens: int | None = None
    # The temperature; 0 samples the likeliest token.
    temperature: float | None = None
    # The share of probability that may be sampled.
    top_p: float | None = None
    # The number of likeliest tokens that may be sampled.
    top_k: int | None = None
    # The minimum probability of a token, as a fraction of that of the likeliest token.
    min_p: float | None = None
    # Makes repeated tokens less likely if it is above 1.
    repetition_penalty: float | None = None
    # Subtracted from the logit of each token that has occurred.
    presence_penalty: float | None = None
    # Subtracted from a token's logit once for each occurrence.
    frequency_penalty: float | None = None
    # Seed of the random numbers.
    seed: int | None = None
    # Texts that end the reply.
    stop: list[str] | None = None
    # Values added to the logits, by token id.
    logit_bias: dict[str, float] | None = None
    # The functions that the model may call.
    tools: list[_SentTool] | None = None
    # The call that the model must make: "required" (any call) or a function; None: "auto".
    tool_choice: str | _SentTool | None = None
    # False allows only one call.
    parallel_tool_calls: bool | None = None
    # The JSON schema of the text.
    response_format: _Format | None = None


def body(model: str, messages: Sequence[Message], options: ReplyOptions, *, limit_field: str, salt: str = "") -> bytes:
    """Return the body of a request.

    `limit_field`: the server's name for the maximum number of tokens of the reply. `salt`: for vLLM, which does not
    share its cache between requests with different salts.
    """
    out = _Body(
        model=model,
        messages=[_message(m, salt) for m in messages],
        stream=True,
        stream_options={"include_usage": True},
        cache_salt=salt or None,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty or None,
        frequency_penalty=options.frequency_penalty or None,
        seed=options.seed,
        stop=list(options.stop) or None,
        logit_bias={str(token): bias for token, bias in options.bias.items()} or None,
    )
    setattr(out, limit_field, options.max_tokens)
    if options.tools and options.tool_choice != "none":
        out.tools = [_SentTool(_Offered(t.name, t.description, sent_parameters(t))) for t in options.tools]
        if options.tool_choice == "required":
            out.tool_choice = "required"
        elif options.tool_choice != "auto":
            out.tool_choice = _SentTool(_Offered(options.tool_choice))
        if not options.parallel_tool_calls:
            out.parallel_tool_calls = False
    if options.schema is not None:
        out.response_format = _Format(_Schema("answer", sent_schema(options.schema)))
    return msgspec.json.encode(out)


def _message(message: Message, salt: str) -> _SentMessage:
    if message.role == "tool":
        return _SentMessage("tool", message.text, tool_call_id=message.tool_call_id)
    out = _SentMessage(message.role, message.text)
    if message.parts:
        out.content = [content_part(part, "chat_completions", salt) for part in message.parts]
    if message.tool_calls:
        out.content = message.text or None
        out.tool_calls = [_SentCall(c.id, _Called(c.name, sent_arguments(c))) for c in message.tool_calls]
    return out


class ChatReader:
    """A ReplyReader of the chunks of Chat Completions."""

    def __init__(self) -> None:
        self.done = False
        self._reason: str | None = None
        self._calls = CallBuffer()
        # For each index: the number and the id of its newest call.
        self._call_at: dict[int, tuple[int, str]] = {}
        self._num_calls = 0
        self._thoughts = ThoughtFilter()
        self._usage = (0, 0, 0)

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Yield the content of one chunk; see ReplyReader."""
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
                # Some servers then close the connection without sending [DONE].
                self._reason, self.done = choice.finish_reason, True

    def _number_of(self, call: _Call) -> int:
        """Return the number of the call within the reply. Ollama before 0.9 sends whole calls, all with the index 0."""
        known = self._call_at.get(call.index)
        is_new = known is None or (call.function.name and call.id and call.id != known[1])
        if known is None or is_new:
            self._num_calls += 1
            known = self._call_at[call.index] = self._num_calls, call.id or ""
        return known[0]

    def end(self) -> Iterator[Reply]:
        """Yield the remaining content; see ReplyReader."""
        yield from self._thoughts.end()
        yield from self._calls.end()
        yield done(self._reason, len(self._calls), self._usage)
