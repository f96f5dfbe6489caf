"""Bad model's servers of the attack benchmark, against a real server: the answer fails or ends, and by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Two classes, a tenth of their size: one that never ends, and one that is compressed.
MEASURE = """
import sys
sys.path[:0] = ["bench", "."]
from bench.hostile import model_server
found = model_server.measure(("--synthesizer", "none"), sys.stderr, quick=True, names=("calls", "gzip-line-breaks"))
for one in found.values():
    # Before its first word, or in it.
    assert one["answer"] in ("failed", "500 processing_error"), found
    assert 0 < one["health_alone_s"] and 0 < one["health_s"]
    assert one["rss_mb"]["after"] < one["rss_mb"]["before"] + 100, found
"""


@pytest.mark.heavy
@pytest.mark.server
def test_when_a_models_server_is_bad_then_its_answer_fails_and_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bad model's servers: /health" in done.stdout
