"""Runs a script of this folder in Node, with a module of the browser's client and a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "src" / "antiphon" / "web" / "client"
NODE = shutil.which("node")
# Timeout in case Node hangs, in seconds.
LIMIT_S = 60
Reported = list[tuple[str, Any]]
needs_node = pytest.mark.skipif(not NODE, reason="Node is not on this machine")


def reported(script: str, module: str, url: str, steps: Sequence[Sequence[Any]]) -> Reported:
    """Run the steps, and return the events that the script prints. `url` is the server's, http://."""
    printed = run("--experimental-websocket", HERE / script, CLIENT / module, url, given=json.dumps(steps))
    return [tuple(json.loads(line)) for line in printed.splitlines()]


def run(*arguments: str | Path, given: str = "") -> str:
    """Run Node with these arguments and standard input, and return its standard output."""
    assert NODE
    command = [NODE, "--no-warnings", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
