"""Sampling against its definition, on distributions small enough to count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.engine.api import Row, Sampling
from antiphon.engine.generation import Constraint, Generation
from antiphon.engine.local.device_sampling import RandomNumbers
from antiphon.engine.local.sampling import Choice, RowEdits, RowSampler, choose_tokens, sample_rows, shape_rows
from antiphon.errors import GrammarError, ModelError
from tests.engine.local.operators import Operators
from tests.engine.local.reference_sampling import sample

# Probabilities 0.4, 0.3, 0.2, 0.08, 0.02.
LOGITS = torch.log(torch.tensor([0.3, 0.4, 0.02, 0.2, 0.08]))


def generation(params: Sampling, constraint: Constraint | None = None, produced: int = 0) -> Generation:
    return Generation(params, lambda _, __: None, 0, constraint=constraint, produced=produced)


def chosen(logits: torch.Tensor, params: Sampling, recent: Sequence[Row] = (), produced: int = 0) -> Choice:
    """The choice for one row, alone in its batch."""
    (choice,) = choose_tokens(logits[None], [(generation(params, produced=produced), recent)])
    return choice


def token(*args: Any) -> int:
    found = chosen(*args)
    assert isinstance(found, tuple)
    return found[0]


def drawn(
    count: int = 4000,
    recent: tuple[int, ...] = (),
    produced: int = 0,
    constraint: Constraint | None = None,
    **options: Any,
) -> dict[int, float]:
    own = generation(Sampling(**{"temperature": 1.0, "seed": 1} | options), constraint, produced)
    found = Counter[int]()
    for _ in range(count):
        (choice,) = choose_tokens(LOGITS[None], [(own, recent)])
        if isinstance(choice, Exception):
            raise choice
        found[choice[0]] += 1
    return {token: n / count for token, n in sorted(found.items())}


def test_at_temperature_zero_the_likeliest_token_is_chosen() -> None:
    assert drawn(3, temperature=0.0) == {1: 1.0}


def test_plain_sampling_follows_the_distribution() -> None:
    found = drawn()
    for token, p in enumerate(torch.exp(LOGITS).tolist()):
        assert found[token] == pytest.approx(p, abs=0.03)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {1}),
        # The token that crosses top_p stays.
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 3}),
        ({"top_p": 0.01}, {1}),
        ({"min_p": 0.3}, {0, 1, 3}),
        # top_p applies to the tokens that top_k left: 0.4 / 0.7 > 0.5.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"forbid": (1, 0)}, {2, 3, 4}),
        ({"allow": (4, 2)}, {2, 4}),
        ({"allow": (4, 2), "forbid": (4,)}, {2}),
        ({"bias": {1: -100.0, 2: 4.0}}, {0, 2, 3, 4}),
    ],
)
def test_which_tokens_the_options_leave_in(options: dict[str, Any], left: set[int]) -> None:
    assert set(drawn(3000, **options)) == left


def test_temperature_sharpens_and_flattens() -> None:
    assert drawn(temperature=0.25)[1] > 0.6
    assert drawn(temperature=4.0)[2] > 0.08


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    def run(seed: int | None) -> list[Choice]:
        own = generation(Sampling(temperature=1.0, seed=seed))
        return [choose_tokens(LOGITS[None], [(own, ())])[0] for _ in range(64)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)


def test_when_the_likeliest_tokens_hold_too_little_the_whole_vocabulary_is_sorted() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50_000) * 0.01
    flat = {token(logits, Sampling(temperature=1, top_p=0.9, seed=s)) for s in range(99)}
    # The logits are nearly uniform: the likeliest thousand tokens have far less than top_p, so all tokens are sorted.
    assert len(flat) > 90
    order = logits.argsort(descending=True)
    assert not flat <= set(order[:1024].tolist())
    assert flat <= set(order[:46_000].tolist())


def test_penalties_look_back_as_far_as_they_say() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0])
    params = Sampling(repetition_penalty=2.0, repetition_window=2)
    assert token(logits, params, (0, 1, 1), 0) == 0
    assert token(logits, params, (1, 0, 2), 0) == 1
    # A negative logit becomes more negative.
    assert token(torch.tensor([-1.0, -1.5]), params, (0,), 0) == 1
    params = Sampling(frequency_penalty=0.06, presence_penalty=0.01)
    assert token(logits, params, (0,), 1) == 0
    assert token(logits, params, (0, 0), 2) == 1
    # Rows before the generation are not counted.
    assert token(logits, params, (0, 0, 0, 2), 1) == 0
    assert logits.tolist() == pytest.approx([2.0, 1.9, -1.0])


def test_only_tokens_that_a_constraint_allows_are_sampled() -> None:
    class Only:
        def __init__(self, *tokens: int) -> None:
            self.bits = np.zeros(1, np.uint32)
            for token in tokens:
                self.bits[0] |= np.uint32(1 << token)
            self.accepted: list[int] = []

        def allowed(self) -> np.ndarray:
            return self.bits

        def accept(self, token: int) -> None:
            self.accepted.append(token)

    only = Only(2, 4)
    assert set(drawn(500, constraint=only)) == {2, 4}
    assert set(only.accepted) == {2, 4}
    with pytest.raises(ModelError, match="every token is excluded"):
        drawn(1, constraint=Only(), temperature=0.0)
    with pytest.raises(ModelError, match="every token is excluded"):
        drawn(1, constraint=Only())


def test_the_log_probability_is_the_models_own() -> None:
    params = Sampling(temperature=0.1, bias={2: 50.0}, logprobs=True)
    choice = chosen(LOGITS, params)
    assert isinstance(choice, tuple)
    assert choice[0] == 2
    assert choice[1] == pytest.approx(float(LOGITS[2]), abs=1e-5)


def test_when_logits_are_not_numbers_sampling_raises() -> None:
    for temperature in (0.0, 1.0):
        params = Sampling(temperature=temperature, seed=1)
        failed = chosen(torch.full((5,), float("nan")), params)
        assert isinstance(failed, ModelError)
        assert str(failed) == "the model's output is not a number"


def some_params(chance: random.Random, seed: int) -> Sampling:
    return Sampling(
        temperature=chance.choice((0.0, 0.7, 1.3)),
        top_k=chance.choice((0, 1, 4)),
        top_p=chance.choice((1.0, 0.6)),
        min_p=chance.choice((0.0, 0.1)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
        repetition_window=chance.choice((0, 3, 64)),
        presence_penalty=chance.choice((0.0, 0.0, 0.7)),
        frequency_penalty=chance.choice((0.0, 0.0, -0.4)),
        seed=seed,
        forbid=chance.choice(((), (), (1, 2))),
        allow=chance.choice((None, None, (0, 2, 5, 11))),
        bias=chance.choice(({}, {}, {3: 2.5, 7: -1.0})),
        logprobs=chance.random() < 0.3,
    )


class Words:
    """A constraint that allows random tokens at each step, and records the accepted tokens."""

    def __init__(self, seed: int) -> None:
        self._chance, self.accepted = random.Random(seed), list[int]()

    def allowed(self) -> np.ndarray | None:
        return None if self._chance.random() < 0.3 else np.array([self._chance.getrandbits(13) | 32], np.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("seed", range(60))
def test_rows_together_get_the_tokens_of_each_alone_by_the_definition(seed: int) -> None:
    chance, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    size, rows = 13, 5
    params = [some_params(chance, seed * 10 + i) for i in range(rows)]
    ruled = [chance.random() < 0.3 for _ in range(rows)]
    own = [generation(p, Words(i) if ruled[i] else None) for i, p in enumerate(params)]
    uniforms, constraints = [RandomNumbers(p) for p in params], [Words(i) if r else None for i, r in enumerate(ruled)]
    history = [[chance.choice((None, *range(size))) for _ in range(4)] for _ in range(rows)]
    for _ in range(8):
        present = [i for i in range(rows) if chance.random() < 0.8]
        logits = torch.randn(len(present), size, generator=noise) * 2
        before = logits.clone()
        together = choose_tokens(logits, [(own[i], history[i]) for i in present])
        assert torch.equal(logits, before)
        for i, row, choice in zip(present, logits, together, strict=True):
            produced = own[i].produced
            uniform = uniforms[i].take(1)[0]
            if isinstance(choice, Exception):
                with pytest.raises(ModelError, match=str(choice)):
                    sample(row, params[i], history[i], produced, uniform, constraints[i])
                continue
            alone = sample(row, params[i], history[i], produced, uniform, constraints[i])
            assert choice[0] == alone[0]
            assert choice[1] == (None if alone[1] is None else pytest.approx(alone[1], abs=1e-5))
            history[i].append(alone[0])
            own[i].produced += 1
    for mine, theirs in zip(own, constraints, strict=True):
        assert getattr(mine.constraint, "accepted", None) == getattr(theirs, "accepted", None)


def test_shaping_has_as_many_operators_for_64_rows_as_for_one_and_reads_nothing() -> None:
    edits = RowEdits([1, 2], 1.3, {3: 0.5}, {4: 1.0}, (5, 6, 7), (7,), np.array([96], np.uint32))
    # Tensors of the meta device have no values: reading one on the host raises.
    lists = list[list[str]]()
    for count in (1, 64):
        samplers = [RowSampler(Sampling(temperature=1.0, top_k=3, seed=i), 13) for i in range(count)]
        logits = torch.empty(count, 13, device="meta")
        # The first call draws random numbers ahead, and copies the parameters.
        sample_rows(logits, samplers, [edits] * count)
        with Operators() as operators:
            assert sample_rows(logits, samplers, [edits] * count).shape == (count,)
        lists.append(operators.names)
    assert lists[0] == lists[1]
    assert len(lists[0]) < 80
    plain = torch.empty(2, 13)
    assert shape_rows(plain, [RowEdits(), RowEdits()]) is plain


def test_when_a_row_fails_then_the_others_have_their_tokens() -> None:
    class Late(Words):
        def allowed(self) -> np.ndarray:
            raise GrammarError("too late")

    logits = torch.stack([LOGITS, torch.full((5,), torch.nan), LOGITS, LOGITS, LOGITS])
    rows = [generation(p) for p in (Sampling(), Sampling(), Sampling(bias={5: 1.0}), Sampling(forbid=(1,)))]
    rows.append(generation(Sampling(), Late(0)))
    first, second, third, fourth, last = choose_tokens(logits, [(row, ()) for row in rows])
    assert (first, fourth) == (Choice(1), Choice(0))
    assert str(second) == "the model's output is not a number"
    assert str(third) == "token 5 is not in the vocabulary of 5"
    assert isinstance(last, GrammarError)


def test_a_log_probability_is_that_of_its_own_row_beside_rows_that_are_chosen_otherwise() -> None:
    class Last:
        @staticmethod
        def choose(choosers: Sequence[Any], logits: torch.Tensor) -> torch.Tensor:
            return torch.full((len(logits),), 4)

        def accept(self, chosen: int) -> int:
            return chosen

    logits = torch.stack([LOGITS.flip(0), LOGITS.roll(1), LOGITS])
    rows = [Sampling(), Sampling(chooser=Last(), logprobs=True), Sampling(logprobs=True)]
    first, second, third = choose_tokens(logits, [(generation(p), ()) for p in rows])
    assert first == Choice(3)
    assert second == Choice(4, pytest.approx(float(LOGITS[3]), abs=1e-5))
    assert third == Choice(1, pytest.approx(float(LOGITS[1]), abs=1e-5))
