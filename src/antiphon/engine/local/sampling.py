"""Chooses one token for each of many rows of logits, by the row's `Sampling` or `Chooser`.

The host decides the changes to each row: penalties of sampled tokens, biases, exclusions, and a grammar's mask. They
are copied to the logits' device at once and applied to all rows with a few operators, as few for 64 rows as for one.
Then `device_sampling.py` draws the tokens, and they are read once. Each generation has its own random numbers, so no
generation affects another one's tokens. This module knows neither sessions nor steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.generation import Constraint, Generation
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.errors import ModelError


class Choice(NamedTuple):
    """The next token of a row.

    `logprob`: its log-probability; None if not requested. `numbers`: as in `Token`.
    """

    token: int
    logprob: float | None = None
    numbers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The changes to one row of logits before its token is drawn, in this order. All tokens are in the vocabulary."""

    # Tokens whose logits `penalty` lowers.
    repeated: Collection[int] = ()
    # Divides positive logits and multiplies negative ones; 1: off.
    penalty: float = 1.0
    # Amounts subtracted from the logits, by token.
    lowered: Mapping[int, float] = field(default_factory=dict)
    # Amounts added to the logits, by token.
    bias: Mapping[int, float] = field(default_factory=dict)
    # The only tokens that may be sampled; None: no restriction.
    allowed: Collection[int] | None = None
    # Tokens that may not be sampled.
    forbidden: Collection[int] = ()
    # The mask of tokens that a grammar allows, in the form of `Constraint.allowed`; None: all.
    words: Any = None


class RowSampler:
    """Draws the tokens of one generation by its `Sampling`. Holds its random numbers and the changes to its logits.

    `vocabulary_size`: the width of the logits. `constraint`: the compiled form of `params.grammar`. Raises ValueError
    if a bias or an exclusion names a token outside the vocabulary, because that token would belong to another row of a
    batch.
    """

    def __init__(self, params: Sampling, vocabulary_size: int, constraint: Constraint | None = None) -> None:
        for token in chain(params.bias, params.allow or (), params.forbid):
            if not 0 <= token < vocabulary_size:
                raise ValueError(f"token {token} is not in the vocabulary of {vocabulary_size}")
        self.params, self.random, self._constraint = params, RandomNumbers(params), constraint

    def edits(self, recent: Sequence[Row], produced: int) -> RowEdits:
        """Return the changes to the next token's logits.

        `recent`: the newest rows, the last one last, at least as many as the penalties consider. `produced`: the number
        of these that this generation sampled. Raises GrammarError if the grammar takes too long to evaluate.
        """
        params, repeated, times = self.params, set[Row](), Counter[Row]()
        if params.repetition_penalty != 1.0 and params.repetition_window:
            repeated = set(recent[-params.repetition_window :])
        if (params.presence_penalty or params.frequency_penalty) and produced:
            times.update(recent[-produced:])
        return self.edits_of([t for t in repeated if t is not None], {t: n for t, n in times.items() if t is not None})

    def edits_of(self, repeated: Collection[int], times: Mapping[int, int]) -> RowEdits:
        """Return the changes to the next token's logits, from counts instead of rows.

        `repeated`: the tokens that the repetition penalty considers. `times`: how many times the generation sampled
        each token.
        """
        params = self.params
        return RowEdits(
            repeated if params.repetition_penalty != 1.0 else (),
            params.repetition_penalty,
            {t: params.presence_penalty + params.frequency_penalty * n for t, n in times.items()}
            if params.presence_penalty or params.frequency_penalty
            else {},
            params.bias,
            params.allow,
            params.forbid,
            None if self._constraint is None else self._constraint.allowed(),
        )


def choose_tokens(
    logits: torch.Tensor, rows: Sequence[tuple[Generation, Sequence[Row]]], hidden: torch.Tensor | None = None
) -> list[Choice | Exception]:
    """Choose the next token of each row's generation, and read all of them from the device at once.

    `logits`: float32 [n, vocabulary], not changed. `rows`: the generations, each with its newest rows, as for
    `RowSampler.edits`. `hidden`: the hidden states [n, width] of the logits, for programs. Advances each generation's
    grammar, chooser or program past its token. Log-probabilities are natural ones, under the model's own distribution.

    Never raises: a row that fails gets an error, and the others get their tokens. The error is a ModelError if the
    row's logits are NaN or exclude every token.
    """
    found: dict[int, Choice | Exception] = {}
    edits: dict[int, RowEdits] = {}
    groups: dict[type | None, list[int]] = {}
    for i, (generation, recent) in enumerate(rows):
        chooser = generation.params.program or generation.params.chooser
        try:
            if chooser is None:
                edits[i] = _sampler(generation, logits.shape[1]).edits(recent, generation.produced)
        except Exception as error:
            found[i] = error
        else:
            groups.setdefault(None if chooser is None else type(chooser), []).append(i)
    drawn: list[tuple[list[int], torch.Tensor]] = []
    for kind, members in groups.items():
        drawn += _drawn(logits, hidden, [rows[i][0] for i in members], members, kind, edits, found)
    order = [i for members, _ in drawn for i in members]
    if order:
        wanted = any(rows[i][0].params.logprobs for i in order)
        read = _read([chosen for _, chosen in drawn], _picked(logits, order) if wanted else None)
        found |= {i: _accepted(each, rows[i][0], logits[i]) for i, each in zip(order, read, strict=True)}
    return [found[i] for i in range(len(rows))]


