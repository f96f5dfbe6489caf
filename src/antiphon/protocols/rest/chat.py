"""Bodies of POST /v1/chat/completions. Reads and checks requests. Writes completions, whole or as chunks.

The fields are those of OpenAI's API reference, plus `top_k`, `min_p` and `repetition_penalty` as in vLLM. See
docs/wire/chat-completions.md. Fields that are not in `ChatBody` are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.contracts import (
    Message,
    MessageRole,
    Reply,
    ReplyDone,
    ReplyOptions,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import JsonSchema, Tool, ToolCall
from antiphon.protocols.fields import Text, check_complexity, check_typos, refusal, seed
from antiphon.protocols.wire import JSON_ERRORS

Number = TypeVar("Number", int, float)
MAX_STOPS = 16
_CHOICES = ("auto", "none", "required", "any")
# Limits of `logit_bias`: the number of tokens, because all are applied at each step, and the absolute value of a bias.
MAX_BIASES, MAX_BIAS = 1024, 100
ROLES: Mapping[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Function(msgspec.Struct):
    """The function in a call. `arguments` is JSON text, but some clients send the object itself."""

    name: Text
    arguments: Text | JsonSchema | None = None


class _Call(msgspec.Struct):
    id: Text
    function: _Function
    type: Text = "function"


class _Part(msgspec.Struct):
    type: Text
    text: Text = ""


class _Message(msgspec.Struct):
    role: Text
    content: Text | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None


class _ToolFunction(msgspec.Struct):
    name: Text
    description: Text | None = None
    parameters: JsonSchema | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction
    type: Text = "function"


class _Named(msgspec.Struct):
    name: Text


class _Choice(msgspec.Struct):
    """A `tool_choice` that is an object: either the name of a function, or one of _CHOICES as its `type`."""

    type: Text = "function"
    function: _Named | None = None
    name: Text | None = None


class _Schema(msgspec.Struct):
    schema: JsonSchema | None = None
    name: Text = ""


class _Format(msgspec.Struct):
    type: Text
    json_schema: _Schema | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatBody(msgspec.Struct):
    """A body as the client sent it. In optional fields, null counts as missing."""

    # Name of the model.
    model: Text
    # The conversation, oldest message first.
    messages: list[_Message]
    # Whether to answer with server-sent events.
    stream: bool | None = None
    # Whether the last chunk of the stream has the token counts.
    stream_options: _StreamOptions | None = None
    # Maximum number of tokens to generate; -1 for no limit.
    max_tokens: int | None = None
    # Newer name of `max_tokens`. It takes precedence.
    max_completion_tokens: int | None = None
    # Sampling temperature in [0, 2]; 0 always takes the most likely token.
    temperature: float | None = None
    # Top-p sampling: the total probability of the tokens to sample from, in [0, 1].
    top_p: float | None = None
    # Number of most likely tokens to sample from; 0 or less for no limit.
    top_k: int | None = None
    # Minimum probability of a token to be sampled, relative to the most likely token, in [0, 1].
    min_p: float | None = None
    # Repetition penalty in [0.01, 10]; above 1, tokens that were already used become less likely.
    repetition_penalty: float | None = None
    # Presence penalty in [-2, 2], subtracted once from the logit of each token that was already used.
    presence_penalty: float | None = None
    # Frequency penalty in [-2, 2], subtracted from a token's logit for each time that it was used.
    frequency_penalty: float | None = None
    # Random seed.
    seed: int | None = None
    # Strings that end the generation, at most MAX_STOPS.
    stop: Text | list[Text] | None = None
    # Number of completions; only 1 is supported.
    n: int | None = None
    # Values to add to logits, by token id.
    logit_bias: dict[Text, float] | None = None
    # Not supported; has to be false or missing.
    logprobs: bool | None = None
    # Functions that the model may call.
    tools: list[_Tool] | None = None
    # Which function the model may or must call.
    tool_choice: Text | _Choice | None = None
    # Whether an answer may contain several function calls.
    parallel_tool_calls: bool | None = None
    # Not supported. OpenAI has replaced it with `tools`.
    functions: list[object] | None = None
    # Format of the answer: text, any JSON object, or JSON that follows a schema.
    response_format: _Format | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request with checked fields. Only `model` is not checked: the model may not be loaded.

    `messages` are in the client's order. `include_usage`: the last chunk of a stream has the token counts.
    """

    model: str
    messages: tuple[Message, ...]
    options: ReplyOptions
    stream: bool = False
    include_usage: bool = False


_decoder = msgspec.json.Decoder(ChatBody)
_encode = msgspec.json.Encoder().encode


def parse(data: bytes) -> ChatRequest:
    """Read the body of a request.

    Raises RemoteProtocolError with the code `invalid_json`, `json_too_complex` or `string_above_max_length`, or with
    `invalid_value` for any other error. `param` is the path of the field if a single field is at fault.
    """
    body = _decode_body(data)
    if not body.messages:
        raise RemoteProtocolError("invalid_value", "'messages' is empty.", "messages")
    if body.n not in (None, 1):
        raise RemoteProtocolError("invalid_value", "Only n = 1 is served.", "n")
    if body.logprobs:
        raise RemoteProtocolError("invalid_value", "logprobs are not served.", "logprobs")
    options = _options(body)
    return ChatRequest(
        body.model,
        tuple(_message(m, i) for i, m in enumerate(body.messages)),
        options,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
    )


