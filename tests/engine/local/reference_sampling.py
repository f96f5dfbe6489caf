"""Samples one token from one row of logits, step by step as `Sampling` defines it.

The engine's sampling of many rows at once is compared with this. Only the drawing is the engine's:
`test_device_sampling.py` has a separate definition of `draw_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.generation import Constraint
from antiphon.engine.local.device_sampling import RowChoices, draw_tokens
from antiphon.errors import ModelError


def sample(
    logits: torch.Tensor,
    params: Sampling,
    recent: Sequence[Row],
    produced: int,
    uniform: float,
    constraint: Constraint | None = None,
) -> tuple[int, float | None]:
    """Choose the next token from `logits`, float32 [vocabulary] on the CPU, which are not changed.

    `recent`: the newest rows, the last one last, at least as many as the penalties consider. `produced`: the number of
    these that this generation sampled. `constraint`: the compiled form of `params.grammar`; it is advanced past the
    token.

    Returns the token and, if `params.logprobs` is set, its natural log-probability under the model's own distribution.
    Raises ModelError if logits are NaN, if every token is excluded, or if the constraint refuses the token.
    """
    shaped = _shaped(logits, params, recent, produced, constraint)
    token = _choose(shaped, params, uniform)
    if token == NO_TOKEN:
        raise ModelError(
            "the model's output is not a number" if torch.isnan(logits).any() else "every token is excluded"
        )
    if constraint is not None:
        try:
            constraint.accept(token)
        except ValueError as error:
            raise ModelError(f"the grammar does not allow the token: {error}") from error
    return token, _logprob(logits, token) if params.logprobs else None


def _logprob(logits: torch.Tensor, token: int) -> float:
    return float(logits[token] - torch.logsumexp(logits, 0))


def _shaped(
    logits: torch.Tensor, params: Sampling, recent: Sequence[Row], produced: int, constraint: Constraint | None
) -> torch.Tensor:
    """The logits with penalties, biases and exclusions applied; excluded tokens get minus infinity."""
    out = _penalized(logits, params, recent, produced)
    if params.bias:
        out = out.clone()
        out[torch.tensor(list(params.bias))] += torch.tensor(list(params.bias.values()), dtype=out.dtype)
    if params.allow is not None:
        allowed_only = torch.full_like(out, -torch.inf)
        ids = torch.tensor(params.allow, dtype=torch.long)
        allowed_only[ids] = out[ids]
        out = allowed_only
    if params.forbid:
        out = out.clone()
        out[torch.tensor(params.forbid)] = -torch.inf
    if constraint is not None and (words := constraint.allowed()) is not None:
        bits = np.unpackbits(np.asarray(words, np.uint32).view(np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: len(out)].astype(bool))
        # If the head is padded beyond the tokenizer's vocabulary, its last rows are not tokens.
        out = torch.where(torch.nn.functional.pad(allowed, (0, len(out) - len(allowed))), out, -torch.inf)
    return out


def _penalized(logits: torch.Tensor, params: Sampling, recent: Sequence[Row], produced: int) -> torch.Tensor:
    out = logits
    if params.repetition_penalty != 1.0 and params.repetition_window:
        repeated = {i for i in recent[-params.repetition_window :] if i is not None}
        if repeated:
            out = out.clone()
            ids = torch.tensor(sorted(repeated))
            old = out[ids]
            out[ids] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and produced:
        out = out.clone()
        for token, times in Counter(i for i in recent[-produced:] if i is not None).items():
            out[token] -= params.presence_penalty + params.frequency_penalty * times
    return out


def _choose(logits: torch.Tensor, params: Sampling, uniform: float) -> int:
    choices = RowChoices.of((params,), logits.device)
    return int(draw_tokens(logits[None], choices, torch.tensor([uniform], dtype=torch.float64)))
