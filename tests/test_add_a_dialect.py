"""The example of docs/add-a-dialect.md works as written: a server runs a copy of the package with it.

A block of the page whose first line is `# path` is the content of that file. The block for the table of dialects is a
line of the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from antiphon.server.drain import drain
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from tests.server.wyoming.harness import port

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add-a-dialect.md"
TABLE = "src/antiphon/protocols/dialects.py"
FOLDER = "src/antiphon/protocols/captions"
SCENARIO = "tests/traces/scenarios/captions.py"
SCENARIOS = "tests/traces/scenarios/__init__.py"
LISTENER = "src/antiphon/server/voice_lines.py"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_is_one_folder_and_one_line_and_its_client_gets_captions(tmp_path: Path) -> None:
    files = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    line, scenario_line = files.pop(TABLE), files.pop(SCENARIOS)
    files.pop(LISTENER)
    assert {str(Path(path).parent) for path in files if path != SCENARIO} == {FOLDER}
    shutil.copytree(ROOT / "src" / "antiphon", tmp_path / "src" / "antiphon")
    shutil.copytree(ROOT / "tests" / "traces", tmp_path / "tests" / "traces")
    for path in ("pyproject.toml", "tests/__init__.py"):
        shutil.copy(ROOT / path, tmp_path / path)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    table = tmp_path / TABLE
    before = table.read_text(encoding="utf-8")
    table.write_text(before.replace('    "negotiation",\n', line + '    "negotiation",\n'), encoding="utf-8")
    scenarios = tmp_path / SCENARIOS
    listed = scenarios.read_text(encoding="utf-8")
    scenarios.write_text(listed.replace("_NAMES = (\n", "_NAMES = (\n" + scenario_line), encoding="utf-8")
    run(tmp_path, "ruff", "check", *files)
    run(tmp_path, "ruff", "format", "--check", *files)
    out = tmp_path / "played"
    out.mkdir()
    run(tmp_path, "tests.traces.play", str(out), "captions")
    assert not (out / "captions.error").exists(), (out / "captions.error").read_text(encoding="utf-8")
    sent = [json.loads(row) for row in (out / "captions.jsonl").read_text(encoding="utf-8").splitlines()]
    captions = [row["text"] for row in sent if row.get("from") == "server" and row.get("type") == "caption"]
    assert captions == ["hello.", "tell me a story."]


def test_the_example_of_a_listener_answers_and_drains() -> None:
    own: dict[str, Any] = {}
    exec(dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))[LISTENER], own)

    async def main() -> None:
        async with port() as served:
            # The example is added before the listeners are served.
            state = ServerState(served.state.settings, Metrics(), served.state.models)
            own["open_voice_lines"](state, "127.0.0.1:0")
            async with anyio.create_task_group() as group:
                await group.start(state.listeners.serve)
                reader, writer = await asyncio.open_connection("127.0.0.1", state.listeners.ports["voice_lines"])
                writer.write(b"\n\n")
                assert [await reader.readline() for _ in range(2)] == [b"one\n", b"zwei\n"]
                await drain(state, 1.0)
                assert await reader.read() == b""
                writer.close()

    asyncio.run(main())


def test_the_page_has_no_other_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == text.count("```python")
