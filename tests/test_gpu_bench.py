"""The GPU benchmark's dry run: every section with tiny models, and the results after a failure and a second run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from bench.gpu.report import Figure, Report, beside
from bench.gpu.suite import SECTIONS, Plan, Recorder, Section, run

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[1]


def measure(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run bench/gpu.sh as a user does, with its results in a folder."""
    command = [str(ROOT / "bench" / "gpu.sh"), "--dry-run", "--out", str(folder), *flags]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def results(folder: Path) -> dict[str, Any]:
    """Return the sections of gpu.json."""
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())["sections"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of one dry run of all sections."""
    folder = tmp_path_factory.mktemp("gpu")
    done = measure(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_measures_finite_figures_above_zero(folder: Path, name: str) -> None:
    section = results(folder)[name]
    assert section["status"] == "measured", section
    if name == "vllm" and not section["figures"]:
        assert section["notes"] == ["vLLM is not installed"]
        return
    assert section["figures"]
    counts = {"missed units", "numbers read on the host", "tokens that differ from the CPU's"}
    counts |= {"audio apart, at most", "texts with other audio"}
    for figure in section["figures"]:
        assert figure["value"] is not None, figure
        assert math.isfinite(figure["value"]), figure
        assert figure["value"] > 0 or (figure["value"] == 0 and figure["measure"] in counts), figure


def check_table(folder: Path) -> None:
    """Check that each figure of gpu.json is in the table of gpu.txt."""
    table = (folder / "gpu.txt").read_text()
    for name, section in results(folder).items():
        assert f"## {name}" in table
        for figure in section["figures"]:
            assert any(figure["model"] in line and figure["measure"] in line and figure["load"] in line
                       for line in table.splitlines())  # fmt: skip


@pytest.mark.heavy
def test_the_table_has_every_figure(folder: Path) -> None:
    check_table(folder)


@pytest.mark.heavy
def test_a_section_is_measured_and_has_its_figures_in_the_table(tmp_path: Path) -> None:
    done = measure(tmp_path, "--only", "agreement")
    assert done.returncode == 0, done.stdout + done.stderr
    (section,) = results(tmp_path).values()
    assert section["status"] == "measured"
    assert section["figures"]
    check_table(tmp_path)


@pytest.mark.heavy
def test_a_second_run_measures_only_what_is_named(folder: Path) -> None:
    before = results(folder)
    assert measure(folder).stdout == "", "all was measured: nothing is left"
    assert results(folder) == before
    done = measure(folder, "--only", "lm")
    assert done.returncode == 0, done.stdout + done.stderr
    after = results(folder)
    assert {name: after[name] for name in after if name != "lm"} == {n: before[n] for n in before if n != "lm"}
    assert after["lm"]["figures"] != before["lm"]["figures"]
    assert [f["load"] for f in after["lm"]["figures"]] == [f["load"] for f in before["lm"]["figures"]]


def sound(plan: Plan, recorder: Recorder) -> None:
    """A section that succeeds."""
    recorder.figure("model", "first token p50", "1 session", 7.0, "ms")


def broken(plan: Plan, recorder: Recorder) -> None:
    """A section that fails after a figure."""
    recorder.figure("model", "first token p50", "1 session", 8.0, "ms")
    raise MemoryError("no room")


def half_broken(plan: Plan, recorder: Recorder) -> None:
    """A section with one part that fails."""
    with recorder.part("one"):
        raise ValueError("no such shape")
    with recorder.part("two"):
        recorder.figure("model", "first token p50", "1 session", 9.0, "ms")


def gone(plan: Plan, recorder: Recorder) -> None:
    """A section whose process is killed."""
    recorder.figure("model", "first token p50", "1 session", 10.0, "ms")
    os._exit(9)


def endless(plan: Plan, recorder: Recorder) -> None:
    """A section that exceeds its time limit."""
    recorder.figure("model", "first token p50", "1 session", 11.0, "ms")
    threading.Event().wait()


def test_a_section_that_fails_leaves_what_was_measured(tmp_path: Path) -> None:
    names = ["sound", "broken", "half_broken", "gone", "endless"]
    sections = {name: Section(f"{__name__}:{name}", 1.0, name) for name in names}
    report = Report(tmp_path, dry=True, engine={})
    assert not run(names[:-1], report, minutes=2, sections=sections)
    assert not run(names[-1:], report, minutes=0.05, sections=sections)
    found = results(tmp_path)
    assert [(name, s["status"], [f["value"] for f in s["figures"]]) for name, s in found.items()] == [
        ("sound", "measured", [7.0]),
        ("broken", "failed", [8.0]),
        ("half_broken", "failed", [9.0]),
        ("gone", "failed", [10.0]),
        ("endless", "out of time", [11.0]),
    ]
    assert "MemoryError: no room" in found["broken"]["error"]
    assert found["half_broken"]["notes"] == ["one failed: ValueError: no such shape"]
    assert [name for name in sections if Report(tmp_path, dry=True, engine={}).measured(name)] == ["sound"]


def test_figures_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    Report(tmp_path, dry=True, engine={}).begin("lm")
    with pytest.raises(ValueError, match="dry_run"):
        Report(tmp_path, dry=False, engine={})
    with pytest.raises(ValueError, match="engine"):
        Report(tmp_path, dry=True, engine={"prefill_rows": 7})


def test_what_others_publish_stands_beside_the_same_load() -> None:
    assert "vLLM-Omni 724" in beside(Figure("Qwen3-TTS 0.6B", "first sound p50", "64 texts", 150.0, "ms"))
    assert "SGLang" in beside(Figure("Qwen3-8B", "first token p50", "1 session, 45k rows, paged KV", 90.0, "ms"))
    assert beside(Figure("Qwen3-8B", "first token p50", "16 sessions, 45k rows, paged KV", 90.0, "ms")) == ""
    assert beside(Figure("Qwen3-TTS 0.6B", "first sound p95", "64 texts", 150.0, "ms")) == ""
