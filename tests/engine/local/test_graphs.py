"""The graphs of a part of a model: one that fails leaves the part without graphs, and says so once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from antiphon.engine.local.kernels import graphs
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs, agree, power_of_two, warmed_sizes

CPU = torch.device("cpu")


def test_a_capture_that_fails_is_logged_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[Any]()

    def failing(function: Any, device: Any, memory: Any) -> Any:
        asked.append(memory)
        raise RuntimeError("a replay of its graph gives other numbers")

    monkeypatch.setattr(graphs, "capture", failing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    part = Graphs("frames of codes")
    with caplog.at_level(logging.WARNING):
        assert [part.capture(lambda: None, CPU) for _ in range(3)] == [None] * 3
    assert asked == ["pool"]
    assert caplog.messages == [
        "frames of codes are not captured as CUDA graphs: a replay of its graph gives other numbers"
    ]


def test_the_graphs_of_a_part_share_memory_and_a_disabled_part_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(9))
    monkeypatch.setattr(graphs, "capture", lambda function, device, memory: (memory, function()))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(handles)}")
    part: Any = Graphs("decode steps")
    assert [part.capture(lambda: 7, CPU) for _ in range(2)] == [("pool 0", 7)] * 2
    assert Graphs("decode steps", enabled=False).capture(lambda: 7, CPU) is None


def test_a_captured_pass_is_replayed_and_another_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    class Pass(CapturedPass[list[int]]):
        runs = 0

        def compute(self) -> list[int]:
            self.runs += 1
            return [self.runs]

    graph = Graph()
    monkeypatch.setattr(graphs, "capture", lambda function, device, memory: (graph, function()))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    captured, run = Pass(), Pass()
    assert captured.capture(Graphs("passes"), CPU)
    assert not run.capture(Graphs("passes", enabled=False), CPU)
    assert [captured.result(), captured.result()] == [[1], [1]]
    assert (captured.runs, graph.replays) == (1, 2)
    assert [run.result(), run.result()] == [[1], [2]]


def test_results_agree_up_to_rounding_and_integers_are_not_compared() -> None:
    numbers = torch.tensor([1.0, -40.0, torch.nan])
    assert agree((numbers + 0.5, torch.tensor([1]), None), (numbers, torch.tensor([2]), None))
    assert not agree(numbers + 5, numbers)
    assert not agree(torch.tensor([1.0, torch.nan, torch.nan]), numbers)


def test_sizes_are_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert warmed_sizes() == [1, 2, 4, 8, 16, 32, 64]
    assert warmed_sizes(5) == [1, 2, 4]
