"""A server with two keys, and a home of its own for what they upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.settings import ModelSettings
from tests.conftest import SMALL, VOICE, Process, Serve


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of `two_keys`, with the models of the user's own."""
    home = tmp_path_factory.mktemp("two-keys")
    own = Path(ModelSettings().home).expanduser()
    for folder in ("models", "prepared"):
        (own / folder).mkdir(parents=True, exist_ok=True)
        (home / folder).symlink_to(own / folder)
    return home


@pytest.fixture(scope="session")
def two_keys(serve: Serve, home: Path) -> Process:
    """A server with a language model and a voice, whose keys are `alice` and `bob`."""
    models = ("--language-model", SMALL, "--synthesizer", VOICE, "--home", str(home))
    return serve(*models, "--api-key", "alice", "--api-key", "bob", "--sessions-per-key", "3", "--voices-per-key", "3")