def sample_rows(logits: torch.Tensor, samplers: Sequence[RowSampler], edits: Sequence[RowEdits]) -> torch.Tensor:
    """Draw one token for each row of `logits`, float32 [n, vocabulary], which are not changed.

    Returns int64 [n], as `draw_tokens` does, without waiting for the device.
    """
    device, shaped = logits.device, shape_rows(logits, edits)
    choices = RowChoices.of([s.params for s in samplers], device)
    # Taken last, so that a batch that fails consumes no random numbers.
    uniforms = torch.tensor([s.random.take(1)[0] for s in samplers], dtype=torch.float64)
    return draw_tokens(shaped, choices, uniforms.to(device, non_blocking=True))


def shape_rows(logits: torch.Tensor, edits: Sequence[RowEdits]) -> torch.Tensor:
    """Return the logits with each row changed by its `edits`. Excluded tokens get minus infinity.

    `logits`: float32 [n, vocabulary]. They are not changed, and are returned as they are if there is nothing to change.
    Does not wait for the device.
    """
    size = logits.shape[1]
    repeated = flat_places([e.repeated for e in edits], size)
    lowered, biased = flat_places([e.lowered for e in edits], size), flat_places([e.bias for e in edits], size)
    allowed, forbidden = (
        flat_places([e.allowed or () for e in edits], size),
        flat_places([e.forbidden for e in edits], size),
    )
    restricted = [i for i, e in enumerate(edits) if e.allowed is not None]
    ruled = [i for i, e in enumerate(edits) if e.words is not None]
    lists = (repeated, lowered, biased, allowed, forbidden, restricted, ruled)
    if not any(len(each) for each in lists):
        return logits
    out = logits.clone()
    flat = out.view(-1)
    places = copied_to(out.device, np.int64, *lists)
    penalties = [e.penalty for e in edits for _ in e.repeated]
    amounts = (penalties, [a for e in edits for a in e.lowered.values()], [a for e in edits for a in e.bias.values()])
    by, less, more = copied_to(out.device, np.float32, *amounts)
    if len(repeated):
        old = flat[places[0]]
        flat[places[0]] = torch.where(old > 0, old / by, old * by)
    if len(lowered):
        flat[places[1]] -= less
    if len(biased):
        flat[places[2]] += more
    if restricted or len(forbidden):
        out.masked_fill_(_barred(out, restricted=places[5], allowed=places[3], forbidden=places[4]), -torch.inf)
    if ruled:
        may_come = _unpacked(np.stack([np.asarray(edits[i].words, np.uint32) for i in ruled]), size, out.device)
        out.index_copy_(0, places[6], out.index_select(0, places[6]).masked_fill_(~may_come, -torch.inf))
    return out


def _sampler(generation: Generation, vocabulary_size: int) -> RowSampler:
    if generation.sampler is None:
        generation.sampler = RowSampler(generation.params, vocabulary_size, generation.constraint)
    sampler: RowSampler = generation.sampler
    return sampler


def _drawn(
    logits: torch.Tensor,
    hidden: torch.Tensor | None,
    generations: Sequence[Generation],
    members: list[int],
    kind: type | None,
    edits: Mapping[int, RowEdits],
    found: dict[int, Choice | Exception],
) -> list[tuple[list[int], torch.Tensor]]:
    """Choose the numbers of the rows `members`: int64 [n], or [n, k] by programs.

    All rows are chosen in one way: by `Sampling` (`kind` None), or by choosers or programs of the class `kind`. If that
    fails, each row is tried by itself, so that only the row at fault fails.
    """
    try:
        given = _picked(logits, members)
        if kind is None:
            return [(members, sample_rows(given, [g.sampler for g in generations], [edits[i] for i in members]))]
        chooser: Any = kind
        if generations[0].params.program is None:
            return [(members, chooser.choose([g.params.chooser for g in generations], given))]
        if hidden is None:
            raise ModelError("the decoder has no hidden states")
        return [(members, chooser.run([g.params.program for g in generations], given, _picked(hidden, members)))]
    except Exception as error:
        # Choosers and programs are an adapter's code, which may raise any exception.
        if len(members) == 1:
            found[members[0]] = error
            return []
        each = zip(generations, members, strict=True)
        return list(chain(*(_drawn(logits, hidden, [g], [i], kind, edits, found) for g, i in each)))


