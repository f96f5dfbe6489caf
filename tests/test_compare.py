"""The figures that `make compare` compares: which direction of each is better, and what counts as a regression."""

from __future__ import annotations

from typing import Any

import pytest
from bench.compare import better_if, fell


@pytest.mark.parametrize(
    ("figure", "better"),
    [
        ("engine / decode / 4 / tokens_per_s", "more"),
        ("talk / latency / sound_p95_s", "less"),
        ("asr / latency / wer", "less"),
        ("talk / turns", ""),
        ("tts / first_s (median)", "less"),
    ],
)
def test_a_figures_name_says_which_way_is_better(figure: str, better: str) -> None:
    assert better_if(figure) == better


def row(before: float, after: float, apart: bool = True) -> dict[str, Any]:
    return {"base": {"median": before}, "head": {"median": after}, "apart": apart}


def test_a_figure_fell_where_it_is_worse_by_more_than_noise() -> None:
    assert fell("x / final_p95", row(1.0, 1.2))
    assert not fell("x / final_p95", row(1.0, 0.8))
    assert not fell("x / final_p95", row(1.0, 1.2, apart=False))
    assert fell("x / tokens_per_s", row(100, 90))
    assert not fell("x / turns", row(100, 90))
