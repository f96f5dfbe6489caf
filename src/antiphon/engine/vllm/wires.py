"""What is sent to a server for the tokens that follow some rows, and how its answer is read. Pure.

- vLLM: `POST /v1/completions` with token ids and `return_token_ids`, which every vLLM server has, or `POST
  /inference/v1/generate`, which it has with `--enable-scale-out`.

SGLang's is in sglang.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from antiphon.engine.api import Grammar, Sampling
from antiphon.errors import RemoteError
from antiphon.upstream.http import decoded, error_text

_decoder = msgspec.json.Decoder()
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
    _number: int = 0

    def next_request(self) -> str:
        """A name for a request of this session."""
        self._number += 1
        if self._number % MAX_REQUESTS == 0:
            self.request, self.rows = "", []
        return f"{self.id}-{self._number}"

    def answered(self, request: str, rows: Sequence[int], tokens: Sequence[int], given: int) -> None:
        """The server has sent tokens of a request, of which it had sent `given` before."""
        if request != self.request:
            self.request, self.rows = request, list(rows)
        del self.rows[len(rows) + given :]
        self.rows.extend(tokens)

    def lose(self) -> None:
        """Begin anew, in another session: what the server holds is not known any more."""
        self.id, self.opened, self.request, self.rows = secrets.token_hex(12), False, "", []

    def opening(self) -> dict[str, Any]:
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

    def body(self, ask: Ask) -> dict[str, Any]:
        """The body of a request whose answer is streamed."""
        ...

    def read(self, data: bytes, given: int) -> Piece | None:
        """One event of the answer, of which `given` tokens have been read; None for its last, which says nothing.

        Raises RemoteError for what is no such event.
        """
        ...


# The values of a body and of an event are whatever JSON has.
def sampled(ask: Ask) -> dict[str, Any]:
    """The fields that vLLM and SGLang name alike."""
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


def event_in(data: bytes) -> dict[str, Any]:
    found = decoded(_decoder, data, "JSON")
    if not isinstance(found, dict):
        raise RemoteError("the model's server sent an event that is no object")
    if failure := found.get("error"):
        raise RemoteError(f"the model's server failed: {error_text(failure)}")
    return found


def token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise RemoteError("the model's server sent no token ids")
    return value


def count_in(value: object) -> int | None:
    """What a server counted; None for what is no count."""
    return value if type(value) is int and value >= 0 else None


def logprobs_in(values: object, count: int) -> list[float | None]:
    """The log-probabilities of so many tokens; none where there are others than one number, or null, for each."""
    if not isinstance(values, list) or len(values) != count:
        return []
    return [float(value) if isinstance(value, int | float) else None for value in values]


@dataclass(frozen=True, slots=True)
class VllmCompletions:
    """vLLM's `/v1/completions`. `model`: its name there. `eos`: the tokens that end a text by the model's
    configuration, which vLLM stops at unless it is told not to.
    """

    model: str
    eos: frozenset[int]
    path, has_sessions = "/v1/completions", False

    def body(self, ask: Ask) -> dict[str, Any]:
        out = sampled(ask) | {
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
        }
        return out | _shaping(ask, "logprobs" if ask.params.logprobs else "")

    def read(self, data: bytes, given: int) -> Piece | None:
        if data == b"[DONE]":
            return None
        found = event_in(data)
        usage, choices = found.get("usage"), found.get("choices")
        prompt, cached = _usage(usage)
        if not isinstance(choices, list):
            raise RemoteError("the model's server sent an event without choices")
        if not choices:
            return Piece(prompt_tokens=prompt, cached_tokens=cached)
        choice = choices[0] if isinstance(choices[0], dict) else {}
        if choice.get("token_ids") is None and not choice.get("finish_reason"):
            raise RemoteError("the model's server sends no token ids: it is no vLLM, or too old for return_token_ids")
        tokens = token_ids(choice.get("token_ids") or [])
        told = choice.get("logprobs")
        logprobs = logprobs_in(told.get("token_logprobs") if isinstance(told, dict) else None, len(tokens))
        return Piece(tokens, logprobs, _finish(choice), prompt, cached)


@dataclass(frozen=True, slots=True)
class VllmGenerate:
    """vLLM's `/inference/v1/generate`: tokens in, tokens out, and no text made of them."""

    model: str
    eos: frozenset[int]
    path, has_sessions = "/inference/v1/generate", False

    def body(self, ask: Ask) -> dict[str, Any]:
        sampling = sampled(ask) | _shaping(ask, "logprobs" if ask.params.logprobs else "")
        sampling |= {
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "ignore_eos": not self.eos & ask.params.stop,
            "detokenize": False,
        }
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(token): value for token, value in sampling["logit_bias"].items()}
        return {
            "model": self.model,
            "token_ids": list(ask.rows),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": ask.salt,
        }

    def read(self, data: bytes, given: int) -> Piece | None:
        if data == b"[DONE]":
            return None
        found = event_in(data)
        prompt, cached = _usage(found.get("usage"))
        choices = found.get("choices")
        if not isinstance(choices, list):
            raise RemoteError("the model's server sent an event without choices")
        if not choices:
            return Piece(prompt_tokens=prompt, cached_tokens=cached)
        choice = choices[0] if isinstance(choices[0], dict) else {}
        tokens, told = token_ids(choice.get("token_ids") or []), choice.get("logprobs")
        content = told.get("content") if isinstance(told, dict) else None
        values = [one.get("logprob") for one in content if isinstance(one, dict)] if isinstance(content, list) else None
        return Piece(tokens, logprobs_in(values, len(tokens)), _finish(choice), prompt, cached)


def _shaping(ask: Ask, logprobs: str) -> dict[str, Any]:
    """vLLM's fields that are sent only where they say something."""
    out: dict[str, Any] = {}
    if bias := bias_of(ask):
        out["logit_bias"] = bias
    if (allow := ask.allow if ask.allow is not None else ask.params.allow) is not None:
        out["allowed_token_ids"] = list(allow)
    if ask.rule:
        kind = "json" if ask.rule.kind == "json_schema" else "grammar"
        out["structured_outputs"] = {kind: ask.rule.text}
    if logprobs:
        out[logprobs] = 0
    return out


def _finish(choice: dict[str, Any]) -> Literal["stop", "length"] | None:
    reason = choice.get("finish_reason")
    if reason not in (None, "stop", "length"):
        raise RemoteError(f"the model's server ended an answer: {error_text(reason)}")
    return reason


def _usage(usage: object) -> tuple[int | None, int | None]:
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return count_in(usage.get("prompt_tokens")), count_in(cached)
