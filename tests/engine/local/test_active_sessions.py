"""A scheduler that looks only at active sessions, compared with one that looks at all open sessions in every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine.api import Finish, Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local import step
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import ScheduledSession, StepChunk, StepLimits
from antiphon.errors import EngineError, ModelError, Refused
from tests.engine.local.scripted import Memory

PAGES = 14


class Scanning(Scheduler):
    """Looks at every open session in every step."""

    def plan(self, now_s: float) -> list[StepChunk]:
        self._active = set(self.sessions)
        return super().plan(now_s)


class Slow:
    """A program whose row arrives some steps after its token."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def next_row(self) -> Any | None:
        return [[1.0]] if self._chance.random() < 0.4 else None


class Course:
    """The sessions of one scheduler, and everything that it has done."""

    def __init__(self, make: type[Scheduler]) -> None:
        cache = KvCache(Memory(), budget_bytes=PAGES * PAGE_ROWS, host_bytes=4 * PAGE_ROWS)
        limits = StepLimits(400, decode_rows=3, prefill_rows=32, prefill_only_rows=96, park_after_s=3.0)
        self.scheduler = make(cache, limits)
        self.sessions: list[ScheduledSession] = []
        self.log: list[Any] = []
        self.now_s = 0.0

    def deliver(self, number: int) -> Callable[[Sequence[Token], Finish | Exception | None], None]:
        return lambda tokens, reason: self.log.append((number, [t.id for t in tokens], str(reason)))

    def step(self, chance: random.Random) -> bool:
        self.now_s += 1.0
        chunks = self.scheduler.plan(self.now_s)
        self.log.append([(c.session.number, c.start, c.ids, c.sampled is not None) for c in chunks])
        results: list[Token | Exception | None] = [Token(chance.randrange(50)) if c.sampled else None for c in chunks]
        if chunks and chance.random() < 0.1:
            results[0] = ModelError("the step failed")
        self.scheduler.commit(chunks, results)
        return bool(chunks)


def open_one(e: Course, chance: random.Random) -> None:
    e.sessions.append(e.scheduler.open(chance.choice((1, PAGE_ROWS, 150)), e.now_s, chance.choice(("a", "b", None))))
    append(e, chance, e.sessions[-1])


def fork(e: Course, chance: random.Random) -> None:
    e.sessions.append(e.scheduler.fork(chance.choice(e.sessions), e.now_s))


def append(e: Course, chance: random.Random, session: ScheduledSession | None = None) -> None:
    # Half of the rows begin alike, so that sessions share prefixes.
    first = list(range(40)) if chance.random() < 0.5 else []
    rows = [*first, *(chance.randrange(50) for _ in range(chance.randrange(1, 90)))]
    e.scheduler.append(session or chance.choice(e.sessions), rows)


def embed(e: Course, chance: random.Random) -> None:
    e.scheduler.append_embeddings(chance.choice(e.sessions), [[1.0]] * chance.randrange(1, 5), None, None)


def generate(e: Course, chance: random.Random) -> None:
    session = chance.choice(e.sessions)
    program: Any = Slow(random.Random(chance.random())) if chance.random() < 0.5 else None
    params = Sampling(max_tokens=chance.randrange(1, 12), stop=frozenset((7,)), program=program)
    group = chance.choice((0, 1, 3))
    e.scheduler.generate(session, Generation(params, e.deliver(session.number), session.rows.length, group))


def read(e: Course, chance: random.Random) -> None:
    for session in e.sessions:
        if session.rows.generation and chance.random() < 0.7:
            session.rows.generation.consumed = session.rows.generation.delivered


def cancel(e: Course, chance: random.Random) -> None:
    session = chance.choice(e.sessions)
    if generation := session.rows.generation:
        e.scheduler.cancel(session, generation, chance.randrange(generation.produced + 1))


def rollback(e: Course, chance: random.Random) -> None:
    session = chance.choice(e.sessions)
    e.scheduler.rollback(session, chance.randrange(session.rows.length + 1))


