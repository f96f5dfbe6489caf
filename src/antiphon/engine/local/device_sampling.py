"""Samples one token from each of many rows of logits, on the logits' device.

This module never waits for an accelerator. The parameters are copied to the device once, and the random numbers are
drawn on the host beforehand. The tokens stay on the device until the caller reads them. A row gets the same token alone
or in any batch, and on any device up to rounding. This module implements temperature, top_k, top_p and min_p;
`sampling.py` handles everything else that shapes logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from antiphon.engine.api import Sampling
from antiphon.engine.choosers import NO_TOKEN

# The number of random numbers drawn at once for a generation.
DRAWN_AHEAD = 256
# On a CPU, if the vocabulary is larger than LARGE_VOCABULARY, only the HEAD_TOKENS likeliest tokens are ranked at
# first. They nearly always suffice, and finding them is much cheaper than sorting. On an accelerator, checking whether
# they suffice would mean waiting for it.
LARGE_VOCABULARY = 8192
HEAD_TOKENS = 1024
# The number of tokens found in addition to those wanted, so that equal logits do not lie on both sides of the cut.
SPARE_TOKENS = 64

# The minimum of top_p. With it, only the likeliest token is kept.
_SMALLEST_TOP_P = 1e-300


def is_plain(params: Sampling) -> bool:
    """Return whether `draw_tokens` alone does all that `params` asks of one token.

    False with penalties, biases, allowed or forbidden tokens, a grammar, a chooser or log-probabilities: such a row
    needs `sampling.py`. Neither module handles the end of a generation or hidden states.
    """
    repetition = params.repetition_penalty != 1.0 and params.repetition_window > 0
    penalized = repetition or params.presence_penalty or params.frequency_penalty
    restricted = params.bias or params.allow is not None or params.forbid or params.grammar is not None
    return not (penalized or restricted or params.chooser or params.program or params.logprobs)


def random_generator(seed: int | None) -> torch.Generator:
    """Return a random generator. Uses the lowest 63 bits of `seed`; None seeds it from the system's entropy."""
    random = torch.Generator()
    if seed is None:
        random.seed()
    else:
        random.manual_seed(seed & (2**63 - 1))
    return random


class RandomNumbers:
    """The random numbers of one generation, uniform in [0, 1), from the seed of `params`.

    They are drawn on the host, DRAWN_AHEAD numbers at once, and are the same as if they were drawn one by one. If
    `params` selects the likeliest token, no number is drawn, and all are zero.
    """

    def __init__(self, params: Sampling) -> None:
        self._generator = random_generator(params.seed)
        self._greedy = _kind_of(*_row_of(params)) == "greedy"
        self._ahead: list[float] = []

    def take(self, count: int) -> list[float]:
        """Return the next `count` random numbers of the generation."""
        taken = self.peek(0, count)
        del self._ahead[:count]
        return taken

    def peek(self, skipped: int, count: int) -> list[float]:
        """Return `count` of the next random numbers, after the first `skipped`. Later calls return them again."""
        if self._greedy:
            return [0.0] * count
        while len(self._ahead) < skipped + count:
            self._ahead += torch.rand(DRAWN_AHEAD, generator=self._generator, dtype=torch.float64).tolist()
        return self._ahead[skipped : skipped + count]


