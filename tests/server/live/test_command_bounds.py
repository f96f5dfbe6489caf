"""The limits on what one client of a realtime session may send."""

from __future__ import annotations

import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, CreateItem, Item
from antiphon.server.live.realtime_session import MAX_ITEMS, MAX_REFUSED, CommandBounds
from antiphon.server.memory import MemoryLedger
from antiphon.settings import MemorySettings


def bounds(now_s: list[float] | None = None) -> CommandBounds:
    account = MemoryLedger(MemorySettings(session_memory_mb=1)).open("")
    return CommandBounds(account, 10, clock=lambda: now_s[0] if now_s else 0.0)


def message(text: str) -> CreateItem:
    return CreateItem(Item("a", parts=[ContentPart("input_text", text)]))


def test_when_a_conversation_has_all_the_items_it_may_then_another_one_is_refused() -> None:
    checked = bounds()
    checked.check(message("x"), MAX_ITEMS - 1)
    with pytest.raises(RemoteProtocolError) as refused:
        checked.check(message("x"), MAX_ITEMS)
    assert refused.value.code == "conversation_too_large"
    assert not checked.is_spent


def test_when_too_much_is_sent_again_and_again_then_the_session_has_to_end() -> None:
    checked = bounds()
    for k in range(MAX_REFUSED):
        assert not checked.is_spent, k
        with pytest.raises(RemoteProtocolError, match="a session may hold 1 MiB"):
            checked.check(message("x" * (2 << 20)), 0)
    assert checked.is_spent


def test_when_events_come_too_fast_for_two_seconds_then_they_are_too_many() -> None:
    now_s = [0.0]
    checked = bounds(now_s)
    assert [checked.count_event() for _ in range(21)] == [False] * 20 + [True]
    now_s[0] = 2.1
    assert not checked.count_event()
