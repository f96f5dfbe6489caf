"""From logits to one token, as `Sampling` says. Each generation draws from a random generator of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.errors import ModelError

# Candidates looked at before the whole vocabulary is sorted: nearly always enough, and a hundred times cheaper.
HEAD = 1024


def generator(params: Sampling) -> torch.Generator:
    """The random numbers of one generation: from its seed, or from the system's entropy."""
    made = torch.Generator()
    if params.seed is None:
        made.seed()
    else:
        made.manual_seed(params.seed & (2**63 - 1))
    return made


def sample(
    logits: torch.Tensor, params: Sampling, recent: Sequence[Row], produced: int, random: torch.Generator
) -> tuple[int, float | None]:
    """One token of `logits`, float32 [vocabulary], on the CPU; they are left as they are.

    `recent`: the newest rows, as many as the penalties look back on. Returns the token and its log-probability (natural, under
    the model's own distribution), if asked for. Raises ModelError for logits that are not numbers or allow no token.
    """
    if params.chooser is not None:
        token = params.chooser(logits)
        return token, _logprob(logits, token) if params.logprobs else None
    shaped = _shaped(logits, params, recent, produced)
    token = _choose(shaped, params, random)
    if not math.isfinite(float(shaped[token])):
        raise ModelError(
            "the model's output is not a number" if torch.isnan(logits).any() else "no token may come next"
        )
    if params.constraint is not None:
        try:
            params.constraint.accept(token)
        except ValueError as error:
            raise ModelError(f"the grammar does not go on: {error}") from error
    return token, _logprob(logits, token) if params.logprobs else None


def _logprob(logits: torch.Tensor, token: int) -> float:
    return float(logits[token] - torch.logsumexp(logits, 0))


def _shaped(logits: torch.Tensor, params: Sampling, recent: Sequence[Row], produced: int) -> torch.Tensor:
    out = logits
    if params.repetition_penalty != 1.0 and params.repetition_window:
        seen = {i for i in recent[-params.repetition_window :] if i is not None}
        if seen:
            out = out.clone()
            at = torch.tensor(sorted(seen))
            old = out[at]
            out[at] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and produced:
        out = out.clone()
        for token, times in Counter(i for i in recent[-produced:] if i is not None).items():
            out[token] -= params.presence_penalty + params.frequency_penalty * times
    if params.bias:
        out = out.clone()
        for token, bias in params.bias.items():
            out[token] += bias
    if params.allow is not None:
        chosen = torch.full_like(out, -torch.inf)
        at = torch.tensor(params.allow, dtype=torch.long)
        chosen[at] = out[at]
        out = chosen
    if params.forbid:
        out = out.clone()
        out[torch.tensor(params.forbid)] = -torch.inf
    if params.constraint is not None and (bits := params.constraint.allowed()) is not None:
        may = np.unpackbits(np.asarray(bits, np.uint32).view(np.uint8), bitorder="little")
        allowed = torch.from_numpy(may[: len(out)].astype(bool))
        # A head padded beyond the tokenizer has rows that are no tokens.
        out = torch.where(torch.nn.functional.pad(allowed, (0, len(out) - len(allowed))), out, -torch.inf)
    return out


def _choose(logits: torch.Tensor, params: Sampling, random: torch.Generator) -> int:
    if params.temperature <= 0 or params.top_k == 1:
        return int(logits.argmax())
    scaled = logits / params.temperature
    whole = params.top_p >= 1 and params.min_p <= 0
    if whole and not params.top_k:
        return _draw(torch.softmax(scaled, 0), random)
    count = len(scaled)
    size = min(count, params.top_k or HEAD)
    values, tokens = torch.topk(scaled, size)
    # Log-probabilities among what top_k leaves.
    total = torch.logsumexp(values if params.top_k else scaled, 0)
    if not params.top_k and size < count and not _enough(values - total, params):
        values, tokens = torch.sort(scaled, descending=True)
    probabilities = torch.exp(values - total)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_p < 1:
        keep &= torch.cumsum(probabilities, 0) - probabilities < params.top_p
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    return int(tokens[_draw(torch.where(keep, probabilities, 0.0), random)])


def _enough(logprobs: torch.Tensor, params: Sampling) -> bool:
    """The best HEAD tokens hold all that top_p and min_p may leave in."""
    if params.top_p < 1 and float(torch.exp(logprobs).sum()) >= params.top_p:
        return True
    return params.min_p > 0 and float(logprobs[-1] - logprobs[0]) < math.log(params.min_p)


def _draw(weights: torch.Tensor, random: torch.Generator) -> int:
    sums = torch.cumsum(weights.double(), 0)
    point = torch.rand((), generator=random, dtype=torch.float64) * sums[-1]
    return min(int(torch.searchsorted(sums, point, right=True)), len(weights) - 1)
