"""The tokens and codes that MiniCPM-o chooses, and their distributions, compared with the reference choosers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from antiphon.adapters.minicpmo.sampling import CodeChooser, SpecialTokens, UnitChooser, UnitSampling
from antiphon.engine.api import Sampling
from antiphon.engine.local.device_sampling import RandomNumbers
from antiphon.errors import ModelError
from tests.adapters.reference_minicpmo_sampling import ReferenceCodeChooser, ReferenceUnitChooser
from tests.engine.local.operators import Operators

# Special tokens are 0 to 12, words 13 to 19.
IDS = SpecialTokens(*range(13))
WORD = 15


def next_token(chooser: UnitChooser | CodeChooser, logits: torch.Tensor) -> int:
    return chooser.accept(int(chooser.choose([chooser], logits[None])))  # type: ignore[arg-type, list-item]


def numbers(seed: int) -> RandomNumbers:
    return RandomNumbers(Sampling(temperature=1.0, seed=seed))


def chosen(logits: dict[int, float], *, speak: bool = False, units: int = 1, **choices: float) -> int:
    """Return the first word that is chosen greedily if all other tokens are much less likely."""
    params = UnitSampling(temperature=0.0, turn_penalty=1.0, listen_first=0, **choices)  # type: ignore[arg-type]
    chooser = UnitChooser(IDS, params, forbidden=(), text=lambda tokens: "a" * len(tokens))
    row = torch.full((20,), -50.0)
    for token, logit in logits.items():
        row[token] = logit
    for _ in range(units):
        chooser.begin(listen=False, speak=speak)
    first = next_token(chooser, row)
    return next_token(chooser, row) if speak else first


@pytest.mark.parametrize(("scale", "expected"), [(1.0, WORD), (1.4, WORD), (1.6, IDS.listen), (0.0, WORD)])
def test_the_logit_of_listening_is_scaled(scale: float, expected: int) -> None:
    assert chosen({WORD: 3.0, IDS.listen: 2.0}, listen_scale=scale) == expected


def test_where_listening_has_a_logit_below_zero_then_a_smaller_scale_makes_it_likelier() -> None:
    logits = {WORD: -1.0, IDS.listen: -2.0}
    assert chosen(logits, listen_scale=1.0) == WORD
    assert chosen(logits, listen_scale=0.4) == IDS.listen


@pytest.mark.parametrize(("ranks", "expected"), [(0, WORD), (1, WORD), (2, WORD), (3, IDS.listen)])
def test_the_model_listens_where_that_is_among_so_many_likeliest_tokens(ranks: int, expected: int) -> None:
    assert chosen({WORD: 3.0, 16: 2.0, IDS.listen: 1.0}, listen_top_k=ranks) == expected


def test_when_the_model_has_to_speak_then_listening_is_not_chosen_for_its_rank_or_scale() -> None:
    assert chosen({WORD: 3.0, IDS.listen: 9.0}, speak=True, listen_top_k=1000, listen_scale=0.0) == WORD


def released_probabilities(logits: torch.Tensor, params: UnitSampling) -> torch.Tensor:
    """Return the released code's probabilities of a unit's second token, float64 [vocabulary]."""
    over = torch.softmax(logits.double(), 0)[IDS.chunk_eos]
    shaped = logits.double().clone()
    end = shaped[IDS.turn_eos]
    shaped[IDS.turn_eos] = end / params.turn_penalty if end > 0 else end * params.turn_penalty
    shaped /= params.temperature
    if params.top_k:
        shaped[shaped < shaped.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p:
        values, order = shaped.sort(descending=True)
        before = torch.softmax(values, 0).cumsum(0)
        shaped[order[1:][before[:-1] > params.top_p]] = -torch.inf
    words = torch.softmax(shaped, 0) * (1 - over)
    words[IDS.chunk_eos] += over
    return words


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Return the statistic over all possible outcomes, and the threshold that about one in 10,000 seeds exceeds."""
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    degrees = int(possible.sum()) - 1
    return float(((counts[possible] - expected) ** 2 / expected).sum()), degrees + 4 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize(
    "params",
    [
        UnitSampling(repetition_penalty=1.0),
        UnitSampling(repetition_penalty=1.0, temperature=1.3, top_k=0, top_p=0.6),
        UnitSampling(repetition_penalty=1.0, top_k=5, top_p=0.0),
        UnitSampling(repetition_penalty=1.0, top_k=0, top_p=0.0),
    ],
)
def test_words_are_drawn_as_often_as_the_released_code_draws_them(params: UnitSampling) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 2
    chooser = UnitChooser(IDS, replace(params, seed=4), forbidden=(), text=lambda _: "")
    counts = torch.zeros(20, dtype=torch.float64)
    for _ in range(4000):
        chooser.chosen, chooser.in_turn = [IDS.speak], False
        counts[next_token(chooser, logits)] += 1
    found, most = chi_square(counts, released_probabilities(logits, params))
    assert found < most


def test_codes_are_drawn_as_often_as_the_released_code_draws_them() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5)) * 2
    logits[-1] = 0.0
    before, often, last = logits.topk(3).indices.tolist()
    chooser = CodeChooser(0.8, 1.2, min_codes=25, random=numbers(6))
    counts = torch.zeros(30, dtype=torch.float64)
    for _ in range(4000):
        # The penalty applies to the last 16 codes. The end is not allowed yet.
        chooser.codes = [before, *([often] * 10), *([last] * 6)]
        counts[next_token(chooser, logits)] += 1
    shaped = logits.double() / 0.8
    for code, times in ((last, 6), (often, 10)):
        shaped[code] = shaped[code] * 1.2**times if shaped[code] < 0 else shaped[code] / 1.2**times
    shaped[-1] = -torch.inf
    found, most = chi_square(counts, torch.softmax(shaped, 0))
    assert found < most


