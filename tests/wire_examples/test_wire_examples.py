"""The examples of docs/wire are what the server does: README.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire_examples.reading import PAGES, examples

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
EXAMPLES = examples()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is not as shown: all examples are played in one process, whose clocks are virtual."""
    folder = tmp_path_factory.mktemp("played")
    command = [sys.executable, "-m", "tests.wire_examples.play", str(folder)]
    # A home of its own: no voice that somebody uploaded on this machine is in the answers.
    environment = os.environ | {"HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", [example.name for example in EXAMPLES])
def test_the_server_does_what_the_example_shows(name: str, played: Path) -> None:
    assert (played / f"{name}.jsonl").exists()
    failed = played / f"{name}.error"
    if failed.exists():
        pytest.fail(failed.read_text(encoding="utf-8"), pytrace=False)


# tests/server/wyoming plays Wyoming, because the examples are played over HTTP and WebSockets.
@pytest.mark.parametrize("page", sorted({page.name for page in PAGES.glob("*.md")} - {"wyoming.md"}))
def test_each_page_has_an_example(page: str) -> None:
    assert [example for example in EXAMPLES if example.page == page]
