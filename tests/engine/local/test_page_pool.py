"""A pool of pages compared with a tensor for each session: after the same steps, both contain the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine.api import EngineSettings, Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import ScheduledSession, StepLimits
from antiphon.errors import EngineError, Refused
from tests.engine.local import tiny
from tests.engine.local.tiny import CONTEXT, FAMILIES, VOCABULARY

torch.set_num_threads(1)
Heard = list[tuple[int, bytes]]


class Steps:
    """Sessions, a scheduler and a runner: an engine without its thread, so that two of these take the same steps."""

    def __init__(self, family: str, layout: Any, kv_pages: int, host_pages: int, **options: Any) -> None:
        model = tiny.model(family)
        # Llama and Qwen rotate the halves of a key against each other, so an eviction moves their rows.
        self.runner = Runner(model, rotate_half=family.startswith("qwen"))
        page_bytes = PAGE_ROWS * 3 * 2 * 2 * getattr(tiny.CONFIGS[family], "head_dim", 8) * 4
        kv = EngineSettings(kv_bytes=kv_pages * page_bytes, kv_layout=layout, **options)
        self.storage = self.runner.storage(kv)
        self.cache = KvCache(
            self.storage,
            budget_bytes=kv.kv_bytes,
            host_bytes=host_pages * page_bytes,
            disk_bytes=host_pages * page_bytes,
        )
        self.scheduler = Scheduler(self.cache, StepLimits(CONTEXT))
        self.sessions: list[ScheduledSession] = []
        self.heard: Heard = []
        self._steps = 0

    def step(self) -> bool:
        self._steps += 1
        chunks = self.scheduler.plan(float(self._steps))
        results = self.runner.step(chunks) if chunks else []
        for result in results:
            assert not isinstance(result, Exception), result
        self.scheduler.commit(chunks, results)
        return bool(chunks)

    def settle(self) -> None:
        while self.step():
            pass

    def deliver(self, tokens: Sequence[Token], _: object) -> None:
        self.heard += [(token.id, token.hidden.float().numpy().tobytes()) for token in tokens]

    def check(self) -> None:
        self.scheduler.check_integrity()
        if isinstance(self.storage, PagePool):
            extents = [*self.cache.kept, *(x.extent for x in self.cache.leases if x.extent)]
            self.storage.check_integrity([e.handle for e in {id(e): e for e in extents}.values()])

    def rows(self) -> list[torch.Tensor]:
        """The contents of the KV of each session that has KV in memory."""
        leases = [(s.lease, s.rows.computed) for s in self.sessions]
        return [self.storage.to_host(x.extent.handle, n) for x, n in leases if x.extent and n]


Operation = Callable[[Steps, random.Random], None]


def open_one(e: Steps, seed: random.Random) -> None:
    session = e.scheduler.open(PAGE_ROWS, 0.0)
    # Half of them begin alike, like conversations with the same system prompt.
    rows = list(range(70)) if seed.random() < 0.5 else []
    e.scheduler.append(session, [*rows, *(seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 90)))])
    e.sessions.append(session)


def append(e: Steps, seed: random.Random) -> None:
    e.scheduler.append(seed.choice(e.sessions), [seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 80))])


def embed(e: Steps, seed: random.Random) -> None:
    count, random_rows = seed.randrange(1, 6), torch.Generator().manual_seed(seed.randrange(99))
    rows = torch.randn(count, tiny.WIDTH, generator=random_rows)
    e.scheduler.append_embeddings(seed.choice(e.sessions), rows, None, None)


def rollback(e: Steps, seed: random.Random) -> None:
    session = seed.choice(e.sessions)
    first = session.rows.pinned + session.rows.dropped + 1 if session.rows.dropped else 1
    e.scheduler.rollback(session, seed.randrange(min(first, session.rows.length), session.rows.length + 1))


def fork(e: Steps, seed: random.Random) -> None:
    e.sessions.append(e.scheduler.fork(seed.choice(e.sessions), 0.0))


def evict(e: Steps, seed: random.Random) -> None:
    session = seed.choice(e.sessions)
    if len(session.rows.ids) > 3:
        e.scheduler.evict(session, seed.randrange(1, len(session.rows.ids) - 1))


def park(e: Steps, seed: random.Random) -> None:
    e.settle()
    session = seed.choice(e.sessions)
    e.cache.park(session.lease, session.rows.computed)


def close(e: Steps, seed: random.Random) -> None:
    if len(e.sessions) > 1:
        e.scheduler.close(e.sessions.pop(seed.randrange(len(e.sessions))), seed.random() < 0.5)


def step(e: Steps, seed: random.Random) -> None:
    e.step()


def generate(e: Steps, seed: random.Random) -> None:
    for session in seed.sample(e.sessions, seed.randrange(1, len(e.sessions) + 1)):
        drawn: dict[str, Any] = seed.choice([{}, {"temperature": 1.3, "seed": 5}])
        params = Sampling(max_tokens=seed.randrange(1, 6), hidden=True, **drawn)
        e.scheduler.generate(session, Generation(params, e.deliver, session.rows.length))
    e.settle()
    for session in e.sessions:
        if session.rows.generation:
            # There was no room for it.
            e.scheduler.cancel(session, session.rows.generation, session.rows.generation.produced)


OPERATIONS: dict[str, Operation] = {
    f.__name__: f for f in (open_one, append, embed, rollback, fork, evict, park, close, step, generate)
}
PLANS = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 10_000)), min_size=4, max_size=40)


def same_bits(family: str, plan: list[tuple[str, int]], kv_pages: int, host_pages: int) -> None:
    """Take the plan's steps with both layouts, and compare the whole KV after each."""
    both = [Steps(family, layout, kv_pages, host_pages) for layout in ("session", "paged")]
    for name, number in [("open_one", 0), *plan]:
        outcomes = []
        for e in both:
            try:
                OPERATIONS[name](e, random.Random(number))
                outcomes.append("done")
            except (Refused, EngineError) as error:
                outcomes.append(str(error))
            e.check()
        assert outcomes[0] == outcomes[1]
        tensors, pages = (e.rows() for e in both)
        assert len(tensors) == len(pages)
        assert all(torch.equal(a, b) for a, b in zip(tensors, pages, strict=True))
        assert both[0].heard == both[1].heard
    for e in both:
        for session in e.sessions:
            e.scheduler.close(session, keep=False)
        for prefix in list(e.cache.kept):
            e.cache.drop_kept(prefix)
    assert isinstance(both[1].storage, PagePool)
    assert both[1].storage.free_pages == kv_pages


