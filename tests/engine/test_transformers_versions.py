"""The engine runs on every `transformers` that pyproject.toml allows: its tests run on the oldest one too.

The environment's own version is the newest. All other tests run on that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / "build" / "oldest-transformers"
PINS = (Path(__file__).parent / "oldest-transformers.txt").read_text(encoding="utf-8")
# The contract, tokens that are equal with every version, and sessions against full forwards of their rows. Of the last
# kind, only a plain family and one with windows and softcaps are tested, to save time.
TESTS = (
    "tests/engine/contract",
    "tests/engine/local/test_tokens.py",
    "tests/engine/local/test_engine.py::test_any_interleaving_equals_a_full_forward",
)


def test_the_range_is_from_the_pinned_oldest_to_the_installed_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.search(r"^transformers==(\d+)\.(\d+)", PINS, re.MULTILINE)
    assert oldest
    major, minor = version("transformers").split(".")[:2]
    assert (
        f"transformers>={oldest[1]}.{oldest[2]},<{major}.{int(minor) + 1}" in project["optional-dependencies"]["talk"]
    )


@pytest.mark.heavy
@pytest.mark.server
def test_the_engine_runs_on_the_oldest_transformers() -> None:
    if not OLDEST.is_dir():
        pytest.fail("there is no build/oldest-transformers: make build/oldest-transformers.stamp")
    path = os.pathsep.join([str(OLDEST), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The last line of the report is the version, so that a missing folder does not pass for a success.
    code = "import sys, pytest, importlib as i; status = pytest.main(sys.argv[1:]); "
    code += "print(i.import_module('transformers').__version__); sys.exit(status)"
    families = "not test_any_interleaving or qwen3 or gemma2"
    options = ["-q", "-m", "not server", "-k", families, "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-c", code, *options, *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert f"transformers=={run.stdout.split()[-1]}" in PINS, report
