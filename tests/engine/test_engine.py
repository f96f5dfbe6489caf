"""The engine against a full forward of the same rows: whatever is done to sessions, in whatever company, nothing changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine.engine import Engine, EngineSettings, Session
from antiphon.engine.runner import Runner
from antiphon.engine.sequence import Sampling
from antiphon.errors import Refused
from tests.engine import tiny
from tests.engine.tiny import FAMILIES, VOCABULARY, Embedded, Shadow

torch.set_num_threads(1)
ROW_BYTES = 3 * 2 * 2 * 16 * 4


def engine(family: str, **options: Any) -> Engine:
    return Engine(Runner(tiny.model(family)), EngineSettings(**{"kv_bytes": 4 << 20, "reserve_rows": 64} | options))


async def integrity(e: Engine) -> None:
    await e.ask(e.scheduler.check_integrity)


async def tokens(session: Session, count: int, **options: Any) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]


def greedy(reference: Any, rows: Shadow, count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(tiny.logits(reference, [*rows, *out])[-1].argmax()))
    return out


class Driver:
    """Sessions of one engine, each with its shadow, and the things that can be done to them."""

    def __init__(self, family: str, e: Engine) -> None:
        self.reference = tiny.model(family)
        self.engine = e
        self.live: list[tuple[Session, Shadow]] = []

    async def open(self, seed: random.Random) -> None:
        # Half of them begin alike, as conversations under one system prompt do.
        session = await self.engine.open()
        rows: Shadow = [i % VOCABULARY for i in range(24)] if seed.random() < 0.5 else []
        rows += [seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 90))]
        session.append([r for r in rows if isinstance(r, int)])
        self.live.append((session, rows))

    async def append(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        more = [seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 40))]
        session.append(more)
        rows += more

    async def embed(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        more = torch.randn(
            seed.randrange(1, 6), tiny.WIDTH, generator=torch.Generator().manual_seed(seed.randrange(99))
        )
        session.append_embeddings(more)
        rows += [Embedded(tuple(row.tolist())) for row in more]

    async def rollback(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        position = seed.randrange(1, len(rows) + 1)
        session.rollback(position)
        del rows[position:]

    async def fork(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        self.live.append((await session.fork(), list(rows)))

    async def park(self, seed: random.Random) -> None:
        session, _ = seed.choice(self.live)
        await session.settle()
        seat = session._seat
        await self.engine.ask(lambda: self.engine.scheduler.cache.park(seat.lease, seat.rows.computed))

    async def close(self, seed: random.Random) -> None:
        if len(self.live) > 1:
            session, _ = self.live.pop(seed.randrange(len(self.live)))
            session.close(keep=seed.random() < 0.5)

    async def cancel(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        wanted = seed.randrange(4)
        async with aclosing(session.generate(Sampling(max_tokens=50))) as stream:
            for _ in range(wanted):
                rows.append((await anext(stream)).id)
        assert session.length == len(rows)

    async def generate(self, seed: random.Random) -> None:
        """Some of them at once; each token's logits are those of a full forward."""
        chosen = seed.sample(self.live, seed.randrange(1, len(self.live) + 1))
        options = [{"temperature": 0.0}, {"temperature": 1.3, "seed": 5}, {"temperature": 0.8, "top_k": 9, "seed": 6}]
        await asyncio.gather(*(self._generate(s, rows, seed.choice(options)) for s, rows in chosen))

    async def _generate(self, session: Session, rows: Shadow, options: dict[str, Any]) -> None:
        start, seen = len(rows), []
        async for token in session.generate(Sampling(max_tokens=5, hidden=True, **options)):
            rows.append(token.id)
            seen.append(token.hidden)
        expected = tiny.logits(self.reference, rows)[start - 1 : -1]
        got = tiny.head(self.reference, torch.stack(seen))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if not options["temperature"]:
            assert rows[start:] == expected.argmax(-1).tolist()


OPERATIONS: dict[str, Callable[[Driver, random.Random], Awaitable[None]]] = {
    "open": Driver.open,
    "append": Driver.append,
    "embed": Driver.embed,
    "rollback": Driver.rollback,
    "fork": Driver.fork,
    "park": Driver.park,
    "close": Driver.close,
    "cancel": Driver.cancel,
    "generate": Driver.generate,
}


async def run(family: str, plan: list[tuple[str, int]], **options: Any) -> None:
    e = engine(family, **options)
    try:
        driver = Driver(family, e)
        await driver.open(random.Random(0))
        for name, number in plan:
            if name in ("open", "fork") and len(driver.live) >= 5:
                continue
            await OPERATIONS[name](driver, random.Random(number))
            await integrity(e)
        for session, rows in driver.live:
            await driver._generate(session, rows, {"temperature": 0.0})
        for session, _ in driver.live:
            session.close()
        await integrity(e)
        assert (await e.state()).sessions == 0
    finally:
        e.close()


PLANS = st.lists(st.tuples(st.sampled_from([*OPERATIONS, "generate"]), st.integers(0, 10_000)), max_size=25)


@pytest.mark.parametrize("family", FAMILIES)
@given(plan=PLANS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_interleaving_equals_a_full_forward(family: str, plan: list[tuple[str, int]]) -> None:
    asyncio.run(run(family, plan))


@given(plan=PLANS)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_so_it_does_where_room_is_short(plan: list[tuple[str, int]]) -> None:
    """Room for twelve pages, parking on disk: sessions push each other out all the time."""
    plan = [(n, s) for n, s in plan if n != "fork"]
    try:
        asyncio.run(run("qwen2", plan, kv_bytes=12 * 64 * ROW_BYTES, host_bytes=0, disk_bytes=1 << 24))
    except Refused:
        # Being told that there is no room is an answer.
        return
