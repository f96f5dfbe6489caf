"""Sampling against its definition, on distributions small enough to count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.engine.api import Sampling
from antiphon.engine.generation import Constraint
from antiphon.engine.local.sampling import random_generator, sample
from antiphon.errors import ModelError

# Probabilities 0.4, 0.3, 0.2, 0.08, 0.02.
LOGITS = torch.log(torch.tensor([0.3, 0.4, 0.02, 0.2, 0.08]))


def drawn(
    count: int = 4000,
    recent: tuple[int, ...] = (),
    produced: int = 0,
    constraint: Constraint | None = None,
    **options: Any,
) -> dict[int, float]:
    params = Sampling(**{"temperature": 1.0, "seed": 1} | options)
    random = random_generator(params)
    found = Counter(sample(LOGITS, params, recent, produced, random, constraint)[0] for _ in range(count))
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
        # top_p counts among what top_k left: 0.4 / 0.7 > 0.5.
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
    def run(seed: int | None) -> list[int]:
        params = Sampling(temperature=1.0, seed=seed)
        random = random_generator(params)
        return [sample(LOGITS, params, (), 0, random)[0] for _ in range(64)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)


def test_when_the_likeliest_tokens_hold_too_little_the_whole_vocabulary_is_sorted() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50_000) * 0.01
    flat = {
        sample(logits, p, (), 0, random_generator(p))[0]
        for p in (Sampling(temperature=1, top_p=0.9, seed=s) for s in range(99))
    }
    # Nearly uniform: what the best thousand hold is far below top_p, and the whole is sorted.
    assert len(flat) > 90
    order = logits.argsort(descending=True)
    assert not flat <= set(order[:1024].tolist())
    assert flat <= set(order[:46_000].tolist())


def test_penalties_look_back_as_far_as_they_say() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0])
    params = Sampling(repetition_penalty=2.0, repetition_window=2)
    assert sample(logits, params, (0, 1, 1), 0, random_generator(params))[0] == 0
    assert sample(logits, params, (1, 0, 2), 0, random_generator(params))[0] == 1
    # A negative logit is made more so.
    assert sample(torch.tensor([-1.0, -1.5]), params, (0,), 0, random_generator(params))[0] == 1
    params = Sampling(frequency_penalty=0.06, presence_penalty=0.01)
    assert sample(logits, params, (0,), 1, random_generator(params))[0] == 0
    assert sample(logits, params, (0, 0), 2, random_generator(params))[0] == 1
    # Rows before the generation are not counted.
    assert sample(logits, params, (0, 0, 0, 2), 1, random_generator(params))[0] == 0
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
    with pytest.raises(ModelError, match="no token may come"):
        drawn(1, constraint=Only(), temperature=0.0)
    with pytest.raises(ModelError, match="no token may come"):
        drawn(1, constraint=Only())


def test_the_log_probability_is_the_models_own() -> None:
    params = Sampling(temperature=0.1, bias={2: 50.0}, logprobs=True)
    token, logprob = sample(LOGITS, params, (), 0, random_generator(params))
    assert token == 2
    assert logprob == pytest.approx(float(LOGITS[2]), abs=1e-5)


def test_when_logits_are_not_numbers_sampling_raises() -> None:
    for temperature in (0.0, 1.0):
        params = Sampling(temperature=temperature, seed=1)
        with pytest.raises(ModelError, match="not a number"):
            sample(torch.full((5,), float("nan")), params, (), 0, random_generator(params))
