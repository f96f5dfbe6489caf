"""Chooses one token for each of many rows of logits, by the row's `Sampling` or `Chooser`.

The host decides the changes to each row: penalties of sampled tokens, biases, exclusions, and a grammar's mask. They
are copied to the logits' device at once and applied to all rows with a few operators, as few for 64 rows as for one.
Then `device_sampling.py` draws the tokens, and they are read once. Each generation has its own random numbers, so no
generation affects another one's tokens. This module knows neither sessions nor steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.generation import Constraint, Generation
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.engine.local.streams import HostCopy
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
    # Whether `penalty` also lowers the row's newest token, which only the device has.
    unread: bool = False


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

    def edits(self, recent: Sequence[Row], produced: int, *, unread: bool = False) -> RowEdits:
        """Return the changes to the next token's logits.

        `recent`: the newest rows, the last one last, at least as many as the penalties consider. `produced`: the number
        of these that this generation sampled. `unread`: `recent` lacks the newest row, which the host has not read, and
        `params` has no penalties that count tokens. Raises GrammarError if the grammar takes too long to evaluate.
        """
        params, repeated, times = self.params, set[Row](), Counter[Row]()
        if params.repetition_penalty != 1.0 and params.repetition_window:
            repeated = set(recent[-params.repetition_window :])
        if (params.presence_penalty or params.frequency_penalty) and produced:
            times.update(recent[-produced:])
        known = [t for t in repeated if t is not None]
        return self.edits_of(known, {t: n for t, n in times.items() if t is not None}, unread=unread)

    def edits_of(self, repeated: Collection[int], times: Mapping[int, int], *, unread: bool = False) -> RowEdits:
        """Return the changes to the next token's logits, from counts instead of rows.

        `repeated`: the tokens that the repetition penalty considers. `times`: how many times the generation sampled
        each token. `unread`: the repetition penalty also considers the newest token, which only the device has.
        """
        params = self.params
        penalizes = params.repetition_penalty != 1.0 and params.repetition_window > 0
        return RowEdits(
            repeated if penalizes else (),
            params.repetition_penalty,
            {t: params.presence_penalty + params.frequency_penalty * n for t, n in times.items()}
            if params.presence_penalty or params.frequency_penalty
            else {},
            params.bias,
            params.allow,
            params.forbid,
            None if self._constraint is None else self._constraint.allowed(),
            unread and penalizes,
        )


class DrawnTokens:
    """The tokens that were drawn for the rows of a step, before the host has read them.

    `numbers`, int64, on the device: the numbers of all rows that were drawn, one after another; None if there are none.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[tuple[Generation, Sequence[Row]]],
        drawn: Sequence[tuple[list[int], torch.Tensor]],
        found: dict[int, Choice | Exception],
    ) -> None:
        self._logits, self._rows, self._found = logits, rows, found
        self._sizes = [(i, chosen[0].numel()) for members, chosen in drawn for i in members]
        self.numbers: torch.Tensor | None = None
        self._with_logprobs: torch.Tensor | None = None
        self._copied: HostCopy | None = None
        if drawn:
            self.numbers = torch.cat([chosen.flatten() for _, chosen in drawn])
            if any(rows[i][0].params.logprobs for i, _ in self._sizes):
                own = _picked(logits, [i for i, _ in self._sizes])
                tokens = torch.cat([chosen.view(len(chosen), -1)[:, 0] for _, chosen in drawn])
                own = own.gather(1, tokens.clamp(min=0)[:, None])[:, 0] - own.logsumexp(1)
                self._with_logprobs = torch.cat((self.numbers.double(), own.double()))

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield each row that was drawn, with the index of its first number in `numbers`."""
        at = 0
        for row, size in self._sizes:
            yield row, at
            at += size

    def begin_copy(self) -> None:
        """Begin to copy what `read` reads, so that it does not wait for work that is queued later."""
        if self.numbers is not None:
            self._copied = HostCopy(self.numbers if self._with_logprobs is None else self._with_logprobs)

    def read(self, late: Collection[int] = ()) -> list[Choice | Exception]:
        """Read all tokens from the device at once, and advance each generation past its token. Called once.

        `late`: the rows whose generations do not advance, because they have ended.

        Never raises: a row that fails gets an error, and the others get their tokens.
        """
        rows, found = self._rows, self._found
        if self.numbers is not None:
            numbers, logprobs = self._read()
            for k, (i, at) in enumerate(self.places()):
                own = numbers[at : at + self._sizes[k][1]]
                choice = Choice(own[0], logprobs[k], own)
                found[i] = choice if i in late else _accepted(choice, rows[i][0], self._logits[i])
        return [found[i] for i in range(len(rows))]

    def _read(self) -> tuple[list[int], Sequence[float | None]]:
        assert self.numbers is not None
        given = self.numbers if self._with_logprobs is None else self._with_logprobs
        both: list[Any] = self._copied.read() if self._copied else given.tolist()
        if self._with_logprobs is None:
            return both, [None] * len(self._sizes)
        count = len(self.numbers)
        return [int(n) for n in both[:count]], both[count:]


def choose_tokens(
    logits: torch.Tensor, rows: Sequence[tuple[Generation, Sequence[Row]]], hidden: torch.Tensor | None = None
) -> list[Choice | Exception]:
    """Choose the next token of each row's generation, and read all of them. See `launch_choice`."""
    return launch_choice(logits, rows, hidden).read()


