"""Every dialect's wire, compared frame by frame with its recording: see README.md.

With `ANTIPHON_TEST_TRACES=write`, the traces are recorded again instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.traces.harness import SCENARIOS
from tests.traces.scenarios import ALL

RECORDED = Path(__file__).parent / "recorded"
ROOT = Path(__file__).parents[2]
LIMIT_S = 120
# Number of frames that are printed before the first one that differs.
CONTEXT = 3
MAX_LINE = 1_000
assert ALL


def play(folder: Path, *names: str, environment: dict[str, str] | None = None) -> None:
    """Play scenarios in a separate process with a virtual clock."""
    command = [sys.executable, "-m", "tests.traces.play", str(folder), *names]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        # A new home, so that no uploaded voice of this machine appears in the traces.
        env=os.environ | {"HOME": str(folder / "home")} | (environment or {}),
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the traces of all scenarios, played once."""
    folder = tmp_path_factory.mktemp("played")
    play(folder)
    return folder


def difference(recorded: list[str], played: list[str]) -> str:
    """Return a description of the first frame that differs, after the frames before it."""
    same = next((i for i, (a, b) in enumerate(zip(recorded, played, strict=False)) if a != b), None)
    at = min(len(recorded), len(played)) if same is None else same
    lines = [f"frame {at + 1} differs (of {len(recorded)} recorded, {len(played)} played):"]
    lines += [f"    {line[:MAX_LINE]}" for line in recorded[max(0, at - CONTEXT) : at]]
    lines += _fields(recorded[at : at + 1], played[at : at + 1])
    return "\n".join(lines)


def _fields(recorded: list[str], played: list[str]) -> list[str]:
    """Return a frame as recorded (-) and as played (+): first whole, then only the fields that differ."""
    out = [f"  {sign} {line[:MAX_LINE]}" for sign, lines in (("-", recorded), ("+", played)) for line in lines]
    if recorded and played:
        was, now = json.loads(recorded[0]), json.loads(played[0])
        for key in dict.fromkeys((*was, *now)):
            if was.get(key) != now.get(key):
                out.append(f"  {key}: {str(was.get(key))[:MAX_LINE]} -> {str(now.get(key))[:MAX_LINE]}")
    return out


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_wire_is_as_recorded(name: str, played: Path) -> None:
    trace = (played / f"{name}.jsonl").read_text(encoding="utf-8")
    failed = played / f"{name}.error"
    error = failed.read_text(encoding="utf-8") if failed.exists() else ""
    file = RECORDED / f"{name}.jsonl"
    if os.environ.get("ANTIPHON_TEST_TRACES") == "write" and not error:
        file.parent.mkdir(exist_ok=True)
        file.write_text(trace, encoding="utf-8")
    recorded = file.read_text(encoding="utf-8") if file.exists() else ""
    if trace != recorded:
        pytest.fail(f"{name}: {difference(recorded.splitlines(), trace.splitlines())}\n{error}", pytrace=False)
    assert not error, error


def test_each_trace_has_its_scenario() -> None:
    assert {file.stem for file in RECORDED.glob("*.jsonl")} == set(SCENARIOS)
