"""Figures that are watched: which way is better, what fell, and the history of releases by machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from compare import better_if, fell  # noqa: E402
from history import add, fallen, ordered  # noqa: E402

MACHINE = {"cpu": "A CPU", "cores": 2}


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


def test_the_history_of_a_machine_tells_what_fell_since_its_newest_release(tmp_path: Path) -> None:
    results, history = tmp_path / "results", tmp_path / "history"
    results.mkdir()

    def write(final_s: float, tokens_per_s: float, cpu: str = "A CPU") -> None:
        document = {"machine": MACHINE | {"cpu": cpu}, "final_s": final_s, "decode": {"tokens_per_s": tokens_per_s}}
        (results / "engine.json").write_text(json.dumps(document))

    write(1.0, 100.0)
    (file,) = add(results, history, "0.9.0")
    assert file.name == "a-cpu-2-cores.json"
    write(0.5, 200.0)
    add(results, history, "0.10.0")
    assert fallen(results, history) == []
    write(0.55, 190.0)
    assert fallen(results, history) == []
    write(0.7, 100.0)
    assert fallen(results, history) == [
        ("engine / final_s", "0.10.0", 0.5, 0.7),
        ("engine / decode / tokens_per_s", "0.10.0", 200.0, 100.0),
    ]
    write(9.0, 1.0, "another")
    assert fallen(results, history) == [], "another machine has no history"


def test_versions_are_ordered_as_numbers() -> None:
    assert sorted(["0.10.0", "0.9.1", "0.9"], key=ordered) == ["0.9", "0.9.1", "0.10.0"]
