"""The live sessions, the sessions among them that can be resumed, and the longest backlog."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from antiphon.server.registry import SessionRegistry, host_name
from antiphon.transports.attachment import AttachedSession


def entry(id: str, token: str | None = None, backlog_s: float = 0.0) -> AttachedSession:
    found: Any = SimpleNamespace(id=id, attachment=SimpleNamespace(token=token), backlog_s=backlog_s)
    # A SimpleNamespace is not hashable.
    return cast(AttachedSession, type("Entry", (), vars(found))())


def test_a_session_is_live_until_it_leaves_and_can_be_resumed_with_a_token_alone() -> None:
    registry, plain, held = SessionRegistry("one"), entry("a"), entry("b", "token")
    registry.enter(plain)
    assert not registry.may_resume
    registry.enter(held)
    assert registry.may_resume
    assert registry.live == {plain, held}
    assert registry.resumable == {"b": held}
    registry.leave(held)
    registry.leave(held)
    assert registry.live == {plain}
    assert not registry.resumable


def test_a_session_that_leaves_does_not_take_its_successor_of_the_same_id_with_it() -> None:
    registry, before, after = SessionRegistry("one"), entry("a", "token"), entry("a", "token")
    registry.enter(before)
    registry.enter(after)
    registry.leave(before)
    assert registry.resumable == {"a": after}
    assert registry.live == {after}


def test_where_there_is_a_store_there_may_be_a_session_to_resume() -> None:
    assert SessionRegistry("one", store=cast(Any, object())).may_resume


def test_the_backlog_is_that_of_the_session_furthest_behind() -> None:
    registry = SessionRegistry("one")
    assert registry.backlog_s() == 0
    for number, backlog_s in enumerate((0.5, 2.0, 1.0)):
        registry.enter(entry(str(number), backlog_s=backlog_s))
    assert registry.backlog_s() == 2.0


def test_each_start_of_a_host_has_another_name() -> None:
    first, second = host_name("host-3"), host_name("host-3")
    assert first != second
    assert first.startswith("host-3/")
    assert not host_name("").startswith("/")
