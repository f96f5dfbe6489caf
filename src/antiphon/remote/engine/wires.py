"""How requests for tokens are written, and how the answers are read. Pure.

- vLLM: `POST /v1/completions` with token ids and `return_token_ids`, which every vLLM server offers, or `POST
  /inference/v1/generate`, which it offers with `--enable-scale-out`.

For SGLang, see sglang.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypedDict

import msgspec

from antiphon.engine.api import Grammar, Sampling
from antiphon.errors import RemoteError
from antiphon.remote.http import decoded, error_text, optional

# A bias that a token never overcomes. vLLM accepts no larger one.
MAX_BIAS = 100.0
# A server stores each request with all rows before it. After MAX_REQUESTS requests, a new tree begins with all rows.
MAX_REQUESTS = 64
# `/open_session` requires a maximum number of characters of the session. This one exceeds any context.
CAPACITY = 1 << 24


@dataclass(slots=True)
class HeldRows:
    """The part of one session that one server holds."""

    # The session's name at the server.
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    # Whether the server knows the session.
    opened: bool = False
    # The id of the newest request that the server has answered; "" if there is none.
    request: str = ""
    # The rows and tokens of `request`.
    rows: list[int] = field(default_factory=list)
    # The id of the request that was sent last.
    asked: str = ""
    _number: int = 0

    def next_request(self) -> str:
        """Return a name for a request of this session, and keep it in `asked` until the next one."""
        self._number += 1
        if self._number % MAX_REQUESTS == 0:
            self.request, self.rows = "", []
        self.asked = f"{self.id}-{self._number}"
        return self.asked

    def answered(self, request: str, rows: Sequence[int], tokens: Sequence[int], given: int) -> None:
        """Note further tokens of a request's answer, after the first `given` tokens."""
        if request != self.request:
            self.request, self.rows = request, list(rows)
        del self.rows[len(rows) + given :]
        self.rows.extend(tokens)

    def lose(self) -> None:
        """Start another session, because the contents of this one at the server are no longer known."""
        self.id, self.opened, self.request, self.rows = secrets.token_hex(12), False, "", []

    def opening(self) -> dict[str, str | int]:
        """Return the body of an `/open_session` request."""
        return {"session_id": self.id, "capacity_of_str_len": CAPACITY}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the tokens that follow a session's rows."""

    # The tokens that the new ones follow.
    rows: Sequence[int]
    # The maximum number of tokens of the answer.
    max_tokens: int
    # How the tokens are sampled, except for the seed and the grammar.
    params: Sampling
    # Replaces the seed of `params`.
    seed: int
    # Requests with different salts share no KV.
    salt: str
    # The session's name, for proxies that route requests.
    session: str
    # Replaces the grammar of `params`. It applies from the first token on.
    rule: Grammar | None = None
    # Tokens that are never sampled, in addition to `params.forbid`.
    forbid: Sequence[int] = ()
    # If given, only these tokens are sampled, whatever `params` say.
    allow: Sequence[int] | None = None
    # The part of the session that the server holds, if it supports sessions.
    held: HeldRows | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: tokens, with their log-probabilities if requested.

    - `logprobs`: one for each token, or empty.
    - `finish`: why the tokens ended; None if more may follow.
    - `prompt_tokens`, `cached_tokens`: the number of rows that the server counted, and how many of them it had cached;
      None if this piece does not report them.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    finish: Literal["stop", "length"] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Wire(Protocol):
    """The protocol of one kind of server.

    - `path`: the path of its URL, after the server's root.
    - `has_sessions`: the server holds the rows of a session, and requests carry only the new rows.
    """

    @property
    def path(self) -> str: ...

    @property
    def has_sessions(self) -> bool: ...

    def body(self, ask: Ask) -> object:
        """Return the body of a request with a streamed answer, as a value that encodes to JSON."""
        ...

    def read(self, data: bytes, given: int) -> Piece | None:
        """Read one event of the answer, after its first `given` tokens. Returns None for the end marker.

        Raises RemoteError if the event is invalid.
        """
        ...


