"""The behaviour of engines for each capability, including the error that names a missing one."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from antiphon.engine.api import Capabilities, Engine, Grammar, Sampling, Session
from antiphon.errors import CapabilityError, EngineError, GrammarError
from tests.engine.contract.engines import EngineUnderTest, needs
from tests.engine.contract.test_sessions import opened, some, tokens


class Chosen:
    """A Chooser of given tokens. `seen`: for each choice, the number of logits and the likeliest token."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted, self.seen = wanted, list[tuple[int, int]]()

    @staticmethod
    def choose(choosers: Sequence[Chosen], logits: Any) -> Any:
        for chooser, row in zip(choosers, logits, strict=True):
            chooser.seen.append((len(row), int(row.argmax())))
        return logits.argmax(1)

    def accept(self, chosen: int) -> int:
        assert chosen == self.seen[-1][1]
        return self.wanted[len(self.seen) - 1]


YES = Grammar("json_schema", json.dumps({"type": "boolean"}))


async def give_embeddings(session: Session) -> None:
    session.append_embeddings([[0.0]])


async def evict(session: Session) -> None:
    session.evict(1)


async def fork(session: Session) -> None:
    await session.fork()


def generate(**options: Any) -> Callable[[Session], Awaitable[object]]:
    return lambda session: tokens(session, 1, **options)


ASKED: dict[Capabilities, Callable[[Session], Awaitable[object]]] = {
    Capabilities.EMBEDDING_ROWS: give_embeddings,
    Capabilities.EVICT: evict,
    Capabilities.FORK: fork,
    Capabilities.HIDDEN_STATES: generate(hidden=True),
    Capabilities.CHOOSER: generate(chooser=Chosen([0])),
    Capabilities.GRAMMAR: generate(grammar=YES),
}


@pytest.mark.parametrize("capability", ASKED, ids=lambda c: c.name)
def test_when_an_engine_is_asked_for_what_it_cannot_do_the_error_names_it(
    engine: Engine, subject: EngineUnderTest, capability: Capabilities
) -> None:
    if capability in engine.capabilities:
        pytest.skip(f"{engine.name} has {capability.name}")

    async def main() -> None:
        rows = some(subject, random.Random(1), 4)
        session = await opened(engine, rows)
        with pytest.raises(CapabilityError, match=f"'{engine.name}' has no {capability.name}"):
            await ASKED[capability](session)
        # The session remains usable.
        assert await tokens(session, 2) == subject.likeliest(rows, 2)

    asyncio.run(main())


def test_rows_given_as_embeddings_are_rows_like_tokens(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.EMBEDDING_ROWS)

    async def main() -> None:
        rows = some(subject, random.Random(2), 20)
        session = await opened(engine, rows[:5])
        session.append_embeddings(subject.embed(rows[5:15]))
        session.append(rows[15:])
        expected = subject.likeliest(rows, 4)
        assert session.length == 20
        assert await tokens(session, 4) == expected
        # A rollback into the embeddings keeps some of them.
        session.rollback(11)
        assert await tokens(session, 3) == subject.likeliest(rows[:11], 3)
        session.rollback(0)
        session.append_embeddings(subject.embed(rows))
        assert await tokens(session, 4) == expected

    asyncio.run(main())


def test_embeddings_of_another_width_and_too_few_positions_are_refused(
    engine: Engine, subject: EngineUnderTest
) -> None:
    needs(engine, Capabilities.EMBEDDING_ROWS)

    async def main() -> None:
        rows = some(subject, random.Random(3), 3)
        session = await opened(engine, rows)
        with pytest.raises(ValueError, match="embeddings are"):
            session.append_embeddings([[0.0] * (engine.width + 1)])
        with pytest.raises(ValueError, match="2 positions for 1 rows"):
            session.append([1], [(0, 0, 0), (1, 1, 1)])
        with pytest.raises(ValueError, match="1 positions for 2 rows"):
            session.append_embeddings(subject.embed(rows[:2]), [(0, 0, 0)])
        assert session.length == 3
        assert await tokens(session, 2) == subject.likeliest(rows, 2)

    asyncio.run(main())


def test_both_branches_of_a_fork_go_on_by_themselves(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.FORK)

    async def main() -> None:
        seed = random.Random(4)
        rows = some(subject, seed, 20)
        session = await opened(engine, rows)
        rows += await tokens(session, 2)
        twin = await session.fork()
        assert twin.length == session.length == 22
        mine, its = some(subject, seed, 5), some(subject, seed, 5)
        session.append(mine)
        twin.rollback(15)
        twin.append(its)
        found = await asyncio.gather(tokens(session, 4), tokens(twin, 4))
        assert found == [subject.likeliest([*rows, *mine], 4), subject.likeliest([*rows[:15], *its], 4)]
        session.close()
        assert await tokens(twin, 1) == subject.likeliest([*rows[:15], *its, *found[1]], 1)
        assert (await engine.state()).sessions == 1

    asyncio.run(main())


