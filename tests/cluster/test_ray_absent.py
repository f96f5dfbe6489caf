"""Without Ray, which the tests' environment does not have, the first thing that a start says is what to install."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.forking import run


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_start_says_what_to_install() -> None:
    done = run("antiphon", "serve", "--ray", "--port", "0")
    assert done.returncode == 2
    assert "pip install '.[ray]'" in done.stderr
    assert "Traceback" not in done.stderr
