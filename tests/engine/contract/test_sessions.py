"""The behaviour that all engines' sessions share: they take rows, return tokens, and take rows back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from antiphon.engine.api import Capabilities, Engine, Finish, Sampling, Session, Token
from antiphon.errors import EngineError, Refused
from tests.engine.contract.engines import SMALL_CONTEXT, EngineUnderTest


async def tokens(session: Session, count: int, **options: Any) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]


async def opened(engine: Engine, rows: Sequence[int]) -> Session:
    session = await engine.open()
    session.append(rows)
    return session


def some(subject: EngineUnderTest, seed: random.Random, count: int) -> list[int]:
    return [seed.choice(subject.words) for _ in range(count)]


def test_an_engine_states_its_facts(engine: Engine) -> None:
    assert engine.name
    assert isinstance(engine.capabilities, Capabilities)
    assert engine.context_rows > SMALL_CONTEXT
    assert engine.width > 0
    assert all(0 <= token < engine.vocabulary_size for token in engine.eos_tokens)


def test_the_context_is_as_small_as_the_settings_say(small_engine: Engine) -> None:
    assert small_engine.context_rows == SMALL_CONTEXT


def test_tokens_follow_the_rows_however_these_were_given(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(1), 30)
        whole, pieces = await opened(engine, rows), await engine.open()
        for at in range(0, 30, 7):
            pieces.append(rows[at : at + 7])
        await pieces.settle()
        expected = subject.likeliest(rows, 8)
        assert await tokens(whole, 8) == expected
        assert await tokens(pieces, 8) == expected
        assert whole.length == pieces.length == 38

    asyncio.run(main())


def test_a_generation_goes_on_behind_the_tokens_of_the_one_before(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(2), 12)
        session = await opened(engine, rows)
        first = await tokens(session, 3)
        more = await tokens(session, 3)
        given = some(subject, random.Random(3), 5)
        session.append(given)
        last = await tokens(session, 3)
        assert first + more == subject.likeliest(rows, 6)
        assert last == subject.likeliest([*rows, *first, *more, *given], 3)

    asyncio.run(main())


@pytest.mark.parametrize("number", range(3))
def test_sessions_side_by_side_do_not_disturb_each_other(engine: Engine, subject: EngineUnderTest, number: int) -> None:
    """Random rows, rollbacks and generations in four sessions, two of which begin alike."""
    seed = random.Random(number)

    async def main() -> None:
        alike = some(subject, seed, 20)
        held = [[*alike], [*alike, *some(subject, seed, 9)], some(subject, seed, 40), some(subject, seed, 1)]
        sessions = [await opened(engine, rows) for rows in held]

        async def generate(which: int, count: int) -> None:
            expected = subject.likeliest(held[which], count)
            assert await tokens(sessions[which], count) == expected
            held[which] += expected

        for _ in range(6):
            which = seed.randrange(4)
            session, rows = sessions[which], held[which]
            match seed.choice(("append", "rollback", "generate")):
                case "append":
                    more = some(subject, seed, seed.randrange(1, 20))
                    session.append(more)
                    rows += more
                case "rollback":
                    position = seed.randrange(1, len(rows) + 1)
                    session.rollback(position)
                    del rows[position:]
                case _:
                    await asyncio.gather(*(generate(i, 3) for i in seed.sample(range(4), 2)))
        await asyncio.gather(*(generate(i, 2) for i in range(4)))
        assert [s.length for s in sessions] == [len(rows) for rows in held]

    asyncio.run(main())


def test_finish_says_why_a_generation_ended(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(4), 10)
        session, expected = await opened(engine, rows), subject.likeliest(rows, 4)
        assert session.finish is None
        assert await tokens(session, 4) == expected
        assert session.finish is Finish.LENGTH
        session.rollback(10)
        stop = expected[2]
        cut = expected[: expected.index(stop) + 1]
        # The stop token becomes a row like the others.
        assert await tokens(session, 9, stop=frozenset((stop,))) == cut
        assert session.finish is Finish.STOP
        assert session.length == 10 + len(cut)
        async with aclosing(session.generate(Sampling(max_tokens=9))) as stream:
            await anext(stream)
            assert session.finish is None
        assert session.finish is Finish.CANCELLED

    asyncio.run(main())


@pytest.mark.parametrize("read", [0, 1, 3])
def test_when_a_generation_is_closed_the_session_has_just_what_was_read(
    engine: Engine, subject: EngineUnderTest, read: int
) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(5), 10)
        session = await opened(engine, rows)
        async with aclosing(session.generate(Sampling(max_tokens=40))) as stream:
            got = [(await anext(stream)).id for _ in range(read)]
        assert session.length == 10 + read
        assert got + await tokens(session, 2) == subject.likeliest(rows, read + 2)

    asyncio.run(main())


def test_when_a_reading_task_is_cancelled_its_generation_is_too(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(6), 10)
        session, got, begun = await opened(engine, rows), list[int](), asyncio.Event()

        async def read() -> None:
            async with aclosing(session.generate(Sampling(max_tokens=100))) as stream:
                async for token in stream:
                    got.append(token.id)
                    if len(got) == 3:
                        begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert session.length == 10 + len(got)
        assert (await engine.state()).generating == 0
        assert await tokens(session, 1) == subject.likeliest([*rows, *got], 1)

    asyncio.run(main())


def test_tokens_are_collected_at_once(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(14), 10)
        session, expected = await opened(engine, rows), subject.likeliest(rows, 20)
        assert [token.id for token in await session.collect(Sampling(max_tokens=20))] == expected
        assert (session.length, session.finish) == (30, Finish.LENGTH)
        session.rollback(10)
        stop = expected[2]
        cut = expected[: expected.index(stop) + 1]
        found = await session.collect(Sampling(max_tokens=9, stop=frozenset((stop,))))
        assert [token.id for token in found] == cut
        assert (session.length, session.finish) == (10 + len(cut), Finish.STOP)

    asyncio.run(main())


def test_a_collection_ends_after_the_group_that_its_caller_wants(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(15), 10)
        session, expected = await opened(engine, rows), subject.likeliest(rows, 14)
        seen = list[list[int]]()

        def until(tokens: Sequence[Token]) -> bool:
            seen.append([token.id for token in tokens])
            return len(tokens) == 12

        found = await session.collect(Sampling(max_tokens=40), until=until, group=4)
        assert seen == [expected[:4], expected[:8], expected[:12]]
        assert [token.id for token in found] == expected[:12]
        assert (session.length, session.finish) == (22, Finish.CANCELLED)
        assert await tokens(session, 2) == expected[12:]

    asyncio.run(main())


@pytest.mark.parametrize("raises", [False, True])
def test_when_a_collection_is_cancelled_or_its_caller_raises_then_no_token_stays(
    engine: Engine, subject: EngineUnderTest, raises: bool
) -> None:
    def until(tokens: Sequence[Token]) -> bool:
        raise LookupError

    async def main() -> None:
        rows = some(subject, random.Random(16), 10)
        session = await opened(engine, rows)
        collecting = session.collect(Sampling(max_tokens=300), until=until if raises else None, group=3)
        task = asyncio.create_task(collecting)  # type: ignore[arg-type]
        if not raises:
            await asyncio.sleep(0)
            task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, LookupError if raises else asyncio.CancelledError)
        assert (session.length, session.finish) == (10, Finish.CANCELLED)
        assert await tokens(session, 2) == subject.likeliest(rows, 2)

    asyncio.run(main())


def test_a_reader_that_is_far_behind_still_gets_every_token(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(7), 5)
        session = await opened(engine, rows)
        stream = session.generate(Sampling(max_tokens=90))
        got = [(await anext(stream)).id]
        for _ in range(20):
            await engine.state()
        got += [token.id async for token in stream]
        assert got == subject.likeliest(rows, 90)

    asyncio.run(main())


def test_the_number_of_sessions_is_known(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        one, other = await opened(engine, some(subject, random.Random(8), 5)), await engine.open()
        assert (await engine.state()).sessions == 2
        stream = one.generate(Sampling(max_tokens=500))
        await anext(stream)
        assert (await engine.state()).generating == 1
        await stream.aclose()
        one.close()
        one.close()
        other.close(keep=True)
        assert (await engine.state()).sessions == 0

    asyncio.run(main())


def test_when_opening_is_cancelled_no_session_is_left(engine: Engine) -> None:
    async def main() -> None:
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert (await engine.state()).sessions == 0

    asyncio.run(main())


def test_a_later_session_that_begins_like_a_kept_one_has_the_same_tokens(
    engine: Engine, subject: EngineUnderTest
) -> None:
    async def main() -> None:
        rows = some(subject, random.Random(9), 30)
        first = await opened(engine, rows)
        expected = subject.likeliest(rows, 5)
        assert await tokens(first, 5) == expected
        first.close(keep=True)
        second = await opened(engine, rows)
        assert second.cached == 0
        assert await tokens(second, 5) == expected
        assert second.cached < 30

    asyncio.run(main())


def test_when_a_context_is_full_the_pinned_rows_and_the_newest_stay(
    small_engine: Engine, subject: EngineUnderTest
) -> None:
    async def main() -> None:
        seed = random.Random(10)
        rows = some(subject, seed, 6)
        session = await opened(small_engine, rows)
        session.pin()
        for _ in range(12):
            more = some(subject, seed, 14)
            session.start_turn()
            session.append(more)
            rows += more
            found = await tokens(session, 1)
            start = session.context_start
            assert found == subject.likeliest([*rows[:6], *rows[start:]], 1)
            rows += found
        assert session.length == len(rows) == 6 + 12 * 15
        assert start > 6 + 15
        with pytest.raises(EngineError, match="left the context"):
            session.rollback(start - 1)
        assert session.length == len(rows)
        # A rollback to a later row leaves dropped rows dropped. A rollback to a row before them forgets them.
        session.rollback(len(rows) - 1)
        assert await tokens(session, 1) == found
        session.rollback(4)
        assert await tokens(session, 2) == subject.likeliest(rows[:4], 2)

    asyncio.run(main())


def test_when_a_call_is_not_possible_it_raises(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        session = await engine.open()
        with pytest.raises(EngineError, match="nothing to continue"):
            await tokens(session, 1)
        session.append(some(subject, random.Random(11), 2))
        for position in (-1, 3):
            with pytest.raises(EngineError, match="cannot roll back"):
                session.rollback(position)
        stream = session.generate(Sampling(max_tokens=5))
        await anext(stream)
        for call in (lambda: session.append([1]), lambda: session.rollback(0), session.pin, session.start_turn):
            with pytest.raises(EngineError, match="generating"):
                call()
        with pytest.raises(EngineError, match="generating"):
            await tokens(session, 1)
        await stream.aclose()
        assert session.length == 3

    asyncio.run(main())


def test_when_a_session_is_closed_it_cannot_be_used(engine: Engine, subject: EngineUnderTest) -> None:
    async def main() -> None:
        session = await opened(engine, some(subject, random.Random(12), 2))
        session.close()
        for call in (lambda: session.append([1]), lambda: session.rollback(0), session.pin, session.start_turn):
            with pytest.raises(EngineError, match="closed"):
                call()
        with pytest.raises(EngineError, match="closed"):
            await tokens(session, 1)
        with pytest.raises(EngineError, match="closed"):
            await session.settle()

    asyncio.run(main())


def test_when_the_engine_is_closed_a_reader_gets_an_error_and_later_calls_are_refused(
    engine: Engine, subject: EngineUnderTest
) -> None:
    async def rest(stream: AsyncGenerator[Token, None]) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        session = await opened(engine, some(subject, random.Random(13), 2))
        stream = session.generate(Sampling(max_tokens=100_000))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(rest(stream), 30)
        assert session.finish is None
        with pytest.raises(Refused, match="shutting down"):
            await engine.open()
        with pytest.raises(Refused, match="shutting down"):
            await engine.state()
        with pytest.raises(Refused, match="shutting down"):
            session.append([1])
        session.close()

    asyncio.run(main())
