"""Programs that run within the step: the next rows that they make, and sessions that wait for a row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from antiphon.engine.api import EngineSettings, Finish, Sampling, Token
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.generation import Generation
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.sampling import choose_tokens
from antiphon.errors import ModelError
from tests.engine.local.scripted import ScriptedRunner


class Doubling:
    """Makes the numbers (t, h) and the next row [2 * t]: t is the likeliest token, h the row's hidden state.

    `ready`: whether the next row is available together with its token. `fails`: the token after which no row can be
    made. `bad`: the token instead of which NO_TOKEN is chosen.
    """

    def __init__(self, *, ready: bool = True, fails: int | None = None, bad: int | None = None) -> None:
        self.ready, self.fails, self.bad = ready, fails, bad
        self.newest = 0
        self.batches = list[int]()

    @staticmethod
    def run(programs: Sequence[Doubling], logits: Any, hidden: Any) -> Any:
        tokens = logits.argmax(1)
        for program, token in zip(programs, tokens.tolist(), strict=True):
            program.batches.append(len(programs))
            tokens = torch.where(tokens == (program.bad if token == program.bad else -2), NO_TOKEN, tokens)
        return torch.stack((tokens, hidden[:, 0].long()), 1)

    def accept(self, numbers: Sequence[int]) -> int:
        if NO_TOKEN in numbers:
            raise ModelError("the model's output is not a number")
        self.newest = numbers[0]
        return self.newest

    def next_row(self) -> Any | None:
        if self.newest == self.fails:
            raise ModelError("no row can be made")
        return [[2.0 * self.newest]] if self.ready else None


def run(act: Any, settings: EngineSettings | None = None) -> Any:
    async def main() -> Any:
        engine = LocalEngine(ScriptedRunner(), settings or EngineSettings())
        try:
            return await asyncio.wait_for(act(engine), 60)
        finally:
            engine.close()

    return asyncio.run(main())


async def generated(engine: LocalEngine, program: Doubling, **options: Any) -> list[Token]:
    session = await engine.open()
    session.append([1])
    try:
        return [t async for t in session.generate(Sampling(program=program, **options))]
    finally:
        session.close()


def test_each_row_is_what_the_program_makes_of_the_token_before() -> None:
    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1])
        tokens = [t async for t in session.generate(Sampling(max_tokens=4, program=Doubling()))]
        # The token after row r is r + 1.
        assert [(t.id, list(t.numbers)) for t in tokens] == [(2, [2, 1]), (5, [5, 4]), (11, [11, 10]), (23, [23, 22])]
        assert (session.finish, session.length) == (Finish.LENGTH, 5)
        # The next generation continues after the last token, whose own row is kept.
        assert [t.id async for t in session.generate(Sampling(max_tokens=2))] == [24, 25]
        stopping = Sampling(max_tokens=9, stop=frozenset((53,)), program=Doubling())
        assert [t.id async for t in session.generate(stopping)] == [26, 53]
        assert session.finish is Finish.STOP
        session.close()

    run(act)


def test_a_session_whose_row_has_not_come_waits_and_the_others_go_on() -> None:
    async def act(engine: LocalEngine) -> None:
        late = Doubling(ready=False)
        session = await engine.open()
        session.append([1])
        async with aclosing(session.generate(Sampling(max_tokens=3, program=late))) as tokens:
            assert (await anext(tokens)).id == 2
            assert [t.id for t in await generated(engine, Doubling(), max_tokens=3)] == [2, 5, 11]
            # While the session waits, it takes no step and may be parked.
            scheduled = session.scheduled
            assert await engine.thread.call(lambda: (scheduled.ready, scheduled.rows.busy)) == (False, False)
            assert (await engine.state()).generating == 1
            steps = engine.runner.stats.steps
            await engine.thread.call(lambda: None)
            assert engine.runner.stats.steps == steps

            def come() -> None:
                late.ready = True

            engine.thread.post(come)
            assert [t.id async for t in tokens] == [5, 11]
        session.close()

    run(act)


def test_a_session_that_waits_is_parked_for_another_and_comes_back() -> None:
    async def act(engine: LocalEngine) -> None:
        late = Doubling(ready=False)
        session = await engine.open(16)
        session.append([1])
        async with aclosing(session.generate(Sampling(max_tokens=2, program=late))) as tokens:
            assert (await anext(tokens)).id == 2
            other = await engine.open(engine.context_rows)
            assert (await engine.state()).parked == 1
            other.close()

            def come() -> None:
                late.ready = True

            engine.thread.post(come)
            assert [t.id async for t in tokens] == [5]
        session.close()

    run(act, EngineSettings(kv_bytes=256))


def test_when_its_reader_leaves_while_it_waits_then_the_rows_it_read_stay() -> None:
    async def act(engine: LocalEngine) -> None:
        session = await engine.open()
        session.append([1])
        async with aclosing(session.generate(Sampling(max_tokens=3, program=Doubling(ready=False)))) as tokens:
            await anext(tokens)
        assert (session.length, session.finish) == (2, Finish.CANCELLED)
        assert [t.id async for t in session.generate(Sampling(max_tokens=1))] == [3]
        session.rollback(1)
        assert [t.id async for t in session.generate(Sampling(max_tokens=1))] == [2]
        session.close()

    run(act)


@pytest.mark.parametrize(
    ("failing", "words"), [({"fails": 5}, "no row can be made"), ({"bad": 5}, "not a number")], ids=["row", "numbers"]
)
def test_a_program_that_fails_ends_its_own_generation(failing: dict[str, int], words: str) -> None:
    async def act(engine: LocalEngine) -> None:
        good = [Doubling() for _ in range(3)]
        done = await asyncio.gather(
            *(generated(engine, program, max_tokens=5) for program in (*good, Doubling(**failing))),
            return_exceptions=True,
        )
        for tokens in done[:3]:
            assert [t.id for t in tokens] == [2, 5, 11, 23, 47]
        assert words in str(done[3])
        assert (await engine.state()).sessions == 0

    run(act)


def test_a_program_whose_decoder_has_no_hidden_states_fails() -> None:
    generation = Generation(Sampling(program=Doubling()), lambda _, __: None, 0)
    (error,) = choose_tokens(torch.zeros(1, 5), [(generation, ())])
    assert isinstance(error, ModelError)
    assert "hidden states" in str(error)
