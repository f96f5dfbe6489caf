"""Sampling of many rows at once: each row gets the same token as alone, which is the token by the definition."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from antiphon.engine.api import Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local import device_sampling
from antiphon.engine.local.device_sampling import DRAWN_AHEAD, RandomNumbers, RowChoices, draw_tokens, is_plain

CPU = torch.device("cpu")
TEMPERATURES = (0.0, 0.3, 0.9, 1.0, 1.7)
TOP_KS = (0, 1, 2, 50, 1000, 20_000)
TOP_PS = (1.0, 0.95, 0.5, 0.01, 0.0)
MIN_PS = (0.0, 0.02, 0.5, 1.0)


def some_params(chance: random.Random) -> Sampling:
    return Sampling(
        temperature=chance.choice(TEMPERATURES),
        top_k=chance.choice(TOP_KS),
        top_p=chance.choice(TOP_PS),
        min_p=chance.choice(MIN_PS),
        seed=chance.randrange(1000),
    )


def some_logits(chance: random.Random, rows: int, size: int) -> torch.Tensor:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(chance.randrange(10**6)))
    logits *= chance.choice((0.01, 1.0, 6.0))
    if chance.random() < 0.5:
        # Like the logits of a bfloat16 model, many of which are equal.
        logits = logits.bfloat16().float()
    return logits.round() if chance.random() < 0.2 else logits


def named_token(logits: torch.Tensor, params: Sampling, uniform: float) -> int:
    """The token by the definition, one row at a time: the likeliest first, and of equal ones the lower token first."""
    values = (logits / params.temperature if params.temperature > 0 else logits).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.temperature <= 0 or params.top_k == 1:
        return order[0]
    if params.top_k:
        order = order[: params.top_k]
    elif params.top_p >= 1 and params.min_p <= 0:
        order = list(range(len(values)))
    best = max(values)
    weights = [math.exp(values[i] - best) for i in order]
    total, before, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        inside = before < params.top_p * total or params.top_p >= 1
        kept.append((token, weight if not kept or (inside and weight >= params.min_p) else 0.0))
        before += weight
    point, reached = uniform * sum(w for _, w in kept), 0.0
    for token, weight in kept:
        reached += weight
        if reached > point:
            return token
    raise AssertionError("beyond the last token")


@pytest.mark.parametrize("large", [16, 8192])
@pytest.mark.parametrize("seed", range(40))
def test_a_row_gets_the_same_token_alone_in_a_batch_and_by_the_definition(
    seed: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    size, rows = chance.choice((2, 5, 60, 300)), chance.choice((1, 2, 7))
    params, logits = [some_params(chance) for _ in range(rows)], some_logits(chance, rows, size)
    # With a large vocabulary, only the likeliest tokens are ranked at first.
    monkeypatch.setattr(device_sampling, "LARGE_VOCABULARY", large)
    monkeypatch.setattr(device_sampling, "HEAD_TOKENS", 8)
    monkeypatch.setattr(device_sampling, "SPARE_TOKENS", 2)
    draws = 4
    uniforms = torch.tensor([RandomNumbers(p).take(draws) for p in params], dtype=torch.float64)
    before = logits.clone()
    for number in range(draws):
        tokens = draw_tokens(logits, RowChoices.of(params, CPU), uniforms[:, number])
        assert tokens.dtype == torch.int64
        alone = [
            int(draw_tokens(row[None], RowChoices.of([p], CPU), u[None]))
            for row, p, u in zip(logits, params, uniforms[:, number], strict=True)
        ]
        assert tokens.tolist() == alone
        assert alone == [
            named_token(row, p, float(u)) for row, p, u in zip(logits, params, uniforms[:, number], strict=True)
        ]
    assert torch.equal(before, logits)


@pytest.mark.parametrize("options", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {}])
def test_in_a_large_vocabulary_the_head_of_the_ranking_gives_what_the_whole_gives(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    params = [Sampling(temperature=t, seed=n, **options) for n, t in enumerate((0.2, 0.7, 1.0, 1.3))]
    # Peaked logits, flat ones, and ones with many equal values at every cut.
    for logits in (torch.randn(4, 20_000) * 5, torch.randn(4, 20_000) * 0.01, (torch.randn(4, 20_000) * 3).round()):
        uniforms = torch.tensor([chance.random() for _ in params], dtype=torch.float64)
        by_head = draw_tokens(logits, RowChoices.of(params, CPU), uniforms)
        with monkeypatch.context() as patch:
            patch.setattr(device_sampling, "LARGE_VOCABULARY", 10**6)
            assert torch.equal(by_head, draw_tokens(logits, RowChoices.of(params, CPU), uniforms))


def test_random_numbers_are_those_of_single_draws_and_greedy_rows_draw_none() -> None:
    params = Sampling(temperature=1.0, seed=4)
    generator, count = torch.Generator().manual_seed(4), 2 * DRAWN_AHEAD + 30
    singly = [float(torch.rand(1, generator=generator, dtype=torch.float64)) for _ in range(count)]
    numbers = RandomNumbers(params)
    assert [n for take in (1, 15, count - 16) for n in numbers.take(take)] == singly
    for likeliest in (replace(params, temperature=0.0), replace(params, top_k=1)):
        assert RandomNumbers(likeliest).take(3) == [0, 0, 0]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_row_without_a_finite_maximum_gets_no_token_and_the_others_theirs(options: dict[str, Any]) -> None:
    params = Sampling(**{"temperature": 1.0} | options)
    good = torch.tensor([-1.0, 3.0, -torch.inf, 0.5])
    rows = [good, good.clone(), torch.full((4,), -torch.inf), torch.tensor([0.0, torch.inf, 1.0, 1.0]), good]
    rows[1][2] = torch.nan
    tokens = draw_tokens(torch.stack(rows), RowChoices.of([params] * 5, CPU), torch.full((5,), 0.4).double())
    assert [t == NO_TOKEN for t in tokens.tolist()] == [False, True, True, True, False]
    assert tokens[0] == tokens[4] == 1


def test_nothing_is_read_from_the_device() -> None:
    # Tensors of the meta device have no values: reading one on the host raises.
    device = torch.device("meta")
    params = [Sampling(temperature=t, top_k=k, top_p=p) for t in (0, 1) for k in (0, 9) for p in (1, 0.5)]
    tokens = draw_tokens(
        torch.empty(8, 20_000, device=device), RowChoices.of(params, device), torch.empty(8, device=device).double()
    )
    assert (tokens.device, tokens.shape) == (device, (8,))


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": frozenset({3})}, True),
        ({"repetition_penalty": 1.1, "repetition_window": 0, "hidden": True}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"bias": {1: 2.0}}, False),
        ({"allow": ()}, False),
        ({"forbid": (1,)}, False),
        ({"logprobs": True}, False),
        ({"chooser": object()}, False),
    ],
)
def test_which_rows_are_plain(options: dict[str, Any], plain: bool) -> None:
    assert is_plain(Sampling(**options)) is plain
