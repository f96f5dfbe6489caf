"""The tests that `make quick` selects for a change."""

from __future__ import annotations

from tests.affected import affected

SOURCES = {
    "src/antiphon/turns/floor.py": "from antiphon.audio import Pcm",
    "src/antiphon/sessions/session.py": "from antiphon.turns import floor",
    "src/antiphon/server/app.py": "import antiphon.sessions.session",
    "tests/turns/test_overlap.py": "import pytest",
    "tests/sessions/test_session.py": "from antiphon.sessions.session import Session",
    "tests/server/test_app.py": "from antiphon.server import app",
    "tests/audio/test_audio.py": "from antiphon.audio import Pcm",
    "tests/helper.py": "from antiphon.turns.floor import Floor",
    "tests/text/test_text.py": "from tests.helper import Helper",
}


def test_a_change_affects_its_folder_its_importers_and_their_tests() -> None:
    assert affected(["src/antiphon/turns/floor.py"], SOURCES) == [
        "tests/sessions/test_session.py",
        "tests/text/test_text.py",
        "tests/turns/test_overlap.py",
    ]


def test_a_changed_test_affects_itself_alone() -> None:
    assert affected(["tests/audio/test_audio.py"], SOURCES) == ["tests/audio/test_audio.py"]


def test_a_page_affects_no_module() -> None:
    assert affected(["docs/use.md"], SOURCES) == []