def _decode_body(data: bytes) -> ChatBody:
    check_complexity(data)
    try:
        body = _decoder.decode(data)
        check_typos(data, ChatBody)
        return body
    except msgspec.ValidationError as error:
        if (refused := refusal(error)).code == "string_above_max_length":
            raise refused from None
        # msgspec names the field only in the error's message: "Object missing required field `model`", "Expected `int`,
        # got `str` - at `$.max_tokens`".
        text = str(error)
        named = text.rpartition("`$.")[2] if "`$." in text else text.partition("field `")[2]
        raise RemoteProtocolError("invalid_value", f"Invalid request: {error}", named.strip("`") or None) from None
    except JSON_ERRORS as error:
        raise RemoteProtocolError("invalid_json", f"The body is not JSON: {error}") from None


def _options(body: ChatBody) -> ReplyOptions:
    if body.functions:
        raise RemoteProtocolError("invalid_value", "Functions are given in 'tools'.", "functions")
    # Some clients send -1 for "no limit".
    limit = body.max_completion_tokens or body.max_tokens
    tools = tuple(
        Tool(t.function.name, t.function.description or "", t.function.parameters or {}) for t in body.tools or ()
    )
    return ReplyOptions(
        max_tokens=_in_range("max_tokens", None if limit == -1 else limit, 1, 1 << 20),
        temperature=_in_range("temperature", body.temperature, 0, 2),
        top_p=_in_range("top_p", body.top_p, 0, 1),
        top_k=_in_range("top_k", None if body.top_k is None else max(0, body.top_k), 0, 1 << 20),
        min_p=_in_range("min_p", body.min_p, 0, 1),
        repetition_penalty=_in_range("repetition_penalty", body.repetition_penalty, 0.01, 10),
        presence_penalty=_in_range("presence_penalty", body.presence_penalty, -2, 2) or 0.0,
        frequency_penalty=_in_range("frequency_penalty", body.frequency_penalty, -2, 2) or 0.0,
        seed=seed(body.seed),
        stop=_stops(body.stop),
        bias=_bias(body.logit_bias),
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        schema=_schema(body.response_format),
    )


def _in_range(name: str, value: Number | None, low: float, high: float) -> Number | None:
    if value is not None and not low <= value <= high:
        raise RemoteProtocolError("invalid_value", f"'{name}' is {value}, not between {low} and {high}.", name)
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise RemoteProtocolError("invalid_value", f"'stop' takes up to {MAX_STOPS} strings, none empty.", "stop")
    return stops


def _bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    """Check the biases. Does not check whether the token ids exist: the model does that."""
    bias = bias or {}
    if len(bias) > MAX_BIASES:
        raise RemoteProtocolError("invalid_value", f"'logit_bias' has at most {MAX_BIASES} tokens.", "logit_bias")
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and -MAX_BIAS <= value <= MAX_BIAS):
            expected = f"token ids with numbers of -{MAX_BIAS} to {MAX_BIAS}"
            raise RemoteProtocolError("invalid_value", f"'logit_bias' maps {expected}.", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _tool_choice(choice: str | _Choice | None, tools: Sequence[Tool]) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, _Choice) and choice.type in _CHOICES:
        choice = choice.type
    if isinstance(choice, str):
        # LangChain's and Mistral's clients use `any`.
        choice = "required" if choice == "any" else choice
        if choice not in ("auto", "none", "required"):
            raise RemoteProtocolError("invalid_value", f"Invalid value: '{choice}'.", "tool_choice")
        if choice == "required" and not tools:
            raise RemoteProtocolError("invalid_value", "'tool_choice' needs 'tools'.", "tool_choice")
        return choice
    name = choice.function.name if choice.function else choice.name
    if name not in {t.name for t in tools}:
        raise RemoteProtocolError("invalid_value", f"There is no tool '{name or choice.type}'.", "tool_choice")
    return name or ""


def _schema(response_format: _Format | None) -> JsonSchema | None:
    match response_format:
        case None | _Format(type="text"):
            return None
        case _Format(type="json_object"):
            return {"type": "object"}
        case _Format(type="json_schema", json_schema=_Schema(schema=dict() as schema)):
            return schema
    raise RemoteProtocolError(
        "invalid_value", "'response_format' is text, json_object or json_schema with a schema.", "response_format"
    )


def _message(message: _Message, index: int) -> Message:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise RemoteProtocolError("invalid_value", f"Invalid role: '{message.role}'.", f"{where}.role")
    parts = [_Part("text", message.content)] if isinstance(message.content, str) else message.content or []
    for part in parts:
        if part.type not in ("text", "input_text", "refusal"):
            raise RemoteProtocolError("invalid_value", f"The model reads text, not '{part.type}'.", f"{where}.content")
    return Message(
        ROLES[message.role],
        "".join(p.text for p in parts),
        tuple(ToolCall(c.id, c.function.name, _arguments(c.function)) for c in message.tool_calls or ()),
        message.tool_call_id or "",
        message.name or "",
    )


