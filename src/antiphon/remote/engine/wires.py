"""What is sent to a server for the tokens that follow some rows, and how its answer is read. Pure.

- vLLM: `POST /v1/completions` with token ids and `return_token_ids`, which every vLLM server has, or `POST
  /inference/v1/generate`, which it has with `--enable-scale-out`.

SGLang's is in sglang.py.
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

# A bias that a token never overcomes; vLLM takes none beyond it.
MAX_BIAS = 100.0
# A request is held with all rows before it: after so many the tree is begun anew, from whole rows.
MAX_REQUESTS = 64
# `/open_session` wants the most characters that a session may have: more than any context.
CAPACITY = 1 << 24


@dataclass(slots=True)
class HeldRows:
    """What one server holds of one session.

    - `id`: the session's name there. `opened`: the server knows it.
    - `request`: the newest request that the server has answered, "" where there is none; `rows`: its rows and tokens.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    opened: bool = False
    request: str = ""
    rows: list[int] = field(default_factory=list)
    asked: str = ""
    _number: int = 0

    def next_request(self) -> str:
        """A name for a request of this session, which is `asked` until the next one."""
        self._number += 1
        if self._number % MAX_REQUESTS == 0:
            self.request, self.rows = "", []
        self.asked = f"{self.id}-{self._number}"
        return self.asked

    def answered(self, request: str, rows: Sequence[int], tokens: Sequence[int], given: int) -> None:
        """The server has sent tokens of a request, of which it had sent `given` before."""
        if request != self.request:
            self.request, self.rows = request, list(rows)
        del self.rows[len(rows) + given :]
        self.rows.extend(tokens)

    def lose(self) -> None:
        """Begin anew, in another session: what the server holds is not known any more."""
        self.id, self.opened, self.request, self.rows = secrets.token_hex(12), False, "", []

    def opening(self) -> dict[str, str | int]:
        """The body of `/open_session`."""
        return {"session_id": self.id, "capacity_of_str_len": CAPACITY}


@dataclass(frozen=True, slots=True)
class Ask:
    """The tokens that are asked for.

    - `rows`: the tokens that they follow. `max_tokens`: at most so many.
    - `params`: how they are chosen; `seed` takes the place of its seed, and `rule` of its grammar.
    - `rule`: holds from the first of these tokens on. `forbid`: never sampled, besides those of `params`.
    - `allow`: where given, no other is sampled, whatever `params` say.
    - `salt`: requests with different ones share no KV. `session`: a name of the session, for whoever routes requests.
    - `held`: what the server holds of the session, where it has sessions of its own.
    """

    rows: Sequence[int]
    max_tokens: int
    params: Sampling
    seed: int
    salt: str
    session: str
    rule: Grammar | None = None
    forbid: Sequence[int] = ()
    allow: Sequence[int] | None = None
    held: HeldRows | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: tokens, with their log-probabilities where these were asked for.

    - `logprobs`: one for each token, or none.
    - `finish`: why no more tokens come; None where more may.
    - `prompt_tokens`, `cached_tokens`: rows that the server counted, and how many of them it had; None: not told here.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    finish: Literal["stop", "length"] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Wire(Protocol):
    """How one kind of server is asked for tokens.

    - `path`: of its URL, behind the server's root.
    - `has_sessions`: the server holds the rows of a session, and requests carry what is new.
    """

    @property
    def path(self) -> str: ...

    @property
    def has_sessions(self) -> bool: ...

    def body(self, ask: Ask) -> object:
        """The body of a request whose answer is streamed, as JSON has it."""
        ...

    def read(self, data: bytes, given: int) -> Piece | None:
        """One event of the answer, of which `given` tokens have been read; None for its last, which says nothing.

        Raises RemoteError for what is no such event.
        """
        ...


class Sampled(TypedDict):
    """The fields that vLLM and SGLang name alike."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
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
    """Raise RemoteError for an event that tells of a failure."""
    if failure:
        raise RemoteError(f"the model's server failed: {error_text(failure)}")


def count_in(told: msgspec.Raw) -> int | None:
    """What a server counted; None for what is no count."""
    return optional(_count_decoder, told)


def logprobs_in(values: Sequence[object], count: int) -> list[float | None]:
    """The log-probabilities of so many tokens; none where there are others than one number, or null, for each."""
    if len(values) != count:
        return []
    return [float(value) if isinstance(value, int | float) else None for value in values]


class _TokenLogprob(msgspec.Struct):
    logprob: Any = None


class _Logprobs(msgspec.Struct):
    """`/v1/completions` has the one list, and `/inference/v1/generate` the other."""

    token_logprobs: list[Any] | None = None
    content: list[_TokenLogprob] | None = None


# What may be missing may have any type: servers differ.
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
    """vLLM's fields that are sent only where they say something."""

    logit_bias: dict[str, float]
    allowed_token_ids: list[int]
    structured_outputs: dict[str, str]
    logprobs: int


class _CompletionsBody(Sampled, _Shaping):
    model: str
    prompt: list[int]
    max_tokens: int
    seed: int
    stream: bool
    stream_options: dict[str, bool]
    return_token_ids: bool
    add_special_tokens: bool
    ignore_eos: bool
    cache_salt: str


class _GenerateSampling(Sampled, _Shaping):
    max_tokens: int
    seed: int
    ignore_eos: bool
    detokenize: bool


class _GenerateBody(TypedDict):
    model: str
    token_ids: list[int]
    sampling_params: _GenerateSampling
    stream: bool
    stream_options: dict[str, bool]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class _Vllm:
    """What vLLM's two wires have in common. `model`: its name there. `eos`: the tokens that end a text by the model's
    configuration, which vLLM stops at unless it is asked not to.
    """

    model: str
    eos: frozenset[int]
    has_sessions = False
    # A server that sends text without them does not know `return_token_ids`.
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
            raise RemoteError("the model's server sends no token ids: it is no vLLM, or too old for return_token_ids")
        if reason not in (None, "stop", "length"):
            raise RemoteError(f"the model's server ended an answer: {error_text(reason)}")
        tokens = choice.token_ids or []
        told = optional(_logprobs_decoder, choice.logprobs) or _Logprobs()
        values = told.token_logprobs or [one.logprob for one in told.content or ()]
        return Piece(tokens, logprobs_in(values, len(tokens)), reason, *counts)


class VllmCompletions(_Vllm):
    """vLLM's `/v1/completions`."""

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
    """vLLM's `/inference/v1/generate`: tokens in, tokens out, and no text made of them."""

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
