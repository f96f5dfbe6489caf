"""What a session's life costs and who pays: steps, rows, room. On a scripted runner, where each step can be looked at."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from antiphon.engine.api import EngineSettings, Finish, Sampling
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.scheduler import MAX_UNREAD
from antiphon.errors import EngineError, Refused
from tests.engine.local.scripted import ScriptedRunner


def engine(runner: ScriptedRunner, **options: Any) -> Engine:
    return Engine(runner, EngineSettings(**{"kv_bytes": 1 << 16, "reserve_rows": 64} | options))


async def tokens(session: EngineSession, count: int, **options: Any) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]


def test_resumable_requests_keep_all_but_the_newest_token() -> None:
    """The example of spec/transcription.md: A1 B1 C1 -> D1 E1 F1, then A2 B2 -> C2 D2 E2, then A3 B3 -> C3 D3 E3."""

    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        prompts, outputs = [], []
        for given in ([100, 200, 300], [400, 500], [600, 700]):
            session.resume(given)
            prompts.append(await e.ask(lambda: list(session._seat.rows.ids)))
            outputs.append(await tokens(session, 3))
        d1, e1, f1 = outputs[0]
        c2, d2, e2 = outputs[1]
        assert prompts == [
            [100, 200, 300],
            [100, 200, 300, d1, e1, 400, 500],
            [100, 200, 300, d1, e1, 400, 500, c2, d2, 600, 700],
        ]
        assert outputs[0] == [301, 302, 303]
        assert outputs[1] == [501, 502, 503]
        assert len(outputs[2]) == 3
        assert f1 not in prompts[2]
        assert e2 not in prompts[2]
        # Request k computes its new rows only: its inputs, and all but the newest of its outputs.
        assert runner.rows == 5 + 4 + 4
        e.close()

    asyncio.run(main())


def test_a_cancelled_generation_stops_within_a_step_and_leaves_nothing() -> None:
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
        # A step is under way: it finishes, and what it gives is thrown away.
        await stream.aclose()
        gate.set()
        assert got == [4, 5, 6]
        assert session.length == 6
        rows = await e.ask(lambda: list(session._seat.rows.ids))
        assert rows == [1, 2, 3, 4, 5, 6]
        assert len(runner.steps) <= 4
        assert session.finish is Finish.CANCELLED
        state = await e.state()
        assert state.sessions == 1
        # It goes on from just there.
        assert await tokens(session, 2) == [7, 8]
        session.close()
        assert (await e.state()).kv_bytes == 0
        e.close()

    asyncio.run(main())


def test_what_was_sampled_but_not_read_is_taken_back_though_the_generation_has_ended() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1])
        stream = session.generate(Sampling(max_tokens=9))
        got = [(await anext(stream)).id for _ in range(2)]
        while await e.ask(lambda: session._seat.rows.generation is not None):
            pass
        await stream.aclose()
        assert got == [2, 3]
        assert session.length == 3
        assert await e.ask(lambda: list(session._seat.rows.ids)) == [1, 2, 3]
        assert await tokens(session, 2) == [4, 5]
        e.close()

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_generation() -> None:
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
        await e.ask(e.scheduler.check_integrity)
        assert session.length == 1 + len(seen)
        assert await e.ask(lambda: len(session._seat.rows.ids)) == 1 + len(seen)
        before = len(runner.steps)
        await e.state()
        assert len(runner.steps) <= before + 1
        e.close()

    asyncio.run(main())


def test_a_long_prefill_delays_no_token_by_more_than_its_own_step() -> None:
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
        # While it generates, no step goes without its row, and none carries more of the prefill than the share.
        first = next(i for i, s in enumerate(runner.steps) if any(c.seat is talking._seat for c in s))
        last = max(i for i, s in enumerate(runner.steps) if any(c.seat is talking._seat for c in s))
        for step in runner.steps[first : last + 1]:
            assert any(c.seat is talking._seat for c in step)
            assert sum(c.count for c in step if c.seat is loading._seat) <= 64
        e.close()

    asyncio.run(main())


def test_prefills_share_a_step_evenly() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        gate = threading.Event()
        runner.before = lambda step: None if step else gate.wait(10) and None
        e = engine(runner, alone_rows=256)
        first, long, short = await e.open(), await e.open(), await e.open()
        first.append([9, 9])
        long.append(list(range(900)))
        short.append(list(range(500, 540)))
        gate.set()
        await short.settle()
        done = max(i for i, s in enumerate(runner.steps) if any(c.seat is short._seat for c in s))
        begun = min(i for i, s in enumerate(runner.steps) if any(c.seat is long._seat for c in s))
        assert done <= begun + 1
        e.close()

    asyncio.run(main())


def test_equal_prefixes_are_computed_once() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        system = list(range(100, 200))
        sessions = [await e.open() for _ in range(4)]
        for i, session in enumerate(sessions):
            session.append([*system, 300 + i, 400 + i])
        await asyncio.gather(*(s.settle() for s in sessions))
        # The prefix once; of each session's own rows the newest is left for what comes.
        assert runner.rows == 100 + 4
        assert [s.cached for s in sessions] == [0, 100, 100, 100]
        for i, session in enumerate(sessions):
            assert await tokens(session, 1) == [401 + i]
            handle = session._seat.lease.extent.handle  # type: ignore[union-attr]
            assert handle[:102] == [*system, 300 + i, 400 + i]
        await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_who_is_cancelled_while_a_session_is_opened_leaves_none() -> None:
    async def main() -> None:
        e = engine(ScriptedRunner())
        one = await e.open()
        one.append([1, 2, 3])
        for make in (e.open, one.fork):
            opening = asyncio.create_task(make())
            await asyncio.sleep(0)
            # The engine has answered, and nobody has taken the answer yet.
            done = threading.Event()
            e.post(done.set)
            assert done.wait(10)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert (await e.state()).sessions == 1
        await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_a_closed_conversation_is_gone_on_with() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        first = await e.open()
        first.append(list(range(100, 150)))
        out = await tokens(first, 3)
        first.close(keep=True)
        second = await e.open()
        second.append([*range(100, 150), *out, 700, 701])
        before = runner.rows
        await tokens(second, 1)
        # The last token of the first was never computed.
        assert runner.rows - before == 3
        assert second.cached == 52
        second.close(keep=True)
        state = await e.state()
        # What the second continues is kept no more.
        assert state.kept_prefixes == 1
        e.close()

    asyncio.run(main())


def test_nobody_who_is_in_fails_for_want_of_room() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        # Four pages; two sessions that are promised two each, and want ten.
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
        assert (await e.state()).context_cuts > 0
        await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_who_has_work_does_not_wait_for_who_has_none() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        # Nowhere to park: an idle session's KV cannot be put away.
        e = engine(runner, kv_bytes=4 * 64, reserve_rows=128, host_bytes=0, disk_bytes=0)
        a, b = await e.open(), await e.open()
        a.append([1])
        await a.settle()
        assert await e.ask(lambda: e.scheduler._park_one(exclude=b._seat))
        b.append(list(range(240)))
        async with asyncio.timeout(20):
            # B takes all there is, and is idle then.
            assert len(await tokens(b, 10)) == 10
            assert (await e.state()).kv_bytes == 4 * 64
            assert len(await tokens(a, 100)) == 100
            await e.ask(e.scheduler.check_integrity)
            # What was given up is computed anew.
            assert len(await tokens(b, 10)) == 10
            await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_idle_sessions_make_room_and_come_back() -> None:
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
            await e.ask(e.scheduler.check_integrity)
        # Nothing was computed again but the one row whose successor was asked for.
        assert runner.rows - computed == 6 + 0
        e.close()

    asyncio.run(main())


def test_what_is_idle_for_long_is_parked() -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        runner = ScriptedRunner()
        e = Engine(runner, EngineSettings(kv_bytes=1 << 12, reserve_rows=64, park_after_s=60.0), clock=lambda: now)
        session = await e.open()
        session.append(list(range(50)))
        await session.settle()
        now = 59.0
        await e.ask(lambda: e.scheduler.rest(now))
        assert (await e.state()).parked == 0
        now = 61.0
        await e.ask(lambda: e.scheduler.rest(now))
        state = await e.state()
        assert (state.parked, state.kv_bytes, state.parked_bytes) == (1, 0, 49)
        assert await tokens(session, 2) == [50, 51]
        e.close()

    asyncio.run(main())


def test_of_a_closed_session_the_tokens_before_its_first_embedding_are_shared() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        first = await e.open()
        first.append(range(100))
        first.append_embeddings([[0.0]] * 5)
        first.append([7])
        await first.settle(whole=True)
        first.close(keep=True)
        (kept,) = await e.ask(lambda: list(e.scheduler.kept))
        assert (len(kept.rows.ids), kept.rows.spans) == (100, [])
        second = await e.open()
        second.append([*range(100), 5, 6])
        assert await tokens(second, 1) == [7]
        assert second.cached > 60
        # Nothing of one that begins with an embedding.
        known = await e.ask(lambda: list(e.scheduler.kept))
        third = await e.open()
        third.append_embeddings([[0.0]] * 5)
        await third.settle(whole=True)
        third.close(keep=True)
        assert await e.ask(lambda: list(e.scheduler.kept)) == known
        await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_a_context_is_cut_at_a_turn_and_goes_on() -> None:
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
        rows = await e.ask(lambda: session._seat.rows)
        assert len(rows.ids) < 256
        assert rows.ids[:10] == system
        # What follows the system prompt is whole turns, the newest last.
        assert rows.ids[10] in {100 * (t + 1) for t in range(8)}
        assert rows.ids[-1] == 839
        assert session.context_start == 10 + 330 - len(rows.ids)
        with pytest.raises(EngineError, match="left the context"):
            session.rollback(60)
        session.rollback(329)
        assert await tokens(session, 2) == [839, 840]
        # To where what has left ends: it stays left.
        session.rollback(session.context_start)
        assert await e.ask(lambda: (rows.length, rows.ids)) == (session.length, system)
        session.append([7])
        assert await tokens(session, 1) == [8]
        session.rollback(5)
        assert await tokens(session, 1) == [5]
        await e.ask(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


def test_a_reader_that_is_behind_is_waited_for() -> None:
    async def main() -> None:
        runner = ScriptedRunner()
        e = engine(runner)
        session = await e.open()
        session.append([1])
        stream = session.generate(Sampling(max_tokens=500))
        await anext(stream)
        for _ in range(400):
            await e.state()
        assert len(runner.steps) <= MAX_UNREAD + 2
        assert len([t async for t in stream]) == 499
        e.close()

    asyncio.run(main())


def test_what_cannot_be_is_said() -> None:
    async def main() -> None:
        e = engine(ScriptedRunner())
        session = await e.open()
        with pytest.raises(EngineError, match="nothing to continue"):
            await tokens(session, 1)
        session.append([1, 2])
        with pytest.raises(EngineError, match="cannot roll back"):
            session.rollback(3)
        with pytest.raises(ValueError, match="2 positions for 1 rows"):
            session.append([1], [(0, 0, 0), (1, 1, 1)])
        stream = session.generate(Sampling(max_tokens=5))
        await anext(stream)
        for call in (lambda: session.append([1]), lambda: session.rollback(0), session.pin):
            with pytest.raises(EngineError, match="generating"):
                call()
        await stream.aclose()
        session.close()
        session.close()
        with pytest.raises(EngineError, match="closed"):
            session.append([1])
        e.close()
        with pytest.raises(Refused, match="shutting down"):
            await e.open()

    asyncio.run(main())


def test_a_closed_engine_leaves_nobody_waiting() -> None:
    async def main() -> None:
        gate = threading.Event()
        e = engine(ScriptedRunner(before=lambda step: gate.wait(10) and None))
        session = await e.open()
        session.append([1])
        reading = asyncio.create_task(tokens(session, 5))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(e.close))
        while not e._closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        await closing
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(reading, 10)

    asyncio.run(main())
