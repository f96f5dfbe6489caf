"""`antiphon bench attack` in its small form: what it measures is there, and is what was attacked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
@pytest.mark.server
def test_when_one_class_is_tried_then_each_figure_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "antiphon", "bench", "attack", "--quick", "--deaths", "0", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--classes", "bodies"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "attack.json").read_text())
    found = document["classes"]["bodies"]
    assert document["machine"]["cores"] > 0
    assert found["tried"] >= 6
    assert found["outcomes"]["415 invalid_value"] >= 2
    assert not {name for name in found["outcomes"] if name.startswith(("500", "closed 1011", "the attack"))}
    assert found["server_lived"]
    assert found["alone"]["lost"] == found["beside"]["lost"] == 0
    assert 0 < found["alone"]["p50_s"] <= found["alone"]["p95_s"]
    assert found["health_alone_s"]["worst"] > 0
    assert 0 < found["health_s"]["p99"] <= found["health_s"]["worst"]
    assert 0 < found["rss_mb"]["before"] <= found["rss_mb"]["peak"]
    assert "bodies: " in done.stdout