def test_evicted_rows_are_counted_on_and_cannot_be_gone_back_to(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.EVICT)

    async def main() -> None:
        rows = some(subject, random.Random(5), 30)
        session = await opened(engine, rows[:4])
        session.pin()
        session.append(rows[4:])
        await session.settle(include_newest=True)
        session.evict(10)
        await tokens(session, 2)
        assert session.length == 32
        assert session.context_start == 14
        with pytest.raises(EngineError, match="left the context"):
            session.rollback(13)
        session.rollback(20)
        session.evict(6)
        # Only the pinned rows are left, and they were computed before the others existed.
        assert await tokens(session, 3) == subject.likeliest(rows[:4], 3)

    asyncio.run(main())


def test_tokens_carry_the_hidden_state_they_were_sampled_from(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.HIDDEN_STATES)

    async def main() -> None:
        session = await opened(engine, some(subject, random.Random(6), 8))
        stream = session.generate(Sampling(max_tokens=3, hidden=True))
        assert [len(token.hidden) async for token in stream] == [engine.width] * 3
        stream = session.generate(Sampling(max_tokens=1))
        assert [token.hidden async for token in stream] == [None]

    asyncio.run(main())


def test_a_chooser_gets_the_logits_and_chooses(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.CHOOSER)
    wanted = [subject.words[5], subject.words[7], subject.words[6]]
    chooser = Chosen(wanted)

    async def main() -> None:
        rows = some(subject, random.Random(7), 8)
        session = await opened(engine, rows)
        # Nothing else shapes the logits.
        assert await tokens(session, 3, chooser=chooser, bias={subject.words[0]: 1e6}) == wanted
        likeliest = [subject.likeliest([*rows, *wanted[:i]], 1)[0] for i in range(3)]
        assert chooser.seen == [(engine.vocabulary_size, token) for token in likeliest]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (YES, {"true", "false"}),
        (Grammar("json_schema", json.dumps({"enum": ["ab", "cd"]})), {'"ab"', '"cd"'}),
        (Grammar("lark", 'start: "a" rest\nrest: "b" | "c"\n'), {"ab", "ac"}),
    ],
)
def test_a_whole_text_keeps_to_its_grammar_and_then_stops(
    engine: Engine, subject: EngineUnderTest, grammar: Grammar, texts: set[str]
) -> None:
    needs(engine, Capabilities.GRAMMAR)
    tokenizer = subject.tokenizer
    assert tokenizer is not None

    async def main() -> None:
        rows = some(subject, random.Random(8), 8)
        for temperature in (0.0, 1.5):
            session = await opened(engine, rows)
            stop = frozenset((subject.end,))
            if temperature:
                await engine.prepare_grammar(grammar, stop)
            found = await tokens(session, 20, grammar=grammar, stop=stop, temperature=temperature, seed=1)
            assert found[-1] == subject.end
            assert tokenizer.decode(found[:-1]) in texts
            session.close()

    asyncio.run(main())


def test_behind_a_trigger_the_text_keeps_to_the_grammar_each_time(engine: Engine, subject: EngineUnderTest) -> None:
    needs(engine, Capabilities.GRAMMAR)
    tokenizer = subject.tokenizer
    assert tokenizer is not None
    (trigger,) = tokenizer.encode("x").ids
    grammar = Grammar("json_schema", YES.text, trigger="x")

    async def main() -> None:
        session = await opened(engine, some(subject, random.Random(9), 8))
        stop = frozenset((subject.end,))
        # Where the grammar allows any text, the trigger is by far the likeliest token.
        found = await tokens(session, 30, grammar=grammar, stop=stop, bias={trigger: 1e4})
        text = tokenizer.decode(found)
        assert re.fullmatch(r"(x(true|false)){2,}(x[a-z]*)?", text)

    asyncio.run(main())


@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", '{"type": "no such type"}'), Grammar("lark", "start: ???", trigger="x")]
)
def test_a_grammar_that_is_none_is_refused_and_the_session_goes_on(
    engine: Engine, subject: EngineUnderTest, grammar: Grammar
) -> None:
    needs(engine, Capabilities.GRAMMAR)

    async def main() -> None:
        rows = some(subject, random.Random(10), 8)
        session = await opened(engine, rows)
        with pytest.raises(GrammarError):
            await engine.prepare_grammar(grammar, frozenset((subject.end,)))
        with pytest.raises(GrammarError):
            await tokens(session, 5, grammar=grammar, stop=frozenset((subject.end,)))
        assert session.finish is None
        assert await tokens(session, 2) == subject.likeliest(rows, 2)

    asyncio.run(main())