def evict(e: Course, chance: random.Random) -> None:
    session = chance.choice(e.sessions)
    e.scheduler.evict(session, chance.randrange(1, max(2, len(session.rows.ids) // 2)))


def settle(e: Course, chance: random.Random) -> None:
    session = chance.choice(e.sessions)
    e.scheduler.settle(session, lambda error: e.log.append(str(error)), include_newest=chance.random() < 0.5)


def close(e: Course, chance: random.Random) -> None:
    if len(e.sessions) > 1:
        e.scheduler.close(e.sessions.pop(chance.randrange(len(e.sessions))), keep=chance.random() < 0.5)


def park(e: Course, chance: random.Random) -> None:
    e.now_s += chance.choice((0.0, 4.0))
    e.scheduler.park_idle(e.now_s)


def take_a_step(e: Course, chance: random.Random) -> None:
    e.step(chance)


def take_steps(e: Course, chance: random.Random) -> None:
    for _ in range(8):
        e.step(chance)


def fail_all(e: Course, chance: random.Random) -> None:
    if chance.random() < 0.1:
        e.scheduler.fail_all(ModelError("the engine failed"))


OPERATIONS = {
    operation.__name__: operation
    for operation in (
        *(open_one, fork, append, embed, generate, read, cancel, rollback, evict, settle, close, park),
        *(take_a_step, take_steps, fail_all),
    )
}
# Operations that make work come more often.
NAMES = [*OPERATIONS, "open_one", "generate", "generate", "take_steps", "take_steps"]
PLANS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 10_000)), min_size=5, max_size=60)


def in_lockstep(plan: list[tuple[str, int]]) -> Course:
    """Do the same with both schedulers, and compare them after each operation."""
    both = [Course(Scheduler), Course(Scanning)]
    for name, number in [("open_one", 0), *plan, ("take_steps", 1)]:
        for e in both:
            try:
                # The helper `append` takes an optional session.
                OPERATIONS[name](e, random.Random(number))  # type: ignore[operator]
            except (Refused, EngineError) as error:
                e.log.append(str(error))
            e.scheduler.check_integrity()
        assert both[0].log == both[1].log
    return both[0]


@given(plan=PLANS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_step_is_the_same_as_if_it_looked_at_all_open_sessions(plan: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Generations wait for their readers often.
        patch.setattr(step, "MAX_UNREAD_TOKENS", 3)
        in_lockstep(plan)


def test_a_step_does_not_look_at_idle_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    is_ready: Any = ScheduledSession.ready

    def watched(session: ScheduledSession) -> bool:
        looked.append(session.number)
        return is_ready.fget(session)  # type: ignore[no-any-return]

    monkeypatch.setattr(ScheduledSession, "ready", property(watched))
    scheduler = Course(Scheduler).scheduler
    sessions = [scheduler.open(1, 0.0) for _ in range(PAGES)]
    for session in sessions:
        scheduler.append(session, [1, 2, 3])
    while chunks := scheduler.plan(0.0):
        scheduler.commit(chunks, [None] * len(chunks))
    assert set(looked) == {session.number for session in sessions}
    looked.clear()
    scheduler.generate(sessions[5], Generation(Sampling(max_tokens=4), lambda _, __: None, 3))
    while chunks := scheduler.plan(0.0):
        scheduler.commit(chunks, [Token(1)])
    assert looked == [sessions[5].number] * 5
    assert scheduler.plan(0.0) == []
    assert len(looked) == 5


def test_a_session_whose_step_failed_goes_on_after_a_rollback() -> None:
    scheduler = Course(Scheduler).scheduler
    session = scheduler.open(1, 0.0)
    scheduler.append(session, range(9))
    scheduler.commit(scheduler.plan(0.0), [ModelError("the step failed")])
    assert scheduler.plan(0.0) == []
    scheduler.rollback(session, 5)
    assert [chunk.ids for chunk in scheduler.plan(0.0)] == [(0, 1, 2, 3)]


def test_an_idle_session_that_is_suspended_without_a_copy_computes_its_rows_again() -> None:
    scheduler = Scheduler(KvCache(Memory(), budget_bytes=2 * PAGE_ROWS), StepLimits(400))
    idle = [scheduler.open(PAGE_ROWS, 0.0, "a") for _ in range(2)]
    for session in idle:
        scheduler.append(session, range(9))
    while chunks := scheduler.plan(0.0):
        scheduler.commit(chunks, [None] * len(chunks))
    other = scheduler.open(PAGE_ROWS, 0.0, "b")
    assert (idle[1].lease.asleep, idle[1].rows.computed) == (True, 0)
    scheduler.check_integrity()
    scheduler.close(other, keep=False)
    assert [chunk.session for chunk in scheduler.plan(0.0)] == [idle[1]]
