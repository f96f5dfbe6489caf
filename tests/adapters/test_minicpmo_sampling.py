"""Which token a unit of MiniCPM-o begins with, by the session's own choices."""

from __future__ import annotations

import pytest
import torch

from antiphon.adapters.minicpmo.sampling import SpecialTokens, UnitChooser, UnitSampling

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
