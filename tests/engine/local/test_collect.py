"""Collecting the tokens of a generation: how they are delivered, and when the engine waits for the reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.engine.api import EngineSettings, Finish, Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.step import MAX_UNREAD_TOKENS
from antiphon.errors import ModelError
from tests.engine.local.scripted import ScriptedRunner


@pytest.mark.parametrize(("group", "sizes"), [(0, [8]), (1, [*[1] * 8, 0]), (3, [3, 3, 2]), (4, [4, 4, 0]), (100, [8])])
def test_tokens_are_delivered_in_groups_and_the_last_one_says_why_the_generation_ended(
    group: int, sizes: list[int]
) -> None:
    delivered: list[tuple[Sequence[Token], Finish | Exception | None]] = []
    generation = Generation(Sampling(), lambda *given: delivered.append(given), 0, group)
    for number in range(8):
        generation.add(Token(number))
    generation.end(Finish.STOP)
    assert [len(tokens) for tokens, _ in delivered] == sizes
    assert [token.id for tokens, _ in delivered for token in tokens] == list(range(8))
    assert [reason for _, reason in delivered] == [*[None] * (len(sizes) - 1), Finish.STOP]
    assert (generation.produced, generation.delivered) == (8, 8)


def run(act: Any, runner: ScriptedRunner) -> None:
    async def main() -> None:
        engine = LocalEngine(runner, EngineSettings(kv_bytes=1 << 16, reserve_rows=64))
        try:
            await asyncio.wait_for(act(engine), 60)
            await engine.thread.call(engine.scheduler.check_integrity)
        finally:
            engine.close()

    asyncio.run(main())


def test_the_event_loop_is_called_once_for_all_tokens_and_the_engine_does_not_wait_for_it() -> None:
    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1])
        calls: list[int] = []
        deliver = engine.thread.deliver

        def counted(*given: Any) -> None:
            calls.append(len(given[2]))
            deliver(*given)

        engine.thread.deliver = counted  # type: ignore[method-assign]
        count = 3 * MAX_UNREAD_TOKENS
        tokens = await session.collect(Sampling(max_tokens=count))
        assert calls == [count]
        assert [token.id for token in tokens] == list(range(2, 2 + count))
        assert session.finish is Finish.LENGTH

    run(act, ScriptedRunner())


def test_when_until_takes_long_then_the_engine_waits_for_it() -> None:
    runner = ScriptedRunner()

    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1])
        sizes: list[int] = []

        def until(tokens: Sequence[Token]) -> bool:
            if not sizes:
                # The model's thread takes a step after each of these calls, if it can.
                for _ in range(400):
                    done = threading.Event()
                    engine.thread.post(done.set)
                    assert done.wait(10)
                # The first group has been read.
                assert MAX_UNREAD_TOKENS + 10 <= len(runner.steps) <= MAX_UNREAD_TOKENS + 22
            sizes.append(len(tokens))
            return len(tokens) == 200

        tokens = await session.collect(Sampling(max_tokens=1000), until=until, group=10)
        assert sizes == list(range(10, 201, 10))
        assert (len(tokens), session.length, session.finish) == (200, 201, Finish.CANCELLED)

    run(act, runner)


def test_when_a_step_fails_none_of_the_tokens_stays() -> None:
    runner = ScriptedRunner()

    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1, 2, 3])

        def fail(step: int) -> None:
            if step == 5:
                raise MemoryError("out of memory")

        runner.before = fail
        with pytest.raises(ModelError, match="out of memory"):
            await session.collect(Sampling(max_tokens=20))
        assert (session.length, session.finish) == (3, None)
        runner.before = lambda _: None
        rows = await engine.thread.call(lambda: list(session.scheduled.rows.ids))
        assert rows == [1, 2, 3]
        assert [token.id for token in await session.collect(Sampling(max_tokens=2))] == [4, 5]

    run(act, runner)


def test_when_it_is_cancelled_after_a_group_none_of_the_tokens_stays() -> None:
    runner = ScriptedRunner()

    async def act(engine: LocalEngine) -> None:
        session, begun = await engine.open(), asyncio.Event()
        session.append([1, 2, 3])

        def until(tokens: Sequence[Token]) -> bool:
            begun.set()
            return False

        task = asyncio.create_task(session.collect(Sampling(max_tokens=1_000_000), until=until, group=3))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert (session.length, session.finish) == (3, Finish.CANCELLED)
        assert await engine.thread.call(lambda: list(session.scheduled.rows.ids)) == [1, 2, 3]
        assert (await engine.state()).generating == 0

    run(act, runner)


def test_when_the_rows_before_the_tokens_were_cut_the_length_is_still_right() -> None:
    runner = ScriptedRunner(context_rows=128)

    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1, 2])
        session.pin()
        session.append([3, 4, 5])

        def until(tokens: Sequence[Token]) -> bool:
            raise LookupError

        with pytest.raises(LookupError):
            await session.collect(Sampling(max_tokens=500), until=until, group=300)
        rows = await engine.thread.call(lambda: session.scheduled.rows)
        assert (session.length, rows.length, rows.ids, session.context_start) == (5, 5, [1, 2], 5)
        session.append([7])
        assert [token.id for token in await session.collect(Sampling(max_tokens=2))] == [8, 9]
        assert session.length == rows.length == 8

    run(act, runner)