# "greedy" rows take the likeliest token. "whole" rows draw among all tokens, in the order of the vocabulary. The other
# kinds draw among the likeliest tokens; "top_k" does so without sorting the whole vocabulary.
_Kind = Literal["greedy", "whole", "top_k", "sorted"]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The rows of a batch whose tokens the same kernels choose, and their parameters, each [rows, 1] on the device."""

    # How the group's tokens are chosen.
    kind: _Kind
    # The group's rows in the batch, int64 [rows]; None: all rows of the batch.
    rows: torch.Tensor | None
    # Each row's temperature.
    temperature: torch.Tensor
    # Each row's top_k; 0: all tokens.
    top_k: torch.Tensor
    # Each row's top_p, at least _SMALLEST_TOP_P; infinity: all tokens.
    top_p: torch.Tensor
    # Each row's min_p, at most 1.
    min_p: torch.Tensor
    # The largest top_k of the group.
    size: int
    # Whether the rows differ in top_k.
    mixed: bool
    # Whether top_p or min_p excludes tokens in any row.
    limited: bool


@dataclass(frozen=True, slots=True, eq=False)
class RowChoices:
    """The parameters that each row's token is chosen by, for all rows of a batch, on the logits' device."""

    groups: tuple[_Group, ...]

    @staticmethod
    def of(params: Sequence[Sampling], device: torch.device) -> RowChoices:
        """Return the parameters of a batch whose rows are sampled by `params`, in their order.

        Reads only temperature, top_k, top_p and min_p; `is_plain` says whether these are all. The same rows on the same
        device return the same object, so a batch that continues is copied to the device once. Does not wait for the
        device.
        """
        return _choices_of(tuple(_row_of(p) for p in params), device)


def draw_tokens(logits: torch.Tensor, choices: RowChoices, uniforms: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row: int64 [n], on the logits' device, without waiting for it.

    `logits`: float32 [n, vocabulary], not changed. `uniforms`: float64 [n] in [0, 1), on the same device; ignored for
    rows that take the likeliest token. A row with a NaN, or without a finite maximum, gets NO_TOKEN. Of equal logits,
    the lower token is first.
    """
    best = logits.amax(1, keepdim=True)
    if len(choices.groups) == 1:
        tokens = _drawn(logits, best, choices.groups[0], uniforms)
    else:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in choices.groups:
            assert group.rows is not None
            own = [each.index_select(0, group.rows) for each in (logits, best, uniforms)]
            tokens.index_copy_(0, group.rows, _drawn(own[0], own[1], group, own[2]))
    # The maximum is NaN if any logit is.
    return tokens.where(best[:, 0].isfinite(), NO_TOKEN)


_Row = tuple[float, int, float, float]


def _row_of(params: Sampling) -> _Row:
    return params.temperature, params.top_k, params.top_p, params.min_p


