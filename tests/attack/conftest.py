"""A server with two keys, with its own home for their uploads."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from antiphon.settings import ModelSettings
from tests.conftest import SMALL, VOICE, Process, Serve


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of `two_keys`, which has the models of the user's home."""
    home = tmp_path_factory.mktemp("two-keys")
    own = Path(ModelSettings().home).expanduser()
    for folder in ("models", "prepared"):
        (own / folder).mkdir(parents=True, exist_ok=True)
        (home / folder).symlink_to(own / folder)
    return home


@pytest.fixture(scope="session")
def two_keys(serve: Serve, home: Path) -> Process:
    """Return a server with a language model and a voice. Its two keys are `alice` and `bob`."""
    models = ("--language-model", SMALL, "--synthesizer", VOICE, "--home", str(home))
    limits = ("--sessions-per-key", "3", "--voices-per-key", "3")
    return serve(*models, "--api-key", "alice", "--api-key", "bob", *limits, keep=True)


class LoopLag:
    """The lags of a server process's event loop since this object was made, from the histogram in `/metrics`."""

    NAME = "antiphon_event_loop_lag_seconds"

    def __init__(self, server: Process) -> None:
        self._server = server
        self._before = self._counts()

    def within(self, limit_s: float) -> bool:
        """Return whether the lag never exceeded `limit_s`, which has to be the bound of a bucket."""
        now = self._counts()
        assert now["+Inf"] > self._before["+Inf"], "nothing was measured"
        longer = [counts["+Inf"] - counts[str(limit_s)] for counts in (self._before, now)]
        return longer[0] == longer[1]

    def __repr__(self) -> str:
        return f"lags up to each bound, now: {self._counts()}, before: {self._before}"

    def _counts(self) -> dict[str, float]:
        text = httpx.get(f"{self._server.url}/metrics", timeout=60).text
        found = re.findall(rf'{self.NAME}_bucket{{le="([^"]*)"}} (\S+)', text)
        return {bound: float(count) for bound, count in found}