def test_each_token_takes_two_random_numbers_and_each_code_one() -> None:
    logits = torch.zeros(1, 20)
    unit, random = UnitChooser(IDS, UnitSampling(listen_first=0, seed=1), (), lambda _: ""), numbers(1)
    UnitChooser.choose([unit], logits)
    code = CodeChooser(1.0, 1.0, 0, random)
    # A choice that is not accepted takes none.
    code.choose([code], logits)
    next_token(code, logits[0])
    expected = numbers(1).take(3)
    assert unit.random.take(1) == expected[2:]
    assert random.take(1) == expected[1:2]


@pytest.mark.parametrize("token", [WORD, IDS.chunk_eos])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_numbers_fail_by_name(temperature: float, token: int) -> None:
    row = torch.zeros(20)
    row[token] = torch.nan
    unit = UnitChooser(IDS, UnitSampling(temperature=temperature, listen_first=0), (), lambda _: "")
    code = CodeChooser(1.0, 1.0, 0, numbers(1), greedy=temperature == 0)
    for chooser in (unit, code):
        with pytest.raises(ModelError, match="the model's output is not a number"):
            next_token(chooser, row)


def some_params(chance: random.Random, seed: int) -> UnitSampling:
    return UnitSampling(
        temperature=chance.choice((0.0, 0.7, 1.3)),
        top_k=chance.choice((0, 1, 4)),
        top_p=chance.choice((0.0, 0.6, 0.9)),
        repetition_penalty=chance.choice((1.0, 1.05, 2.0)),
        turn_penalty=chance.choice((1.0, 1.1, 0.5)),
        listen_scale=chance.choice((1.0, 0.3, 1.7)),
        listen_top_k=chance.choice((0, 0, 2)),
        listen_first=chance.choice((0, 2)),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(30))
def test_tokens_of_conversations_together_are_those_of_each_alone_by_the_released_rules(seed: int) -> None:
    chance, noise = random.Random(seed), torch.Generator().manual_seed(seed)

    def text(tokens: list[int]) -> str:
        return "abcd" * len(tokens)

    made = [some_params(chance, seed * 10 + i) for i in range(4)]
    together = [UnitChooser(IDS, p, (16, 17), text) for p in made]
    alone = [ReferenceUnitChooser(IDS, p, (16, 17), text) for p in made]
    for _ in range(60):
        # Some choosers begin a unit, and some are not in this step.
        present = [i for i in range(4) if chance.random() < 0.8]
        for i in present:
            if not alone[i].chosen or alone[i].chosen[-1] in IDS.terminators or chance.random() < 0.05:
                listen, speak = chance.random() < 0.2, chance.random() < 0.3
                assert together[i].begin(listen=listen, speak=speak) == alone[i].begin(listen=listen, speak=speak)
        logits = torch.randn(len(present), 20, generator=noise) * 2
        before = logits.clone()
        chosen = UnitChooser.choose([together[i] for i in present], logits).tolist() if present else []
        assert torch.equal(logits, before)
        assert [together[i].accept(c) for i, c in zip(present, chosen, strict=True)] == [
            alone[i](row) for i, row in zip(present, logits, strict=True)
        ]
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.chosen, ours.in_turn, ours.recent) == (theirs.chosen, theirs.in_turn, theirs.recent)


@pytest.mark.parametrize("seed", range(10))
def test_codes_of_conversations_together_are_those_of_each_alone_by_the_released_rules(seed: int) -> None:
    chance, noise = random.Random(seed), torch.Generator().manual_seed(seed)

    def made(kind: type[Any]) -> list[Any]:
        own = random.Random(seed)
        return [
            kind(own.choice((0.5, 0.8)), own.choice((1.0, 1.2)), own.choice((0, 9)), numbers(i), window=5)
            for i in range(4)
        ]

    together, alone = made(CodeChooser), made(ReferenceCodeChooser)
    for _ in range(25):
        present = [i for i in range(4) if chance.random() < 0.8]
        logits = torch.randn(len(present), 9, generator=noise)
        chosen = CodeChooser.choose([together[i] for i in present], logits).tolist() if present else []
        assert [together[i].accept(c) for i, c in zip(present, chosen, strict=True)] == [
            alone[i](row) for i, row in zip(present, logits, strict=True)
        ]


@pytest.mark.parametrize("kind", ["unit", "code"])
def test_choosing_has_as_many_operators_for_64_conversations_as_for_one_and_reads_nothing(kind: str) -> None:
    def choosers(count: int) -> list[Any]:
        if kind == "code":
            return [CodeChooser(0.8, 1.05, 9, numbers(i), codes=[1, 2, 2]) for i in range(count)]
        made = [UnitChooser(IDS, UnitSampling(seed=i), (16, 17), lambda _: "") for i in range(count)]
        for i, chooser in enumerate(made):
            chooser.recent.extend(range(14, 16 + i % 4))
        return made

    # Tensors on the meta device have no values, so reading them on the host raises.
    device = torch.device("meta")
    lists = list[list[str]]()
    for count in (1, 64):
        some, logits = choosers(count), torch.empty(count, 20, device=device)
        # The first call draws random numbers ahead, and copies the parameters.
        some[0].choose(some, logits)
        with Operators() as operators:
            assert some[0].choose(some, logits).shape == (count,)
        lists.append(operators.names)
    assert lists[0] == lists[1]
    assert len(lists[0]) < 80
