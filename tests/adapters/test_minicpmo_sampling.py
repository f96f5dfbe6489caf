"""Which tokens and codes MiniCPM-o chooses, and how often, by the session's own choices."""

from __future__ import annotations

import pytest
import torch

from antiphon.adapters.minicpmo.sampling import CodeChooser, SpecialTokens, UnitChooser, UnitSampling
from antiphon.errors import ModelError

# Special tokens are 0 to 12, words 13 to 19.
IDS = SpecialTokens(*range(13))
WORD = 15


def chosen(logits: dict[int, float], *, speak: bool = False, units: int = 1, **choices: float) -> int:
    """The first word that is chosen greedily where all other tokens are much less likely."""
    params = UnitSampling(temperature=0.0, turn_penalty=1.0, listen_first=0, **choices)  # type: ignore[arg-type]
    chooser = UnitChooser(IDS, params, forbidden=(), text=lambda tokens: "a" * len(tokens))
    row = torch.full((20,), -50.0)
    for token, logit in logits.items():
        row[token] = logit
    for _ in range(units):
        chooser.begin(listen=False, speak=speak)
    first = chooser(row)
    return chooser(row) if speak else first


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
    """How likely the second token of a unit is, float64 [vocabulary], as the released code filters and draws."""
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
    """The statistic over all outcomes that are possible, and what one in some 10,000 seeds exceeds."""
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
    chooser = UnitChooser(IDS, params, forbidden=(), text=lambda _: "", random=torch.Generator().manual_seed(4))
    counts = torch.zeros(20, dtype=torch.float64)
    for _ in range(4000):
        chooser.chosen, chooser.in_turn = [IDS.speak], False
        counts[chooser(logits)] += 1
    found, most = chi_square(counts, released_probabilities(logits, params))
    assert found < most


def test_codes_are_drawn_as_often_as_the_released_code_draws_them() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5)) * 2
    logits[-1] = 0.0
    before, often, last = logits.topk(3).indices.tolist()
    chooser = CodeChooser(0.8, 1.2, min_codes=25, random=torch.Generator().manual_seed(6))
    counts = torch.zeros(30, dtype=torch.float64)
    for _ in range(4000):
        # The last 16 codes count. The end may not come yet.
        chooser.codes = [before, *([often] * 10), *([last] * 6)]
        counts[chooser(logits)] += 1
    shaped = logits.double() / 0.8
    for code, times in ((last, 6), (often, 10)):
        shaped[code] = shaped[code] * 1.2**times if shaped[code] < 0 else shaped[code] / 1.2**times
    shaped[-1] = -torch.inf
    found, most = chi_square(counts, torch.softmax(shaped, 0))
    assert found < most


def test_each_token_takes_two_random_numbers_and_each_code_one() -> None:
    logits = torch.zeros(20)
    random = torch.Generator().manual_seed(1)
    UnitChooser(IDS, UnitSampling(listen_first=0), (), lambda _: "", random)(logits)
    CodeChooser(1.0, 1.0, 0, random)(logits)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[3]
    assert torch.rand(1, generator=random, dtype=torch.float64) == expected


@pytest.mark.parametrize("token", [WORD, IDS.chunk_eos])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_numbers_fail_by_name(temperature: float, token: int) -> None:
    row = torch.zeros(20)
    row[token] = torch.nan
    unit = UnitChooser(IDS, UnitSampling(temperature=temperature, listen_first=0), (), lambda _: "")
    code = CodeChooser(1.0, 1.0, 0, torch.Generator(), greedy=temperature == 0)
    for chooser in (unit, code):
        with pytest.raises(ModelError, match="the model's output is not a number"):
            chooser(row)