def launch_choice(
    logits: torch.Tensor,
    rows: Sequence[tuple[Generation, Sequence[Row]]],
    hidden: torch.Tensor | None = None,
    unread: torch.Tensor | None = None,
    unread_rows: Collection[int] = (),
) -> DrawnTokens:
    """Choose the next token of each row's generation, without waiting for the device.

    `logits`: float32 [n, vocabulary], not changed, and unchanged until the tokens are read. `rows`: the generations,
    each with its newest rows, as for `RowSampler.edits`. `hidden`: the hidden states [n, width] of the logits, for
    programs. `unread`: int64 [n], on the device: the newest token of each row of `unread_rows`, which the host has not
    read and `rows` lack. Reading the chosen tokens advances each generation's grammar, chooser or program past its
    token. Log-probabilities are natural ones, under the model's own distribution.

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
                sampler = _sampler(generation, logits.shape[1])
                edits[i] = sampler.edits(recent, generation.produced, unread=i in unread_rows)
        except Exception as error:
            found[i] = error
        else:
            groups.setdefault(None if chooser is None else type(chooser), []).append(i)
    drawn: list[tuple[list[int], torch.Tensor]] = []
    for kind, members in groups.items():
        newest = None if unread is None else (unread, unread_rows)
        drawn += _drawn(logits, hidden, newest, [rows[i][0] for i in members], members, kind, edits, found)
    return DrawnTokens(logits, rows, drawn, found)


def sample_rows(
    logits: torch.Tensor,
    samplers: Sequence[RowSampler],
    edits: Sequence[RowEdits],
    unread: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row of `logits`, float32 [n, vocabulary], which are not changed.

    `unread`: int64 [n], on the device: the newest token of each row with `RowEdits.unread`. Returns int64 [n], as
    `draw_tokens` does, without waiting for the device.
    """
    device, shaped = logits.device, shape_rows(logits, edits, unread)
    choices = RowChoices.of([s.params for s in samplers], device)
    # Taken last, so that a batch that fails consumes no random numbers.
    uniforms = torch.tensor([s.random.take(1)[0] for s in samplers], dtype=torch.float64)
    return draw_tokens(shaped, choices, uniforms.to(device, non_blocking=True))


def shape_rows(logits: torch.Tensor, edits: Sequence[RowEdits], unread: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits with each row changed by its `edits`. Excluded tokens get minus infinity.

    `logits`: float32 [n, vocabulary]. They are not changed, and are returned as they are if there is nothing to change.
    `unread`: as in `sample_rows`. Does not wait for the device.
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
    late = [i for i, e in enumerate(edits) if e.unread]
    lists = (repeated, lowered, biased, allowed, forbidden, restricted, ruled, late)
    if not any(len(each) for each in lists):
        return logits
    out = logits.clone()
    flat = out.view(-1)
    places = copied_to(out.device, np.int64, *lists)
    penalties = [e.penalty for e in edits for _ in e.repeated] + [edits[i].penalty for i in late]
    amounts = (penalties, [a for e in edits for a in e.lowered.values()], [a for e in edits for a in e.bias.values()])
    by, less, more = copied_to(out.device, np.float32, *amounts)
    lower = places[0]
    if late:
        assert unread is not None
        # A token may be in both lists, and is lowered once. A row that failed has no token, and is not read.
        lower = torch.cat((lower, places[7] * size + unread.index_select(0, places[7]).clamp(min=0)))
    if len(lower):
        old = flat[lower]
        flat[lower] = torch.where(old > 0, old / by, old * by)
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
    unread: tuple[torch.Tensor, Collection[int]] | None,
    generations: Sequence[Generation],
    members: list[int],
    kind: type | None,
    edits: Mapping[int, RowEdits],
    found: dict[int, Choice | Exception],
) -> list[tuple[list[int], torch.Tensor]]:
    """Choose the numbers of the rows `members`: int64 [n], or [n, k] by programs.

    All rows are chosen in one way: by `Sampling` (`kind` None), or by choosers or programs of the class `kind`. If that
    fails, each row is tried by itself, so that only the row at fault fails. `unread`: `unread` and `unread_rows` of
    `launch_choice`, if there are any.
    """
    try:
        given = _picked(logits, members)
        late = [unread is not None and i in unread[1] for i in members]
        newest = _picked(unread[0], members) if unread and any(late) else None
        if kind is None:
            own = [edits[i] for i in members]
            return [(members, sample_rows(given, [g.sampler for g in generations], own, newest))]
        chooser: Any = kind
        if generations[0].params.program is None:
            choosers = [g.params.chooser for g in generations]
            if newest is None:
                return [(members, chooser.choose(choosers, given))]
            return [(members, chooser.choose_ahead(choosers, given, newest, late))]
        if hidden is None:
            raise ModelError("the decoder has no hidden states")
        return [(members, chooser.run([g.params.program for g in generations], given, _picked(hidden, members)))]
    except Exception as error:
        # Choosers and programs are an adapter's code, which may raise any exception.
        if len(members) == 1:
            found[members[0]] = error
            return []
        each = zip(generations, members, strict=True)
        return list(chain(*(_drawn(logits, hidden, unread, [g], [i], kind, edits, found) for g, i in each)))


def _picked(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))


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