class Sampled(TypedDict):
    """The fields that have the same names in vLLM and SGLang, and the same meaning as in Sampling."""

    # The temperature; 0 samples the likeliest token.
    temperature: float
    # The number of likeliest tokens that may be sampled; -1: all.
    top_k: int
    # The share of probability that may be sampled; 1: all tokens.
    top_p: float
    # The minimum probability of a token, as a fraction of that of the likeliest token.
    min_p: float
    # Makes repeated tokens less likely if it is above 1.
    repetition_penalty: float
    # Subtracted from the logit of each token that has occurred; 0: none.
    presence_penalty: float
    # Subtracted from a token's logit once for each occurrence; 0: none.
    frequency_penalty: float
    # Tokens that end the answer.
    stop_token_ids: list[int]


def sampled(ask: Ask) -> Sampled:
    params = ask.params
    return {
        "temperature": max(0.0, params.temperature),
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop_token_ids": sorted(params.stop),
    }


def bias_of(ask: Ask) -> dict[str, float]:
    bias = {str(token): max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in ask.params.bias.items()}
    return bias | {str(token): -MAX_BIAS for token in (*ask.params.forbid, *ask.forbid)}


TokenId = Annotated[int, msgspec.Meta(ge=0)]
NULL = msgspec.Raw(b"null")
_count_decoder = msgspec.json.Decoder(TokenId)


def refuse(failure: object) -> None:
    """Raise RemoteError if an event reports a failure."""
    if failure:
        raise RemoteError(f"the model's server failed: {error_text(failure)}")


def count_in(found: msgspec.Raw) -> int | None:
    """Decode a server's count; return None if it is not a count."""
    return optional(_count_decoder, found)


def logprobs_in(values: Sequence[object], count: int) -> list[float | None]:
    """Return the log-probabilities of `count` tokens; empty unless `values` has one number or null for each of them."""
    if len(values) != count:
        return []
    return [float(value) if isinstance(value, int | float) else None for value in values]


class _TokenLogprob(msgspec.Struct):
    logprob: Any = None


class _Logprobs(msgspec.Struct):
    """`/v1/completions` sends the first of these lists, and `/inference/v1/generate` the second."""

    token_logprobs: list[Any] | None = None
    content: list[_TokenLogprob] | None = None


# Optional fields may have any type, because servers differ.
class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: Any = None
    logprobs: msgspec.Raw = NULL


class _Details(msgspec.Struct):
    cached_tokens: msgspec.Raw = NULL


class _Usage(msgspec.Struct):
    prompt_tokens: msgspec.Raw = NULL
    prompt_tokens_details: msgspec.Raw = NULL


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = NULL
    error: Any = None


_event_decoder, _usage_decoder = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Usage)
_details_decoder, _logprobs_decoder = msgspec.json.Decoder(_Details), msgspec.json.Decoder(_Logprobs)


class _Shaping(TypedDict, total=False):
    """vLLM's fields that are sent only if they differ from the default."""

    logit_bias: dict[str, float]
    allowed_token_ids: list[int]
    structured_outputs: dict[str, str]
    logprobs: int


class _CompletionsBody(Sampled, _Shaping):
    """The body of `/v1/completions`, in addition to the sampling fields."""

    # The model's name at the server.
    model: str
    # The token ids of the prompt.
    prompt: list[int]
    # The maximum number of tokens of the answer.
    max_tokens: int
    # Seed of the random numbers.
    seed: int
    # Whether the answer is streamed; always True.
    stream: bool
    # Asks for token counts at the end.
    stream_options: dict[str, bool]
    # Asks for token ids in addition to text.
    return_token_ids: bool
    # Always False, because the prompt is complete.
    add_special_tokens: bool
    # Whether the model's end-of-text tokens are treated as ordinary tokens.
    ignore_eos: bool
    # Requests with different salts share no KV.
    cache_salt: str


