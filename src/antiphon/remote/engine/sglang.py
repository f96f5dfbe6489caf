"""The wire of SGLang's `POST /generate`, with sessions that the server holds (`session_params`). Pure.

A request carries only the new rows, and names the row of an earlier request that they follow.

A server holds a session as a tree of requests. A request names its parent and the number of the parent's rows that stay
(`offset`). An append, a rollback and an answer that was cut off are therefore the same kind of request. Based on the
source of SGLang 0.5.23 (`managers/session_controller.py`); no release of it runs without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, NotRequired, TypedDict

import msgspec

from antiphon.errors import RemoteError
from antiphon.remote.engine.wires import (
    MAX_BIAS,
    NULL,
    Ask,
    Piece,
    Sampled,
    TokenId,
    bias_of,
    count_in,
    logprobs_in,
    refuse,
    sampled,
)
from antiphon.remote.http import decoded, error_text, optional


class SessionLost(RemoteError):
    """The server does not know the session, or the request that this one continues. It may have restarted."""


class _Shaping(TypedDict, total=False):
    logit_bias: dict[str, float]
    json_schema: str
    ebnf: str


class _Sampling(Sampled, _Shaping):
    max_new_tokens: int
    sampling_seed: int
    ignore_eos: bool
    no_stop_trim: bool
    skip_special_tokens: bool


class _SessionParams(TypedDict):
    id: str
    replace: bool
    rid: str | None
    offset: int


class _Rows(TypedDict):
    input_ids: list[int]
    rid: NotRequired[str]
    session_params: NotRequired[_SessionParams]


class _Body(_Rows):
    sampling_params: _Sampling
    stream: bool
    return_logprob: bool
    extra_key: str


class _Reason(msgspec.Struct):
    type: Any = None


class _Meta(msgspec.Struct):
    """Optional fields may have any type."""

    completion_tokens: Any = None
    finish_reason: msgspec.Raw = NULL
    output_token_logprobs: msgspec.Raw = NULL
    prompt_tokens: msgspec.Raw = NULL
    cached_tokens: msgspec.Raw = NULL


class _Event(msgspec.Struct):
    output_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None
    error: Any = None


_event_decoder, _reason_decoder = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Reason)
_logprobs_decoder = msgspec.json.Decoder(list[list[Any]])


@dataclass(frozen=True, slots=True)
class Sglang:
    """The wire of SGLang's `/generate`.

    Depending on how the server was started, each event carries all tokens so far, or only the new ones. `special`: the
    tokenizer's special tokens.
    """

    special: frozenset[int] = frozenset()
    path, has_sessions = "/generate", True

    def body(self, ask: Ask) -> _Body:
        return {
            **self._rows(ask),
            "sampling_params": {
                **sampled(ask),
                **_shaping(ask),
                "max_new_tokens": ask.max_tokens,
                "sampling_seed": ask.seed,
                "ignore_eos": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "stream": True,
            "return_logprob": ask.params.logprobs,
            "extra_key": ask.salt,
        }

    def _rows(self, ask: Ask) -> _Rows:
        """Return the rows that the server does not hold, and the earlier request that they follow."""
        rows, held = list(ask.rows), ask.held
        if held is None:
            return {"input_ids": rows}
        request = held.next_request()
        kept = min(sum(1 for _ in takewhile(bool, map(eq, held.rows, rows))), len(rows) - 1)
        # SGLang removes a beginning-of-text token from the start of rows that are added to a session.
        while kept > 0 and rows[kept] in self.special:
            kept -= 1
        parent = held.request if kept else None
        # With `replace`, the server ends and forgets other requests that continue the same parent.
        params: _SessionParams = {"id": held.id, "replace": True, "rid": parent, "offset": kept}
        return {"rid": request, "input_ids": rows[kept:], "session_params": params}

    def read(self, data: bytes, given: int) -> Piece | None:
        if data == b"[DONE]":
            return None
        event = decoded(_event_decoder, data, "event")
        refuse(event.error)
        if event.meta_info is None:
            raise RemoteError("the model's server sent an event without meta_info")
        meta, tokens, total = event.meta_info, event.output_ids or [], event.meta_info.completion_tokens
        if total == len(tokens):
            tokens = tokens[given:]
        elif total != given + len(tokens):
            raise RemoteError(
                f"the model's server counts {error_text(total)} tokens, and has sent {given + len(tokens)}"
            )
        kind = (optional(_reason_decoder, meta.finish_reason) or _Reason()).type
        if kind not in (None, "stop", "length"):
            raise RemoteError(f"the model's server ended an answer: {error_text(kind)}")
        entries = optional(_logprobs_decoder, meta.output_token_logprobs) or []
        logprobs = logprobs_in([one[0] for one in entries[-len(tokens) :] if one] if tokens else [], len(tokens))
        return Piece(tokens, logprobs, kind, count_in(meta.prompt_tokens), count_in(meta.cached_tokens))


def _shaping(ask: Ask) -> _Shaping:
    out: _Shaping = {}
    bias = bias_of(ask)
    if (allow := ask.allow if ask.allow is not None else ask.params.allow) is not None:
        # SGLang has no list of allowed tokens.
        bias |= {str(token): bias.get(str(token), 0.0) + MAX_BIAS for token in allow}
    if bias:
        out["logit_bias"] = bias
    if ask.rule:
        out["json_schema" if ask.rule.kind == "json_schema" else "ebnf"] = ask.rule.text
    return out
