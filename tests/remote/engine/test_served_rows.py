"""The rows of a session, and the server that holds their KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.engine.rows import Rows
from antiphon.remote.engine.endpoints import EngineEndpoint
from antiphon.remote.engine.served_rows import ServedRows
from antiphon.remote.engine.wires import HeldRows, Piece
from antiphon.remote.pool import Pool


class Server:
    """The part of an EngineServer that ServedRows uses. Records what is forgotten."""

    def __init__(self, *, has_sessions: bool = True, context_rows: int = 100) -> None:
        self.pool = Pool("language", [EngineEndpoint("http://a"), EngineEndpoint("http://b")])
        self.instance, self.context_rows = "x", context_rows
        self.wire = SimpleNamespace(has_sessions=has_sessions)
        self.forgotten: list[tuple[EngineEndpoint, HeldRows | None]] = []

    def forget(self, endpoint: EngineEndpoint, held: HeldRows | None) -> None:
        self.forgotten.append((endpoint, held))


def served(server: Any, count: int = 10) -> ServedRows:
    made = ServedRows(server, Rows(owner="me"), "salt")
    made.rows.append(tuple(range(count)))
    return made


def test_rows_stay_with_their_server_and_another_one_has_none_of_them() -> None:
    server = Server()
    rows = served(server)
    first = rows.bind()
    rows.rows.computed = 9
    assert rows.bind() is first
    assert (rows.rows.computed, first.sessions) == (9, 1)
    held = rows.held()
    second = rows.bind({first})
    assert second is not first
    assert (rows.rows.computed, first.sessions, second.sessions) == (0, 0, 1)
    assert server.forgotten == [(first, held)]
    assert rows.held() is not held


def test_when_it_ends_its_server_forgets_it_once() -> None:
    server = Server()
    rows = served(server)
    endpoint = rows.bind()
    rows.unbind()
    rows.unbind()
    assert server.forgotten == [(endpoint, None)]
    assert endpoint.sessions == 0


@pytest.mark.parametrize("has_sessions", [True, False])
def test_what_a_server_holds_is_noted_where_it_has_sessions(has_sessions: bool) -> None:
    rows = served(Server(has_sessions=has_sessions))
    held = rows.held()
    assert (held is not None) is has_sessions
    assert rows.held() is held


def test_a_full_context_is_cut_before_the_server_does_it() -> None:
    rows = served(Server(context_rows=20), 19)
    assert rows.fitting() == list(range(19))
    rows.add(19)
    fitting = rows.fitting()
    assert fitting[-1] == 19
    assert len(fitting) <= 15


def test_a_sampled_token_is_the_newest_row_and_those_before_it_are_computed() -> None:
    rows = served(Server())
    rows.add(42)
    assert rows.fitting()[-1] == 42
    assert rows.rows.computed == 10


def test_the_first_count_of_cached_rows_counts() -> None:
    rows = served(Server())
    rows.note(Piece((1,)))
    assert rows.cached is None
    rows.note(Piece((), cached_tokens=3))
    rows.note(Piece((), cached_tokens=5))
    assert rows.cached == 3


def test_a_copy_is_another_session_with_the_same_rows() -> None:
    rows = served(Server())
    rows.bind()
    other = rows.copy()
    other.add(1)
    assert (len(rows.fitting()), len(other.fitting())) == (10, 11)
    assert other.name != rows.name
    assert (other.salt, other.owner) == ("salt", "me")
    other.unbind()
    assert rows.bind().sessions == 1