class _GenerateSampling(Sampled, _Shaping):
    max_tokens: int
    seed: int
    ignore_eos: bool
    detokenize: bool


class _GenerateBody(TypedDict):
    """The body of `/inference/v1/generate`."""

    # The model's name at the server.
    model: str
    # The token ids of the prompt.
    token_ids: list[int]
    # How the tokens are sampled.
    sampling_params: _GenerateSampling
    # Whether the answer is streamed; always True.
    stream: bool
    # Asks for token counts at the end.
    stream_options: dict[str, bool]
    # Requests with different salts share no KV.
    cache_salt: str


@dataclass(frozen=True, slots=True)
class _Vllm:
    """The common part of vLLM's two wires.

    `model`: its name at the server. `eos`: the tokens that end a text according to the model's configuration. vLLM
    stops at them unless the request says otherwise.
    """

    model: str
    eos: frozenset[int]
    has_sessions = False
    # A server that sends text without token ids does not know `return_token_ids`.
    needs_token_ids = False

    def read(self, data: bytes, given: int) -> Piece | None:
        if data == b"[DONE]":
            return None
        event = decoded(_event_decoder, data, "event")
        refuse(event.error)
        usage = optional(_usage_decoder, event.usage) or _Usage()
        details = optional(_details_decoder, usage.prompt_tokens_details) or _Details()
        counts = count_in(usage.prompt_tokens), count_in(details.cached_tokens)
        if event.choices is None:
            raise RemoteError("the model's server sent an event without choices")
        if not event.choices:
            return Piece((), (), None, *counts)
        choice = event.choices[0]
        reason = choice.finish_reason
        if self.needs_token_ids and choice.token_ids is None and not reason:
            raise RemoteError("the model's server sends no token ids: it is not vLLM, or too old for return_token_ids")
        if reason not in (None, "stop", "length"):
            raise RemoteError(f"the model's server ended an answer: {error_text(reason)}")
        tokens = choice.token_ids or []
        found = optional(_logprobs_decoder, choice.logprobs) or _Logprobs()
        values = found.token_logprobs or [one.logprob for one in found.content or ()]
        return Piece(tokens, logprobs_in(values, len(tokens)), reason, *counts)


class VllmCompletions(_Vllm):
    """The wire of vLLM's `/v1/completions`, which also sends text."""

    needs_token_ids = True

    path = "/v1/completions"

    def body(self, ask: Ask) -> _CompletionsBody:
        return {
            **sampled(ask),
            "model": self.model,
            "prompt": list(ask.rows),
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "add_special_tokens": False,
            "ignore_eos": not self.eos & ask.params.stop,
            "cache_salt": ask.salt,
            **_shaping(ask),
        }


class VllmGenerate(_Vllm):
    """The wire of vLLM's `/inference/v1/generate`: tokens in, tokens out, without text."""

    path = "/inference/v1/generate"

    def body(self, ask: Ask) -> _GenerateBody:
        sampling: _GenerateSampling = {
            **sampled(ask),
            **_shaping(ask),
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "ignore_eos": not self.eos & ask.params.stop,
            "detokenize": False,
        }
        return {
            "model": self.model,
            "token_ids": list(ask.rows),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": ask.salt,
        }


def _shaping(ask: Ask) -> _Shaping:
    out: _Shaping = {}
    if bias := bias_of(ask):
        out["logit_bias"] = bias
    if (allow := ask.allow if ask.allow is not None else ask.params.allow) is not None:
        out["allowed_token_ids"] = list(allow)
    if ask.rule:
        kind = "json" if ask.rule.kind == "json_schema" else "grammar"
        out["structured_outputs"] = {kind: ask.rule.text}
    if ask.params.logprobs:
        out["logprobs"] = 0
    return out
