"""The examples of docs/add-a-model.md work as written, each in a copy of the package.

A block of the page whose first line is `# path` is the content of that file. A block for the table of adapters is a
line of the table.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add-a-model.md"
TABLE = "src/antiphon/adapters/__init__.py"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = ("keypad", "base_lm")


def blocks(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the files of an example by their paths, and its lines of the table of adapters."""
    found = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    files = {path: text for path, text in found if f"/{name}/" in path or path.endswith(f"/test_{name}.py")}
    return files, [text for path, text in found if path == TABLE and f'"{name}"' in text]


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_one_folder_and_one_line_and_its_test_passes(name: str, tmp_path: Path) -> None:
    files, (line,) = blocks(name)
    assert {str(Path(path).parent) for path in files} == {f"src/antiphon/adapters/{name}", "tests/adapters"}
    assert line == f'    "{name}",\n'
    shutil.copytree(ROOT / "src" / "antiphon", tmp_path / "src" / "antiphon")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    table = tmp_path / TABLE
    table.write_text(re.sub(r"(?ms)^(ADAPTERS = \(\n.*?)(^\)$)", rf"\1{line}\2", table.read_text(encoding="utf-8")))
    run(tmp_path, "pytest", "-p", "no:cacheprovider", f"tests/adapters/test_{name}.py")
    run(tmp_path, "ruff", "format", "--check", *files)
    run(tmp_path, "ruff", "check", *files)


def test_the_page_has_no_other_code() -> None:
    known = {path for name in EXAMPLES for path in blocks(name)[0]} | {TABLE}
    assert {path for path, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))} == known
    assert len(BLOCK.findall(PAGE.read_text(encoding="utf-8"))) == PAGE.read_text(encoding="utf-8").count("```python")
