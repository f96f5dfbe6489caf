"""The costs of sessions (steps, rows and room), on a scripted runner, which records each step."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from antiphon.engine.api import EngineSettings, Finish, Sampling
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.engine.local.step import MAX_UNREAD_TOKENS
from antiphon.errors import EngineError, ModelError, Refused
from tests.engine.local.scripted import Memory, ScriptedRunner


def engine(runner: ScriptedRunner, **options: Any) -> LocalEngine:
    return LocalEngine(runner, EngineSettings(**{"kv_bytes": 1 << 16, "reserve_rows": 64} | options))


async def tokens(session: LocalSession, count: int, **options: Any) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]


def test_when_a_generation_is_closed_it_stops_within_a_step_and_unread_tokens_are_taken_back() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1, 2, 3])
        gate, running = threading.Event(), threading.Event()

        def hold(step: int) -> None:
            if step == 3:
                running.set()
                gate.wait(10)

        runner.before = hold
        stream = session.generate(Sampling(max_tokens=1000))
        got = [(await anext(stream)).id for _ in range(3)]
        await asyncio.to_thread(running.wait, 10)
        # A step is under way: it finishes, and its result is discarded.
        await stream.aclose()
        gate.set()
        assert got == [4, 5, 6]
        assert session.length == 6
        rows = await e.thread.call(lambda: list(session.scheduled.rows.ids))
        assert rows == [1, 2, 3, 4, 5, 6]
        assert len(runner.steps) <= 4
        assert session.finish is Finish.CANCELLED
        state = await e.state()
        assert state.sessions == 1
        # The session continues from the last token that was read.
        assert await tokens(session, 2) == [7, 8]
        session.close()
        assert (await e.state()).kv_bytes == 0
        e.close()

    asyncio.run(main())


def test_when_a_generation_has_ended_its_unread_tokens_are_still_taken_back() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1])
        stream = session.generate(Sampling(max_tokens=9))
        got = [(await anext(stream)).id for _ in range(2)]
        while await e.thread.call(lambda: session.scheduled.rows.generation is not None):
            pass
        await stream.aclose()
        assert got == [2, 3]
        assert session.length == 3
        assert await e.thread.call(lambda: list(session.scheduled.rows.ids)) == [1, 2, 3]
        assert await tokens(session, 2) == [4, 5]
        e.close()

    asyncio.run(main())


def test_when_a_reading_task_is_cancelled_its_generation_is_too() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1])
        seen: list[int] = []

        async def read() -> None:
            async with aclosing(session.generate(Sampling(max_tokens=10_000))) as stream:
                async for token in stream:
                    seen.append(token.id)
                    if len(seen) == 5:
                        begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await e.thread.call(e.scheduler.check_integrity)
        assert session.length == 1 + len(seen)
        assert await e.thread.call(lambda: len(session.scheduled.rows.ids)) == 1 + len(seen)
        before = len(runner.steps)
        await e.state()
        assert len(runner.steps) <= before + 1
        e.close()

    asyncio.run(main())


def test_during_a_long_prefill_every_step_still_has_a_row_of_the_generating_session() -> None:
    async def main() -> None:
        gate = threading.Event()
        runner = ScriptedRunner(before=lambda step: gate.wait(10) and None if step == 5 else None)
        e = engine(runner, prefill_rows=64)
        talking, loading = await e.open(), await e.open()
        talking.append([1])
        stream = talking.generate(Sampling(max_tokens=60))
        await anext(stream)
        loading.append(list(range(500, 900)) * 4)
        gate.set()
        async for _ in stream:
            pass
        await loading.settle()
        mixed = [s for s in runner.steps if len(s) == 2]
        assert len(mixed) >= 1600 // 64
        # While it generates, every step includes its row, and none exceeds the limit for prefill rows.
        first = next(i for i, s in enumerate(runner.steps) if any(c.session is talking.scheduled for c in s))
        last = max(i for i, s in enumerate(runner.steps) if any(c.session is talking.scheduled for c in s))
        for step in runner.steps[first : last + 1]:
            assert any(c.session is talking.scheduled for c in step)
            assert sum(c.count for c in step if c.session is loading.scheduled) <= 64
        e.close()

    asyncio.run(main())


def test_prefills_share_a_step_evenly() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        gate = threading.Event()
        runner.before = lambda step: None if step else gate.wait(10) and None
        e = engine(runner, prefill_only_rows=256)
        first, long, short = await e.open(), await e.open(), await e.open()
        first.append([9, 9])
        long.append(list(range(900)))
        short.append(list(range(500, 540)))
        gate.set()
        await short.settle()
        done = max(i for i, s in enumerate(runner.steps) if any(c.session is short.scheduled for c in s))
        begun = min(i for i, s in enumerate(runner.steps) if any(c.session is long.scheduled for c in s))
        assert done <= begun + 1
        e.close()

    asyncio.run(main())


def test_equal_prefixes_are_computed_once() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        system = list(range(100, 200))
        sessions = [await e.open(owner="one") for _ in range(4)]
        for i, session in enumerate(sessions):
            session.append([*system, 300 + i, 400 + i])
        await asyncio.gather(*(s.settle() for s in sessions))
        # The prefix is computed once. The newest row of each session is left for its next generation.
        assert runner.rows == 100 + 4
        assert [s.cached for s in sessions] == [0, 100, 100, 100]
        for i, session in enumerate(sessions):
            assert await tokens(session, 1) == [401 + i]
            handle = session.scheduled.lease.extent.handle  # type: ignore[union-attr]
            assert handle[:102] == [*system, 300 + i, 400 + i]
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


@pytest.mark.parametrize("owner", ["other", None])
def test_when_sessions_have_other_owners_then_neither_live_nor_kept_prefixes_are_shared(owner: str | None) -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        rows = list(range(100, 200))
        live, closed = await e.open(owner="one"), await e.open(owner="one")
        live.append(rows)
        closed.append([*range(300, 400)])
        await asyncio.gather(live.settle(), closed.settle())
        closed.close(keep=True)
        before = runner.rows
        for given in (rows, [*range(300, 400)]):
            session, again = await e.open(owner=owner), await e.open(owner=None)
            session.append(given)
            again.append(given)
            await asyncio.gather(session.settle(), again.settle())
            assert (session.cached, again.cached) == (0, 0)
        # All rows are computed, because no session waits until another one has computed the same rows.
        assert runner.rows - before == 4 * 99
        own = await e.open(owner="one")
        own.append(rows)
        await own.settle()
        assert own.cached == 99
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_opening_is_cancelled_no_session_is_left() -> None:
    async def main() -> None:
        e = engine(ScriptedRunner())
        one = await e.open()
        one.append([1, 2, 3])
        for make in (e.open, one.fork):
            opening = asyncio.create_task(make())
            await asyncio.sleep(0)
            # The engine has answered, but the task has not received the answer yet.
            done = threading.Event()
            e.thread.post(done.set)
            assert done.wait(10)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert (await e.state()).sessions == 1
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_a_session_was_closed_with_keep_a_later_one_continues_its_prefix() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        first = await e.open(owner="one")
        first.append(list(range(100, 150)))
        out = await tokens(first, 3)
        first.close(keep=True)
        second = await e.open(owner="one")
        second.append([*range(100, 150), *out, 700, 701])
        before = runner.rows
        await tokens(second, 1)
        # The last token of the first session was never computed.
        assert runner.rows - before == 3
        assert second.cached == 52
        second.close(keep=True)
        # The first prefix is dropped, because the second continues it.
        assert await e.thread.call(lambda: len(e.scheduler.prefixes.kept)) == 1
        e.close()

    asyncio.run(main())


def test_when_room_runs_out_open_sessions_go_on_with_shorter_contexts_and_new_ones_are_refused() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        # There are four pages. Two sessions are promised two pages each, and want ten.
        e = engine(runner, kv_bytes=4 * 64, reserve_rows=128, host_bytes=0, disk_bytes=0)
        a, b = await e.open(), await e.open()
        with pytest.raises(Refused) as refused:
            async with asyncio.timeout(10):
                a.append([1])
                streams = [asyncio.create_task(tokens(s, 640)) for s in (a,)]
                b.append(list(range(300)) * 2)
                await asyncio.sleep(0)
                await e.open()
        assert refused.value.retry_after_s > 0
        assert "no room" in refused.value.reason
        await b.settle()
        streams.append(asyncio.create_task(tokens(b, 640)))
        outputs = await asyncio.gather(*streams)
        assert [len(o) for o in outputs] == [640, 640]
        assert e.scheduler.context_cuts > 0
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_nothing_can_be_parked_an_idle_session_gives_up_its_kv_for_a_busy_one() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        # There is no room for parking, so an idle session's KV cannot be moved out.
        e = engine(runner, kv_bytes=4 * 64, reserve_rows=128, host_bytes=0, disk_bytes=0)
        a, b = await e.open(), await e.open()
        a.append([1])
        await a.settle()
        assert await e.thread.call(lambda: e.scheduler.cache.park(a.scheduled.lease, a.scheduled.rows.computed))
        b.append(list(range(240)))
        async with asyncio.timeout(20):
            # b takes all the room, and is idle afterwards.
            assert len(await tokens(b, 10)) == 10
            assert (await e.state()).kv_bytes == 4 * 64
            assert len(await tokens(a, 100)) == 100
            await e.thread.call(e.scheduler.check_integrity)
            # The KV that was given up is computed again.
            assert len(await tokens(b, 10)) == 10
            await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_room_is_short_idle_sessions_are_parked_and_come_back() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner, kv_bytes=4 * 64, reserve_rows=128, host_bytes=1 << 12, disk_bytes=0)
        sessions = []
        for i in range(6):
            session = await e.open()
            session.append([i * 10 + k for k in range(100)])
            await session.settle()
            sessions.append(session)
        state = await e.state()
        assert state.sessions == 6
        assert state.parked == 4
        computed = runner.rows
        for i, session in enumerate(sessions):
            assert await tokens(session, 1) == [i * 10 + 100]
            await e.thread.call(e.scheduler.check_integrity)
        # Only one row of each session was computed again: the one that a token follows.
        assert runner.rows - computed == 6 + 0
        e.close()

    asyncio.run(main())


def test_when_a_session_is_idle_for_long_it_is_parked() -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        runner = ScriptedRunner()
        e = LocalEngine(runner, EngineSettings(kv_bytes=1 << 12, reserve_rows=64, park_after_s=60.0), clock=lambda: now)
        session = await e.open()
        session.append(list(range(50)))
        await session.settle()
        now = 59.0
        await e.thread.call(lambda: e.scheduler.park_idle(now))
        assert (await e.state()).parked == 0
        now = 61.0
        await e.thread.call(lambda: e.scheduler.park_idle(now))
        state = await e.state()
        assert (state.parked, state.kv_bytes, state.parked_bytes) == (1, 0, 49)
        assert await tokens(session, 2) == [50, 51]
        e.close()

    asyncio.run(main())


def test_when_a_session_was_closed_with_keep_only_tokens_before_its_first_embedding_are_shared() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        first = await e.open(owner="one")
        first.append(range(100))
        first.append_embeddings([[0.0]] * 5)
        first.append([7])
        await first.settle(include_newest=True)
        first.close(keep=True)
        (kept,) = await e.thread.call(lambda: list(e.scheduler.prefixes.kept))
        assert (len(kept.rows.ids), kept.rows.spans) == (100, [])
        second = await e.open(owner="one")
        second.append([*range(100), 5, 6])
        assert await tokens(second, 1) == [7]
        assert second.cached > 60
        # Nothing is kept of a session that begins with an embedding.
        known = await e.thread.call(lambda: list(e.scheduler.prefixes.kept))
        third = await e.open(owner="one")
        third.append_embeddings([[0.0]] * 5)
        await third.settle(include_newest=True)
        third.close(keep=True)
        assert await e.thread.call(lambda: list(e.scheduler.prefixes.kept)) == known
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_a_context_is_full_it_is_cut_at_a_turn_and_the_session_goes_on() -> None:
    async def main() -> None:
        runner = ScriptedRunner(context_rows=256)
        e = engine(runner)
        session = await e.open()
        system = list(range(10))
        session.append(system)
        session.pin()
        for turn in range(8):
            session.start_turn()
            session.append([100 * (turn + 1) + k for k in range(40)])
            await session.settle()
        assert session.length == 330
        rows = await e.thread.call(lambda: session.scheduled.rows)
        assert len(rows.ids) < 256
        assert rows.ids[:10] == system
        # The system prompt is followed by whole turns, the newest last.
        assert rows.ids[10] in {100 * (t + 1) for t in range(8)}
        assert rows.ids[-1] == 839
        assert session.context_start == 10 + 330 - len(rows.ids)
        with pytest.raises(EngineError, match="left the context"):
            session.rollback(60)
        session.rollback(329)
        assert await tokens(session, 2) == [839, 840]
        # A rollback to the end of the dropped rows leaves them dropped.
        session.rollback(session.context_start)
        assert await e.thread.call(lambda: (rows.length, rows.ids)) == (session.length, system)
        session.append([7])
        assert await tokens(session, 1) == [8]
        session.rollback(5)
        assert await tokens(session, 1) == [5]
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_a_reader_is_far_behind_the_engine_waits_for_it() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1])
        stream = session.generate(Sampling(max_tokens=500))
        await anext(stream)
        for _ in range(400):
            await e.state()
        assert len(runner.steps) <= MAX_UNREAD_TOKENS + 2
        assert len([t async for t in stream]) == 499
        e.close()

    asyncio.run(main())


def test_when_the_engine_is_closed_a_waiting_reader_gets_an_error() -> None:
    async def main() -> None:
        gate = threading.Event()
        e = engine(ScriptedRunner(before=lambda step: gate.wait(10) and None))
        session = await e.open()
        session.append([1])
        reading = asyncio.create_task(tokens(session, 5))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(e.close))
        with pytest.raises(Refused):
            while True:
                e.thread.post(lambda: None)
                await asyncio.sleep(0)
        gate.set()
        await closing
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(reading, 10)

    asyncio.run(main())


def test_when_an_allocation_fails_then_only_the_session_whose_turn_it_was_fails_and_it_can_try_again() -> None:
    class FullDevice(Memory):
        fail_once = False

        def extend(self, source: list[Any] | None, rows: int, valid: int, *, shared: bool) -> list[Any]:
            if self.fail_once:
                self.fail_once = False
                raise MemoryError("out of memory")
            return super().extend(source, rows, valid, shared=shared)

    async def main() -> None:
        memory = FullDevice()
        e = engine(ScriptedRunner(memory=memory))
        other, unlucky = await e.open(), await e.open()
        other.append([1, 2])
        assert await tokens(other, 1) == [3]
        memory.fail_once = True
        unlucky.append([7, 8])
        with pytest.raises(ModelError, match="out of memory"):
            await tokens(unlucky, 2)
        assert await tokens(other, 2) == [4, 5]
        assert await tokens(unlucky, 2) == [9, 10]
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_when_a_step_fails_then_only_its_sessions_fail_and_their_kv_stays() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        idle, unlucky = await e.open(), await e.open()
        for session in (idle, unlucky):
            session.append([7, 8])
            assert await tokens(session, 1) == [9]

        def fail(_: int) -> None:
            raise MemoryError("out of memory")

        runner.before = fail
        with pytest.raises(ModelError, match="out of memory"):
            await tokens(unlucky, 2)
        runner.before = lambda _: None
        before = runner.rows
        assert await tokens(unlucky, 2) == [10, 11]
        assert await tokens(idle, 2) == [10, 11]
        # Each session computed only the row that had not been computed, and one more token.
        assert runner.rows - before == 4
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())
