"""SGLang's `POST /generate`, with sessions that the server holds (`session_params`): a request carries the rows that
are new, and says behind which row of which request they come. Pure.

A server holds a session as a tree of requests. A request names its parent, and how many of the parent's rows stay
(`offset`): so an append, a rollback and an answer that was cut are one kind of request. Read in SGLang 0.5.23
(`managers/session_controller.py`); no package of it computes without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

from antiphon.engine.vllm.wires import (
    MAX_BIAS,
    Ask,
    Piece,
    bias_of,
    count_in,
    event_in,
    logprobs_in,
    sampled,
    token_ids,
)
from antiphon.errors import RemoteError
from antiphon.upstream.http import error_text


class SessionLost(RemoteError):
    """The server does not know the session, or the request that this one goes on from: it may have started anew."""


@dataclass(frozen=True, slots=True)
class Sglang:
    """SGLang's `/generate`. It tells tokens that were given so far with each event, or only the new ones, as it was
    started. `special`: the tokenizer's special tokens.
    """

    special: frozenset[int] = frozenset()
    path, has_sessions = "/generate", True

    def body(self, ask: Ask) -> dict[str, Any]:
        sampling = sampled(ask) | {"max_new_tokens": ask.max_tokens, "sampling_seed": ask.seed}
        sampling |= {"ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False}
        bias = bias_of(ask)
        if (allow := ask.allow if ask.allow is not None else ask.params.allow) is not None:
            # It knows no list of tokens that may come.
            bias |= {str(token): bias.get(str(token), 0.0) + MAX_BIAS for token in allow}
        if bias:
            sampling["logit_bias"] = bias
        if ask.rule:
            sampling["json_schema" if ask.rule.kind == "json_schema" else "ebnf"] = ask.rule.text
        return self._rows(ask) | {
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": ask.params.logprobs,
            "extra_key": ask.salt,
        }

    def _rows(self, ask: Ask) -> dict[str, Any]:
        """The rows that the server does not hold, and where they belong."""
        rows, held = list(ask.rows), ask.held
        if held is None:
            return {"input_ids": rows}
        request = held.next_request()
        kept = min(sum(1 for _ in takewhile(bool, map(eq, held.rows, rows))), len(rows) - 1)
        # SGLang takes a token that begins texts away where it begins what is added to a session.
        while kept > 0 and rows[kept] in self.special:
            kept -= 1
        behind = {"rid": held.request, "offset": kept} if kept else {"rid": None, "offset": 0}
        return {
            "rid": request,
            "input_ids": rows[kept:],
            # Requests that came behind the same one are ended and forgotten.
            "session_params": {"id": held.id, "replace": True} | behind,
        }

    def read(self, data: bytes, given: int) -> Piece | None:
        if data == b"[DONE]":
            return None
        found = event_in(data)
        meta = found.get("meta_info")
        if not isinstance(meta, dict):
            raise RemoteError("the model's server sent an event without meta_info")
        tokens = token_ids(found.get("output_ids") or [])
        total = meta.get("completion_tokens")
        if total == len(tokens):
            tokens = tokens[given:]
        elif total != given + len(tokens):
            raise RemoteError(
                f"the model's server counts {error_text(total)} tokens, and has sent {given + len(tokens)}"
            )
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind not in (None, "stop", "length"):
            raise RemoteError(f"the model's server ended an answer: {error_text(kind)}")
        told = meta.get("output_token_logprobs")
        pairs = told[-len(tokens) :] if tokens and isinstance(told, list) else []
        logprobs = logprobs_in([pair[0] for pair in pairs if isinstance(pair, list) and pair], len(tokens))
        return Piece(tokens, logprobs, kind, count_in(meta.get("prompt_tokens")), count_in(meta.get("cached_tokens")))