def _picked(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))


def _read(chosen: Sequence[torch.Tensor], logits: torch.Tensor | None) -> list[Choice]:
    """Read the chosen numbers, int64 [n] or [n, k], as one Choice for each row. Waits for the device once.

    The choices have log-probabilities if `logits` are given.
    """
    flat = torch.cat([each.flatten() for each in chosen])
    logprobs: Sequence[float | None] = [None] * sum(len(each) for each in chosen)
    if logits is None:
        numbers = flat.tolist()
    else:
        tokens = torch.cat([each.view(len(each), -1)[:, 0] for each in chosen])
        own = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(1)
        both = torch.cat((flat.double(), own.double())).tolist()
        numbers, logprobs = [int(n) for n in both[: len(flat)]], both[len(flat) :]
    rows, at = list[Sequence[int]](), 0
    for each in chosen:
        size = each[0].numel()
        rows += [numbers[k : k + size] for k in range(at, at + each.numel(), size)]
        at += each.numel()
    return [Choice(row[0], logprob, row) for row, logprob in zip(rows, logprobs, strict=True)]


def _accepted(choice: Choice, generation: Generation, logits: torch.Tensor) -> Choice | Exception:
    params, token = generation.params, choice.token
    logprob = choice.logprob if params.logprobs else None
    try:
        if params.program is not None:
            return Choice(params.program.accept(choice.numbers), logprob, choice.numbers)
        if params.chooser is not None:
            own = params.chooser.accept(token)
            return Choice(own, float(logits[own] - torch.logsumexp(logits, 0)) if params.logprobs else None)
        if token == NO_TOKEN:
            raise ModelError(
                "the model's output is not a number" if torch.isnan(logits).any() else "every token is excluded"
            )
        if generation.constraint is not None:
            try:
                generation.constraint.accept(token)
            except ValueError as error:
                raise ModelError(f"the grammar does not allow the token: {error}") from error
    except Exception as error:
        return error
    return Choice(token, logprob)


def flat_places(tokens: Sequence[Collection[int]], size: int) -> np.ndarray:
    """Return the indices of each row's tokens in logits [n, size] viewed as [n * size]: int64."""
    some = [np.fromiter(each, np.int64, len(each)) + row * size for row, each in enumerate(tokens) if len(each)]
    return np.concatenate(some) if some else np.empty(0, np.int64)


def copied_to(device: torch.device, dtype: Any, *arrays: Any) -> tuple[torch.Tensor, ...]:
    """Return arrays [n] of numbers as tensors on the device, by one copy that waits for no other work of the device.

    `dtype`: a numpy type.
    """
    joined = np.concatenate([np.asarray(each, dtype) for each in arrays])
    copied = torch.from_numpy(joined).to(device, non_blocking=True)
    return torch.split(copied, [len(each) for each in arrays])


def _barred(
    logits: torch.Tensor, restricted: torch.Tensor, allowed: torch.Tensor, forbidden: torch.Tensor
) -> torch.Tensor:
    """A bool mask like `logits` of excluded tokens. In `restricted` rows, all tokens except `allowed` are excluded."""
    barred = torch.zeros_like(logits, dtype=torch.bool)
    barred.index_fill_(0, restricted, True)
    barred.view(-1).index_fill_(0, allowed, False).index_fill_(0, forbidden, True)
    return barred


def _unpacked(words: np.ndarray, size: int, device: torch.device) -> torch.Tensor:
    """The bits of uint32 [n, words], the lowest first, as bool [n, size]."""
    packed = torch.from_numpy(words.view(np.int32)).to(device, non_blocking=True)
    bits = ((packed[:, :, None] >> torch.arange(32, device=device, dtype=torch.int32)) & 1).bool().flatten(1)
    # If the head is padded beyond the tokenizer's vocabulary, its last rows are not tokens.
    return torch.nn.functional.pad(bits[:, :size], (0, max(0, size - bits.shape[1])))
