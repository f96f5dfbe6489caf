"""The ledger of the memory that the server holds for its clients."""

from __future__ import annotations

import anyio
import pytest

from antiphon.errors import Refused
from antiphon.server.memory import MIB, MemoryLedger, reclaim_excess
from antiphon.settings import MemorySettings


def ledger(session: int = 4, key: int = 10, total: int = 30) -> MemoryLedger:
    return MemoryLedger(MemorySettings(session, key, total))


def test_when_a_session_holds_all_that_it_may_then_it_alone_is_refused() -> None:
    books = ledger()
    full, other = books.open("a"), books.open("a")
    full.hold(4 * MIB)
    with pytest.raises(Refused, match="a session may hold 4 MiB") as refused:
        full.check(1)
    assert refused.value.by_own_limit
    other.check(4 * MIB)
    full.hold(1 * MIB)
    full.check(3 * MIB)
    assert books.num_refused == {"session": 1, "key": 0, "server": 0}


def test_when_a_key_holds_all_that_it_may_then_other_keys_have_all_of_theirs() -> None:
    books = ledger()
    for _ in range(3):
        books.open("greedy").hold(10 * MIB // 3)
    with pytest.raises(Refused, match="one key may hold 10 MiB"):
        books.open("greedy").check(1 * MIB)
    books.open("modest").check(4 * MIB)


def test_when_the_server_is_full_then_only_keys_above_their_part_are_refused() -> None:
    books = ledger(session=20, key=20, total=30)
    first, second, third = books.open("a"), books.open("b"), books.open("c")
    first.hold(16 * MIB)
    second.hold(12 * MIB)
    with pytest.raises(Refused, match="all sessions may hold 30 MiB") as refused:
        first.check(3 * MIB)
    assert not refused.value.by_own_limit
    third.check(9 * MIB)
    third.hold(9 * MIB)
    with pytest.raises(Refused):
        third.check(2 * MIB)


def test_when_accounts_are_closed_then_nothing_is_held_and_no_key_is_remembered() -> None:
    books = ledger()
    for k in range(100):
        with books.opened(f"key {k}") as account:
            account.hold(1000)
    assert books.num_bytes == 0
    books.open("a").hold(30 * MIB)
    # If closed accounts were remembered, each key's share would be smaller than this.
    books.open("b").check(4 * MIB)


def test_when_the_process_is_larger_than_what_is_held_then_memory_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.server.memory.LOOK_EVERY_S", 0)
    books = MemoryLedger(MemorySettings())
    books.open("a").hold(200 * MIB)
    # The process begins at 1000 MiB. Growth by the memory that clients hold, or slightly more, is not an excess. Larger
    # growth is returned to the system once.
    seen, given = [1000, 1200, 1200, 1263, 1263, 1265, 1265], list[int]()
    left = iter([*seen, 1010, *[1010] * 40])

    def give_back() -> None:
        given.append(1)

    async def main() -> None:
        with pytest.raises(ExceptionGroup):
            async with anyio.create_task_group() as group:
                group.start_soon(reclaim_excess, books, lambda: next(left) * MIB, give_back)

    anyio.run(main)
    assert given == [1]
