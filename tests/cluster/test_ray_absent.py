"""Without Ray, which the tests' environment does not have, the first thing that a start says is what to install."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_start_says_what_to_install() -> None:
    command = [sys.executable, "-m", "antiphon", "serve", "--ray", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install '.[ray]'" in done.stderr
    assert "Traceback" not in done.stderr