# Bound: the batches of the last steps, a few kilobytes each.
@lru_cache(maxsize=256)
def _choices_of(rows: tuple[_Row, ...], device: torch.device) -> RowChoices:
    members: dict[_Kind, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(_kind_of(*row), []).append(index)
    return RowChoices(
        tuple(
            _group(kind, [rows[i] for i in indices], indices if len(members) > 1 else None, device)
            for kind, indices in members.items()
        )
    )


def _kind_of(temperature: float, top_k: int, top_p: float, min_p: float) -> _Kind:
    if temperature <= 0 or top_k == 1:
        return "greedy"
    if top_k:
        return "top_k"
    return "whole" if top_p >= 1 and min_p <= 0 else "sorted"


def _group(kind: _Kind, rows: Sequence[_Row], indices: list[int] | None, device: torch.device) -> _Group:
    def copied(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        # A blocking copy would also wait for all work queued on the device.
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return _Group(
        kind,
        None if indices is None else copied(indices, torch.int64),
        copied(temperature, torch.float32)[:, None],
        copied(top_k, torch.int64)[:, None],
        # A value of 1 or more keeps every token, however the sums are rounded.
        copied([math.inf if p >= 1 else max(p, _SMALLEST_TOP_P) for p in top_p], torch.float64)[:, None],
        copied([min(p, 1.0) for p in min_p], torch.float64)[:, None],
        size=max(top_k),
        mixed=len(set(top_k)) > 1,
        limited=min(top_p) < 1 or max(min_p) > 0,
    )


def _drawn(logits: torch.Tensor, best: torch.Tensor, group: _Group, uniforms: torch.Tensor) -> torch.Tensor:
    if group.kind == "greedy":
        return logits.argmax(1)
    scaled, best = logits / group.temperature, best / group.temperature
    if group.kind == "whole":
        return _pick(torch.softmax(scaled, 1).double(), uniforms)
    tokens, weights = (_top_k if group.kind == "top_k" else _sorted)(scaled, best, group)
    return tokens.gather(1, _pick(weights, uniforms)[:, None])[:, 0]


def _top_k(scaled: torch.Tensor, best: torch.Tensor, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The `group.size` likeliest tokens of each row, and their weights; 0 for tokens that may not be drawn."""
    size = min(group.size, scaled.shape[1])
    tokens = _likeliest(scaled, size)
    weights = _weights(scaled, tokens, best)
    if group.mixed:
        weights = weights.where(torch.arange(size, device=scaled.device) < group.top_k, 0.0)
    return tokens, _kept(weights, weights.cumsum(1), None, group)


def _sorted(scaled: torch.Tensor, best: torch.Tensor, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of each row, the likeliest first, and their weights.

    On a CPU, tokens that cannot be drawn may be left out.
    """
    total = torch.exp(scaled - best).sum(1, keepdim=True, dtype=torch.float64)
    if _reads_head(scaled):
        tokens = _likeliest(scaled, HEAD_TOKENS)
        weights = _weights(scaled, tokens, best)
        sums = weights.cumsum(1)
        if ((sums[:, -1:] >= group.top_p * total) | (weights[:, -1:] < group.min_p)).all():
            return tokens, _kept(weights, sums, total, group)
    every = torch.arange(scaled.shape[1], device=scaled.device)
    tokens = _ranks(scaled, every, len(every)).argsort(descending=True)
    weights = _weights(scaled, tokens, best)
    return tokens, _kept(weights, weights.cumsum(1), total, group)


def _reads_head(scaled: torch.Tensor) -> bool:
    return scaled.device.type == "cpu" and scaled.shape[1] > LARGE_VOCABULARY


def _likeliest(scaled: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` tokens of each row in the order of `_ranks`: int64 [n, size]."""
    count = scaled.shape[1]
    if _reads_head(scaled) and size + SPARE_TOKENS < count:
        # Ranking costs more than topk, so only the tokens that topk finds are ranked. This is exact if the token number
        # `size` exceeds the lowest value found, because topk may have omitted other tokens of that value.
        values, tokens = scaled.topk(size + SPARE_TOKENS)
        if (values[:, size - 1] > values[:, -1]).all():
            return tokens.gather(1, _ranks(values, tokens, count).topk(size).indices)
    return _ranks(scaled, torch.arange(count, device=scaled.device), count).topk(size).indices


def _ranks(values: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return numbers in the order of `values`, distinct within a row: of equal values, the lower token ranks higher.

    If several values are equal, the kernel decides which of them a top-k keeps: that differs by device and by k.
    `values`: float32 [n, m]. `tokens`: int64 [m] or [n, m], below `count`. Returns int64 [n, m].
    """
    # The bits of positive floats have the order of their values, and the bits of negative floats the reverse order. -0
    # becomes 0.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(torch.int64).mul_(count).sub_(tokens)


def _weights(scaled: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    # Computed in double precision, so that devices with different rounding still choose the same tokens.
    return (scaled.gather(1, tokens) - best).double().exp_()


def _kept(weights: torch.Tensor, sums: torch.Tensor, total: torch.Tensor | None, group: _Group) -> torch.Tensor:
    """The weights, with 0 for the tokens that top_p and min_p exclude.

    `weights`: in descending order, 1 for the likeliest token. `sums`: their running sums. `total`: the sum that top_p
    refers to; None: the last of `sums`.
    """
    if not group.limited:
        return weights
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    limit = group.top_p * (sums[:, -1:] if total is None else total)
    return weights.where((before < limit) & (weights >= group.min_p), 0.0)


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return for each row the index in `weights`, float64 [n, m], that its random number selects: int64 [n]."""
    sums = weights.cumsum(1)
    points = uniforms[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)
