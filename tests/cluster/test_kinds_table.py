"""What each kind of session loses with its host: docs/design/hosts.md says it, and a test shows it."""

from __future__ import annotations

from pathlib import Path

from antiphon.protocols.connection import Resume
from antiphon.protocols.dialects import DIALECTS
from tests.cluster.kinds import KINDS, LOST, table
from tests.cluster.test_all_kinds import CLIENTS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "hosts.md"


def test_the_page_has_the_table_of_the_tests() -> None:
    """If this fails, replace the table by the output of `python -m tests.cluster.kinds`."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_dialect_says_whether_its_sessions_outlive_their_host() -> None:
    for dialect in DIALECTS:
        kinds = [kind for kind in KINDS if dialect.name in kind.dialects]
        assert kinds, f"{dialect.name} is in no row of tests/cluster/kinds.py"
        assert all((kind.lost == LOST) is (dialect.resume is Resume.NEVER) for kind in kinds), dialect.name


def test_every_kind_that_outlives_its_host_has_a_test_that_loses_the_host() -> None:
    for kind in KINDS:
        assert bool(kind.tests) is not kind.lost.startswith("the ")
        for name in kind.tests:
            text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
            assert any(word in text for word in ("SIGKILL", "kill", "dies(")), name


def test_every_kind_that_outlives_its_host_has_a_client_while_all_hosts_are_replaced() -> None:
    """`door/test_telephone` drains the hosts of a telephone call."""
    assert {*CLIENTS, "native model", "telephone call, at a door"} == {
        kind.name for kind in KINDS if not kind.lost.startswith("the ")
    }
