"""Sessions that an SGLang server holds: which rows are sent, and how the sessions end.

The rest of the contract, and the faults, are tested with both kinds of servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from antiphon.engine.api import Sampling
from antiphon.remote.engine.engine import VllmEngine, VllmSession
from antiphon.remote.engine.wires import MAX_REQUESTS
from tests.engine.contract.engines import tiny_tokenizer
from tests.engine.local import tiny
from tests.remote.engine.scripted_sglang import ScriptedSglang
from tests.remote.engine.test_faults import after, engine, tokens

V = tiny.VOCABULARY


@pytest.fixture
def server() -> Iterator[ScriptedSglang]:
    made = ScriptedSglang(tiny_tokenizer(), V)
    yield made
    made.stop()


async def closed(held: VllmEngine, server: ScriptedSglang) -> None:
    """Wait until the server has closed all sessions."""
    while held.server.tasks or server.sessions:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def new_rows(server: ScriptedSglang) -> list[list[int]]:
    return [body["input_ids"] for body in server.sent]


def test_only_rows_that_are_new_are_sent(server: ScriptedSglang) -> None:
    held = engine(server)

    async def main() -> None:
        session = await held.open()
        session.append(list(range(20)))
        assert await tokens(session, 4) == after(19, 4)
        session.append([1, 2])
        assert await tokens(session, 4) == after(2, 4)
        # Rolled back into the middle of the first answer, as after an interruption.
        session.rollback(22)
        session.append([3])
        assert await tokens(session, 3) == after(3, 3)
        assert new_rows(server) == [list(range(20)), [1, 2], [3]]
        assert server.prompts == [
            list(range(20)),
            [*range(20), *after(19, 4), 1, 2],
            [*range(20), *after(19, 2), 3],
        ]
        session.close()
        await asyncio.wait_for(closed(held, server), 10)

    asyncio.run(main())


def test_a_token_that_begins_texts_stays_where_it_is_added_to_a_session(server: ScriptedSglang) -> None:
    # SmolLM2's chat begins each message with it.
    held, begins = engine(server), server.bos

    async def main() -> None:
        session = await held.open()
        session.append([begins, 1, 2])
        first = await tokens(session, 2)
        session.append([begins, 5])
        assert await tokens(session, 2) == after(5, 2)
        assert server.prompts[-1] == [begins, 1, 2, *first, begins, 5]

    asyncio.run(main())


def test_an_answer_that_was_given_up_leaves_its_rows(server: ScriptedSglang) -> None:
    held = engine(server)
    server.token_s = 0.01

    async def main() -> None:
        session = await held.open()
        session.append([5])
        answer = session.generate(Sampling(max_tokens=50))
        given = [(await anext(answer)).id for _ in range(3)]
        await answer.aclose()
        assert given == after(5, 3)
        session.append([9])
        assert await tokens(session, 2) == after(9, 2)
        assert server.prompts[-1] == [5, *given, 9]
        assert new_rows(server)[-1] == [9]

    asyncio.run(main())


def test_a_long_session_does_not_grow_without_bound_at_the_server(server: ScriptedSglang) -> None:
    held = engine(server)

    async def main() -> None:
        session = await held.open()
        for number in range(MAX_REQUESTS + 10):
            session.append([number % (V - 1)])
            await tokens(session, 1)
        (requests,) = server.sessions.values()
        assert len(requests) <= MAX_REQUESTS

    asyncio.run(main())


def test_a_session_that_the_server_has_lost_goes_on_in_a_new_one(server: ScriptedSglang) -> None:
    held = engine(server)

    async def main() -> VllmSession:
        session = await held.open()
        session.append([5, 6])
        assert await tokens(session, 2) == after(6, 2)
        server.restart(server.model)
        session.append([9])
        assert await tokens(session, 2) == after(9, 2)
        assert new_rows(server)[-1] == [5, 6, *after(6, 2), 9]
        return session

    asyncio.run(main())


def test_a_fork_has_a_session_of_its_own(server: ScriptedSglang) -> None:
    held = engine(server)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        await tokens(session, 2)
        other = await session.fork()
        assert await tokens(other, 2) == after(7, 2)
        session.append([1])
        assert await tokens(session, 2) == after(1, 2)
        assert server.prompts[-1] == [5, 6, 7, 1]
        assert len(server.sessions) == 2

    asyncio.run(main())


def test_sessions_that_a_restart_has_lost_are_no_failures_of_the_server(server: ScriptedSglang) -> None:
    held = engine(server)

    async def main() -> None:
        sessions = [await held.open() for _ in range(5)]
        for session in sessions:
            session.append([5])
            await tokens(session, 2)
        server.restart(server.model)
        for session in sessions:
            assert await tokens(session, 2) == after(7, 2)
        (endpoint,) = held.server.pool.all
        assert endpoint.failures == 0

    asyncio.run(main())