@pytest.mark.parametrize("family", FAMILIES)
@given(plan=PLANS)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_bits_in_a_pool_are_those_in_a_tensor_for_each_session(family: str, plan: list[tuple[str, int]]) -> None:
    same_bits(family, plan, kv_pages=200, host_pages=200)


@pytest.mark.slow
@given(plan=PLANS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_bits_are_the_same_when_room_is_short(plan: list[tuple[str, int]]) -> None:
    """With room for nine pages and parking on disk, sessions constantly evict each other."""
    same_bits("qwen2", plan, kv_pages=9, host_pages=4)


def forked(e: Steps) -> tuple[ScheduledSession, ScheduledSession]:
    """A session of 150 rows, and its fork with one row more: they share two whole pages."""
    first = e.scheduler.open(PAGE_ROWS, 0.0)
    e.scheduler.append(first, [i % VOCABULARY for i in range(150)])
    e.settle()
    twin = e.scheduler.fork(first, 0.0)
    e.scheduler.append(twin, [3, 4])
    e.sessions += [first, twin]
    e.settle()
    return first, twin


def evict_a_shared_page(e: Steps) -> None:
    first, _ = forked(e)
    e.scheduler.evict(first, 20)
    e.scheduler.append(first, [5, 6])
    e.settle()


def grow_over_a_shared_page(e: Steps) -> None:
    """The first session gives up rows in a page that its twin holds too, and then outgrows its pages."""
    first, _ = forked(e)
    e.scheduler.rollback(first, 30)
    e.scheduler.append(first, [i % 7 for i in range(300)])
    e.settle()


def write_to_a_shared_page(e: Steps) -> None:
    first, _ = forked(e)
    e.scheduler.rollback(first, 30)
    e.scheduler.append(first, [9, 8, 7])
    e.settle()


@pytest.mark.parametrize("scenario", [evict_a_shared_page, grow_over_a_shared_page, write_to_a_shared_page])
def test_what_one_session_does_to_a_shared_page_the_other_does_not_see(scenario: Callable[[Steps], None]) -> None:
    both = [Steps("qwen2", layout, 40, 0) for layout in ("session", "paged")]
    for e in both:
        scenario(e)
        e.check()
    tensors, pages = (e.rows() for e in both)
    assert len(tensors) == len(pages) == 2
    assert all(torch.equal(a, b) for a, b in zip(tensors, pages, strict=True))


def test_a_fork_takes_only_the_page_that_it_writes_to() -> None:
    e = Steps("qwen2", "paged", 40, 0)
    assert isinstance(e.storage, PagePool)
    forked(e)
    # Three pages of the first session, and one of its twin.
    assert e.storage.free_pages == 36


def test_a_session_grows_without_a_copy_of_its_rows() -> None:
    e = Steps("qwen2", "paged", 40, 0)
    session = e.scheduler.open(PAGE_ROWS, 0.0)
    e.scheduler.append(session, list(range(60)))
    e.settle()
    assert session.lease.extent
    before = list(session.lease.extent.handle.pages)
    e.scheduler.append(session, [1] * 400)
    e.settle()
    assert list(session.lease.extent.handle.pages[: len(before)]) == before
