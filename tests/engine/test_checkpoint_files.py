"""How much of a checkpoint is loaded is reported once a second, and not at all if it takes less."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from antiphon.engine import checkpoint_files
from antiphon.engine.checkpoint_files import LoadingProgress
from antiphon.engine.local.weights import load_whole
from tests.engine.local import tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_there_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    with LoadingProgress("large", 4_000_000_000, clock) as progress:
        for _ in range(8):
            clock.now += 0.5
            progress.advance(5e8)
    assert [record.getMessage() for record in caplog.records] == [
        f"loading large: {done}.00 of 4.00 GB" for done in (1, 2, 3, 4)
    ]


def test_what_takes_less_than_a_second_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LoadingProgress("small", 4_000_000_000, lambda: 0.0) as progress:
        progress.advance(4e9)
    assert caplog.records == []


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, terminal = Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingProgress("large", 4_000_000_000, clock) as progress:
        clock.now = 2.0
        progress.advance(1e9)
    assert "large" in terminal.getvalue()
    assert "1.0/4.0 GB" in terminal.getvalue()
    assert caplog.records == []


@pytest.mark.slow
def test_what_transformers_loads_is_counted_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model("qwen3").save_pretrained(tmp_path)
    counted = list[float]()
    monkeypatch.setattr(LoadingProgress, "advance", lambda self, size: counted.append(size))
    load_whole(AutoModelForCausalLM, tmp_path)
    (file,) = checkpoint_files.checkpoint_files(tmp_path)
    assert sum(counted) == pytest.approx(file.stat().st_size)
    assert len(counted) > 10