def _arguments(function: _Function) -> str:
    given = function.arguments
    return given if isinstance(given, str) else _encode(given or {}).decode()


class _CalledFunction(msgspec.Struct):
    """The function in a call. In chunks, `arguments` is the new text, and only the first chunk has the name."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class _MadeCall(msgspec.Struct, kw_only=True):
    """A function call by the model. Each chunk of it has the `index`, but only the first has the id and the type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: _CalledFunction


class _Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[_MadeCall] | UnsetType = UNSET


class _Answer(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[_MadeCall] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: None
    finish_reason: str | None


class _WholeChoice(msgspec.Struct):
    index: int
    message: _Answer
    logprobs: None
    finish_reason: str


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails


class _Chunk(msgspec.Struct):
    # The id of the completion, the same in all chunks.
    id: str
    # Object type in OpenAI's API.
    object: Literal["chat.completion.chunk"]
    # Time of creation, in Unix seconds.
    created: int
    # The model's name as the client spells it.
    model: str
    # The new text or calls; empty in the chunk with the token counts.
    choices: list[_ChunkChoice]
    # Token counts, only in the last chunk.
    usage: _Usage | UnsetType = UNSET


class _Whole(msgspec.Struct):
    # The completion's id.
    id: str
    # Object type in OpenAI's API.
    object: Literal["chat.completion"]
    # Time of creation, in Unix seconds.
    created: int
    # The model's name as the client spells it.
    model: str
    # The completion's only answer.
    choices: list[_WholeChoice]
    # Token counts.
    usage: _Usage


class _Failure(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _ErrorChunk(msgspec.Struct):
    error: _Failure


@dataclass(slots=True)
class ChatCompletion:
    """One completion, built from the model's replies. `feed` returns its chunks, and `body` the whole completion."""

    # The completion's id.
    id: str
    # The model's name as the client spells it.
    model: str
    # Time of the request, in Unix seconds.
    created_s: int
    # Whether the stream's last chunk has the token counts.
    include_usage: bool = False
    _text: str = ""
    _calls: list[_MadeCall] = field(default_factory=list)
    _done: ReplyDone | None = None

    def begin(self) -> bytes:
        """Return the first chunk of a stream, as a server-sent event. It has the role, but no text."""
        return self._chunk(_Delta(role="assistant", content=""))

    def feed(self, reply: Reply) -> list[bytes]:
        """Return the chunks for a reply, each as a server-sent event. For ReplyDone, the last of them is `[DONE]`."""
        match reply:
            case TextDelta(text):
                self._text += text
                return [self._chunk(_Delta(content=text))]
            case ToolCallStarted(id, name):
                self._calls.append(_MadeCall(id=id, type="function", function=_CalledFunction(name)))
                begun = _MadeCall(index=len(self._calls) - 1, id=id, type="function", function=_CalledFunction(name))
                return [self._chunk(_Delta(tool_calls=[begun]))]
            case ToolCallDelta(arguments):
                self._calls[-1].function.arguments += arguments
                more = _MadeCall(index=len(self._calls) - 1, function=_CalledFunction(arguments=arguments))
                return [self._chunk(_Delta(tool_calls=[more]))]
            case ReplyDone() as done:
                self._done = done
                chunks = [self._chunk(_Delta(), done.reason)]
                if self.include_usage:
                    chunks.append(self._sent([], _usage(done)))
                return [*chunks, b"data: [DONE]\n\n"]

    def body(self) -> bytes:
        """Return the whole completion as JSON. Call it after `feed` has received ReplyDone."""
        done = self._done
        assert done is not None
        # If there is no text, the content is null with function calls, and an empty string without them.
        text = self._text or (None if self._calls else "")
        answer = _Answer("assistant", text, None, self._calls or UNSET)
        choice = _WholeChoice(0, answer, None, done.reason)
        return _encode(_Whole(self.id, "chat.completion", self.created_s, self.model, [choice], _usage(done)))

    def _chunk(self, delta: _Delta, reason: str | None = None) -> bytes:
        return self._sent([_ChunkChoice(0, delta, None, reason)])

    def _sent(self, choices: list[_ChunkChoice], usage: _Usage | UnsetType = UNSET) -> bytes:
        return _sse(_Chunk(self.id, "chat.completion.chunk", self.created_s, self.model, choices, usage))


def error_chunk(message: str, code: str, kind: str = "server_error", param: str | None = None) -> bytes:
    """Return the event for an error that ends a stream. The status 200 was already sent."""
    return _sse(_ErrorChunk(_Failure(message, kind, param, code)))


def _usage(done: ReplyDone) -> _Usage:
    return _Usage(
        done.prompt_tokens,
        done.completion_tokens,
        done.prompt_tokens + done.completion_tokens,
        _PromptDetails(done.cached_tokens),
    )


def _sse(body: _Chunk | _ErrorChunk) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
