"""Two owners on one engine: each gets an equal share, even if the other wants much more."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from antiphon.engine.api import Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import ScheduledSession, StepChunk, StepLimits
from antiphon.errors import Refused
from tests.engine.local.scripted import Memory


class Owners:
    """A scheduler whose steps always return the token 1. `pages`, `parked`: pages of KV and of host memory."""

    def __init__(self, pages: int = 1 << 16, parked: int = 0, **limits: int) -> None:
        cache = KvCache(Memory(), budget_bytes=pages * PAGE_ROWS, host_bytes=parked * PAGE_ROWS)
        self.scheduler = Scheduler(cache, StepLimits(1 << 20, **limits))
        self.items: dict[ScheduledSession, list[object]] = {}

    def open(self, owner: str, rows: int, *, generates: bool = True, reserve: int = 1) -> ScheduledSession:
        session = self.scheduler.open(reserve, 0.0, owner)
        # No two sessions begin alike, because an equal prefix would not be computed twice.
        self.scheduler.append(session, (len(self.scheduler.sessions) + 1000, *range(rows - 1)))
        if generates:
            self.generate(session)
        return session

    def generate(self, session: ScheduledSession) -> None:
        delivered: list[object] = []
        self.items[session] = delivered

        def deliver(tokens: Sequence[Token], reason: object) -> None:
            delivered.extend([*tokens, *([reason] if reason else [])])

        self.scheduler.generate(session, Generation(Sampling(max_tokens=50), deliver, session.rows.length))

    def step(self) -> list[StepChunk]:
        chunks = self.scheduler.plan(0.0)
        assert not [c for c in chunks if c.session.lease.extent is None]
        self.scheduler.commit(chunks, [Token(1) if c.sampled else None for c in chunks])
        for delivered in self.items.values():
            assert not [item for item in delivered if isinstance(item, Exception)]
        self.scheduler.check_integrity()
        return chunks

    def steps_to_token(self, session: ScheduledSession) -> int:
        for count in range(1, 1000):
            self.step()
            if self.items[session]:
                return count
        raise AssertionError("no token came")


@pytest.mark.parametrize("rows", [1, 40, 200])
def test_when_another_owner_has_100_generations_waiting_then_a_first_token_waits_for_half_of_each_step_only(
    rows: int,
) -> None:
    alone = Owners(decode_rows=8)
    expected = alone.steps_to_token(alone.open("b", rows))
    e = Owners(decode_rows=8, prefill_only_rows=64)
    for _ in range(100):
        e.open("a", 400)
    e.step()
    # A step's 64 rows are 32 for each owner. Work that runs alone in steps of 256 rows takes eight times as many.
    assert e.steps_to_token(e.open("b", rows)) <= max(expected, -(-rows // 32))


def test_when_another_owners_sessions_fill_the_decode_rows_then_each_step_has_a_row_of_both() -> None:
    e = Owners(decode_rows=4)
    for _ in range(100):
        e.open("a", 1)
    e.step()
    e.step()
    mine = e.open("b", 1)
    for _ in range(10):
        assert [c.session for c in e.step()].count(mine) == 1
    # The other owner's sessions share the rest of the rows in turns.
    for _ in range(40):
        e.step()
    assert all(len(items) >= 1 for items in e.items.values())


def test_when_owners_prefill_then_the_rows_of_a_step_are_shared_by_owner_and_none_is_left_over() -> None:
    e = Owners(prefill_only_rows=256)
    for _ in range(10):
        e.open("a", 5000, generates=False)
    e.open("b", 5000, generates=False)
    e.open("c", 21, generates=False)
    counts: dict[object, int] = {}
    for chunk in e.step():
        owner = chunk.session.rows.owner
        counts[owner] = counts.get(owner, 0) + chunk.count
    assert counts == {"c": 20, "b": 118, "a": 118}


def test_when_there_are_more_owners_than_shares_of_a_step_then_each_has_its_turn() -> None:
    e = Owners(prefill_only_rows=64)
    for owner in range(12):
        e.open(str(owner), 1000, generates=False)
    served = [chunk.session.rows.owner for _ in range(3) for chunk in e.step()]
    assert sorted(served, key=lambda owner: int(str(owner))) == [str(owner) for owner in range(12)]


@pytest.mark.parametrize("parked", [0, 100])
def test_when_an_owner_holds_all_kv_then_another_gets_its_share_of_it_and_nobody_fails(parked: int) -> None:
    e = Owners(pages=8, parked=parked, park_after_s=1e9)  # type: ignore[arg-type]
    for _ in range(8):
        e.open("a", 40)
    e.step()
    with pytest.raises(Refused):
        e.open("a", 1)
    mine = [e.open("b", 40) for _ in range(4)]
    # The owner's share is half. Its next session is refused, like the other owner's session before.
    with pytest.raises(Refused):
        e.open("b", 1)
    e.step()
    assert all(e.items[session] for session in mine)
    for _ in range(400):
        e.step()
    # Suspended sessions continue when there is room, and no row is lost.
    assert all(len(items) == 51 for items in e.items.values())


def test_when_a_session_grows_within_its_owners_share_then_the_larger_owner_gives_way_and_no_context_is_cut() -> None:
    e = Owners(pages=8, parked=100)
    mine = e.open("b", 40)
    for _ in range(7):
        e.open("a", 40)
    e.step()
    assert mine.rows.generation
    e.scheduler.cancel(mine, mine.rows.generation, mine.rows.generation.produced)
    e.scheduler.append(mine, tuple(range(180)))
    e.generate(mine)
    e.steps_to_token(mine)
    assert len(mine.rows.ids) > 220
    assert e.scheduler.context_cuts == 0


def test_any_course_of_owners_keeps_the_books_and_ends() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        e = Owners(pages=12, parked=chance.choice([0, 4, 100]), decode_rows=3, prefill_only_rows=48)
        for _ in range(60):
            try:
                e.open(chance.choice("aaabc"), chance.randint(1, 100), reserve=chance.choice([1, 100]))
            except Refused:
                done = [s for s in e.scheduler.sessions if not s.rows.generation]
                for session in done:
                    e.scheduler.close(session, keep=chance.random() < 0.5)
            e.step()
        for _ in range(5000):
            if not e.step():
                break
        assert not [s for s in e.scheduler.sessions if s.rows.generation]
