"""From the logits of one row to one token, as `Sampling` says.

Each generation draws from a random number generator of its own, so what others sample changes nothing for it. Runs on
the CPU, for one row at a time, and draws the token as `device_sampling.py` does; knows neither sessions nor steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.engine.generation import Constraint
from antiphon.engine.local.device_sampling import NO_TOKEN, RowChoices, draw_tokens, draw_uniforms
from antiphon.errors import ModelError


def random_generator(params: Sampling) -> torch.Generator:
    """Return the random number generator of one generation: from its seed, or from the system's entropy without one.

    The lowest 63 bits of a seed count.
    """
    random = torch.Generator()
    if params.seed is None:
        random.seed()
    else:
        random.manual_seed(params.seed & (2**63 - 1))
    return random


def sample(
    logits: torch.Tensor,
    params: Sampling,
    recent: Sequence[Row],
    produced: int,
    random: torch.Generator,
    constraint: Constraint | None = None,
) -> tuple[int, float | None]:
    """Choose the next token from `logits`, float32 [vocabulary] on the CPU, which are not changed.

    `recent`: the newest rows, last one last, at least as many as the penalties look back on. `produced`: how many of
    them this generation sampled. `constraint`: what `params.grammar` was compiled to; it is advanced past the token.
    Returns the token and, where `params.logprobs` asks for it, its natural log-probability under the model's own
    distribution. Raises ModelError where logits are not numbers, where no token may come next, or where the constraint
    refuses the token.
    """
    if params.chooser is not None:
        token = params.chooser(logits)
        return token, _logprob(logits, token) if params.logprobs else None
    shaped = _shaped(logits, params, recent, produced, constraint)
    token = _choose(shaped, params, random)
    if token == NO_TOKEN:
        raise ModelError(
            "the model's output is not a number" if torch.isnan(logits).any() else "no token may come next"
        )
    if constraint is not None:
        try:
            constraint.accept(token)
        except ValueError as error:
            raise ModelError(f"the grammar does not go on: {error}") from error
    return token, _logprob(logits, token) if params.logprobs else None


def _logprob(logits: torch.Tensor, token: int) -> float:
    return float(logits[token] - torch.logsumexp(logits, 0))


def _shaped(
    logits: torch.Tensor, params: Sampling, recent: Sequence[Row], produced: int, constraint: Constraint | None
) -> torch.Tensor:
    """The logits with penalties, biases and exclusions applied; excluded tokens are at minus infinity."""
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
        # A head that is padded beyond the tokenizer's vocabulary has rows that are no tokens.
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


def _choose(logits: torch.Tensor, params: Sampling, random: torch.Generator) -> int:
    choices = RowChoices.of((params,), logits.device)
    return int(draw_tokens(logits[None], choices, draw_uniforms(params, random, 1)))
