"""`antiphon bench attack` in its short form: each class reaches what it attacks, and is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.hostile.__main__ import CLASSES
from bench.hostile.stages import STAGES

ROOT = Path(__file__).parents[2]
# Outcomes that each class has to have. They show that the server read its inputs, and refused or served them.
COMES_TO = {
    "bodies": "415 invalid_value",
    "door-paths": "404",
    "door-bodies": "404",
    "idle": "held",
    "first-frames": "accepted",
}


def attacked(name: str, out: Path) -> tuple[dict[str, Any], str]:
    """Run the short form of one class. Return its document and its printed output."""
    command = [sys.executable, "-m", "antiphon", "bench", "attack", "--quick", "--out", str(out)]
    done = subprocess.run([*command, "--classes", name], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "attack.json").read_text()), done.stdout


def test_every_stage_is_of_a_class() -> None:
    assert STAGES.keys() <= CLASSES.keys()


@pytest.mark.heavy
@pytest.mark.server
@pytest.mark.parametrize("name", CLASSES)
def test_when_a_class_is_tried_then_each_figure_is_measured_and_nothing_falls(tmp_path: Path, name: str) -> None:
    document, printed = attacked(name, tmp_path)
    found = document["classes"][name]
    assert document["machine"]["cores"] > 0
    assert found["tried"] >= 4
    assert found["outcomes"].get(COMES_TO.get(name, ""), 1) >= 1
    # A model whose server misbehaves is reported with this code.
    outcomes = found["outcomes"].keys() - {"500 processing_error"}
    assert not {reported for reported in outcomes if reported.startswith(("500", "closed 1011", "LEAK", "the attack"))}
    assert found["server_lived"]
    assert found["health_failed"] == 0
    assert found["alone"]["lost"] == found["beside"]["lost"] == 0
    assert 0 < found["alone"]["p50_s"] <= found["alone"]["p95_s"]
    assert 0 < found["beside"]["p50_s"] <= found["beside"]["p95_s"]
    assert found["health_alone_s"]["worst"] > 0
    assert 0 < found["health_s"]["p99"] <= found["health_s"]["worst"]
    assert 0 < found["rss_mb"]["before"] <= found["rss_mb"]["peak"]
    # One log line for each input would fill a disk.
    assert found["logged_bytes"] < 100_000
    assert f"{name}: " in printed
