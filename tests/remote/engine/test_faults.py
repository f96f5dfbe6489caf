"""Servers that refuse, hang, send garbage, die in the middle of an answer or come back changed."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import pytest
from tokenizers import Tokenizer

from antiphon.engine.api import Grammar, Sampling
from antiphon.errors import EngineError, ModelError, Refused, RemoteError
from antiphon.remote.engine import EngineServers
from antiphon.remote.engine.engine import VllmEngine, VllmSession
from antiphon.remote.engine.server import ModelFacts
from tests.engine.contract.engines import tiny_tokenizer
from tests.engine.local import tiny
from tests.remote.engine.scripted_sglang import ScriptedSglang
from tests.remote.engine.scripted_vllm import ScriptedVllm

V = tiny.VOCABULARY
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))

MakeServer = Callable[..., ScriptedVllm]


@pytest.fixture(params=[ScriptedVllm, ScriptedSglang])
def server(request: pytest.FixtureRequest) -> Iterator[MakeServer]:
    made: list[ScriptedVllm] = []

    def make(**options: object) -> ScriptedVllm:
        made.append(request.param(tiny_tokenizer(), V, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def engine(*servers: ScriptedVllm, first_s: float = 20.0, next_s: float = 20.0, key: str = "") -> VllmEngine:
    urls = tuple(one.url for one in servers)
    facts = ModelFacts(4096, V, 1, frozenset((V - 1,)))
    kind = "sglang" if isinstance(servers[0], ScriptedSglang) else "vllm"
    return VllmEngine(EngineServers(kind, urls, key, first_s, next_s), tiny_tokenizer(), facts)


async def tokens(session: VllmSession, count: int, **options: object) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]  # type: ignore[arg-type]


def after(row: int, count: int) -> list[int]:
    return [(row + 1 + i) % V for i in range(count)]


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("kind", ["cut", "garbage", "miscount", "error", "no ids"])
def test_when_an_answer_breaks_then_another_server_goes_on_and_no_token_is_lost_or_doubled(
    server: MakeServer, kind: str, number: int
) -> None:
    one, other = server(), server()
    held = engine(one, other)

    async def main() -> None:
        session = await held.open()
        session.append([5, 6, 7])
        for broken in (one, other):
            broken.faults.append((kind, number))
        # The first server breaks off, and so does the one that continues.
        other.faults.extend([("fine", 0)])
        assert await tokens(session, 20) == after(7, 20)
        assert session.length == 23
        # The session is still usable, and its rows are those that were read.
        session.append([1])
        assert await tokens(session, 2) == [2, 3]

    asyncio.run(main())
    for prompt in one.prompts + other.prompts:
        assert prompt in ([5, 6, 7, *after(7, n)] for n in range(20)) or prompt == [5, 6, 7, *after(7, 20), 1]


def test_when_the_only_server_breaks_off_then_it_is_asked_again(server: MakeServer) -> None:
    one = server()
    held = engine(one)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.append(("cut", 4))
        assert await tokens(session, 9) == after(5, 9)

    asyncio.run(main())
    assert one.prompts == [[5], [5, *after(5, 4)]]


def test_when_the_only_server_is_killed_then_the_generation_fails_and_the_session_goes_on_after_its_return(
    server: MakeServer,
) -> None:
    one = server()
    held = engine(one)
    one.token_s = 0.002

    async def main() -> None:
        session = await held.open()
        session.append([5])
        got: list[int] = []
        with pytest.raises(RemoteError):
            async for token in session.generate(Sampling(max_tokens=500)):
                got.append(token.id)
                if len(got) == 3:
                    one.kill()
        assert session.finish is None
        assert session.length == 1 + len(got)
        one.start()
        session.append([9])
        assert await tokens(session, 3) == [10, 11, 12]
        # The server came back empty, and got all rows.
        assert one.prompts[-1] == [5, *got, 9]

    asyncio.run(main())


def test_when_a_server_is_killed_in_mid_answer_then_the_other_one_goes_on(server: MakeServer) -> None:
    one, other = server(), server()
    held = engine(one, other)
    one.token_s = other.token_s = 0.002

    async def main() -> None:
        sessions = [await held.open() for _ in range(4)]
        for session in sessions:
            session.append([5])

        async def read(session: VllmSession, *, kills: bool) -> list[int]:
            got = []
            async for token in session.generate(Sampling(max_tokens=60)):
                got.append(token.id)
                if kills and len(got) == 10:
                    one.kill()
            return got

        found = await asyncio.gather(*(read(s, kills=i == 0) for i, s in enumerate(sessions)))
        assert found == [after(5, 60)] * 4

    asyncio.run(main())
    assert {endpoint.failures for endpoint in held.server.pool.all} == {0, held.server.pool.all[0].failures}


def test_when_a_server_hangs_then_the_other_one_is_asked_and_others_are_not_slowed(server: MakeServer) -> None:
    one, other = server(), server()
    held = engine(one, other, first_s=0.4, next_s=0.2)

    async def main() -> None:
        sessions = [await held.open() for _ in range(2)]
        for session in sessions:
            session.append([5])
            await tokens(session, 1)
        one.faults.append(("hang", 0))
        other.faults.append(("hang", 3))
        found = await asyncio.gather(*(tokens(session, 12) for session in sessions))
        assert found == [after(6, 12)] * 2

    asyncio.run(main())
    # An abandoned request is closed, so that the server computes nothing for it.
    assert one.aborted == other.aborted == 1


def test_when_the_only_server_hangs_then_the_generation_ends_with_an_error(server: MakeServer) -> None:
    one = server()
    held = engine(one, first_s=0.5, next_s=0.5)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.extend([("hang", 2), ("hang", 0)])
        with pytest.raises(RemoteError, match="silent"):
            await tokens(session, 12)
        assert session.length == 3
        assert await tokens(session, 2) == after(7, 2)

    asyncio.run(main())


@pytest.mark.parametrize("status", [429, 503])
def test_when_a_server_is_full_then_the_other_one_is_asked(server: MakeServer, status: int) -> None:
    one, other = server(), server()
    held = engine(one, other)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.append(("refuse", status))
        other.faults.append(("refuse", status))
        # Both servers are full at first, and then have room.
        assert await tokens(session, 4) == after(5, 4)

    asyncio.run(main())


def test_when_all_servers_stay_full_then_the_generation_is_refused(server: MakeServer) -> None:
    one = server()
    held = engine(one)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.extend([("refuse", 503)] * 9)
        with pytest.raises(Refused):
            await tokens(session, 4)
        assert session.finish is None
        one.faults.clear()
        assert await tokens(session, 4) == after(5, 4)

    asyncio.run(main())


def test_when_a_server_comes_back_with_another_model_then_it_is_not_asked(
    server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = server(), server()
    held = engine(one, other)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        assert await tokens(session, 2) == after(5, 2)
        used = one if one.requests else other
        used.restart("another")
        assert await tokens(session, 5) == after(7, 5)
        # It knew neither the model nor the session, and is verified again before the next request.
        count = len(used.requests)
        assert await tokens(session, 5) == after(12, 5)
        assert len(used.requests) == count

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert re.search("status 404|now serves another", caplog.text)


def test_a_server_with_another_tokenizer_or_key_stops_the_start(server: MakeServer) -> None:
    one = server()
    one.tokenizer = Tokenizer.from_str(one.tokenizer.to_str())
    one.tokenizer.add_tokens(["Hello"])
    with pytest.raises(ModelError, match="another tokenizer"):
        engine(one)
    keyed = server()
    keyed.key = "sk-right"
    with pytest.raises(ModelError, match="does not accept the key") as caught:
        engine(keyed, key="sk-wrong")
    assert "sk-wrong" not in str(caught.value)
    engine(keyed, key="sk-right")


def test_a_server_that_is_not_there_at_the_start_is_asked_once_it_is(
    server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    one.kill()
    with caplog.at_level(logging.WARNING):
        held = engine(one)
    assert "does not say what it serves" in caplog.text
    one.start()

    async def main() -> None:
        session = await held.open()
        session.append([5])
        assert await tokens(session, 3) == after(5, 3)

    asyncio.run(main())


def test_no_session_is_told_rows_of_another_owner(server: MakeServer) -> None:
    one = server()
    held = engine(one)
    rows = [i % (V - 1) for i in range(100)]

    async def main() -> list[int]:
        cached = []
        for owner in ("alice", "alice", "bob", None, None):
            session = await held.open(owner=owner)
            session.append(rows)
            await session.settle()
            await tokens(session, 2)
            cached.append(session.cached)
            session.close()
        return cached

    first, again, *others = asyncio.run(main())
    assert first == 0
    assert again >= 64
    assert others == [0, 0, 0]
    salts = {body["cache_salt"] for body in one.requests}
    assert len(salts) == 4
    assert all(len(salt) == 64 for salt in salts)


@pytest.mark.parametrize("begun", [1, 6, 15])
@pytest.mark.parametrize("trigger", ["", "z"])
def test_when_a_server_dies_within_a_grammar_then_the_text_still_keeps_to_it(
    server: MakeServer, begun: int, trigger: str
) -> None:
    one, other = server(), server()
    held = engine(one, other)
    tokenizer = tiny_tokenizer()
    stop = frozenset((V - 1,))

    async def main() -> str:
        session = await held.open()
        session.append(tokenizer.encode("y" if trigger else "x").ids)
        number = begun + len(trigger)
        one.faults.extend([("fine", 0)] * len(trigger) + [("cut", begun)])
        other.faults.extend([("fine", 0)] * len(trigger) + [("cut", begun)])
        grammar = Grammar("json_schema", JSON.text, trigger)
        # The grammar would allow white space forever.
        ban = {tokenizer.encode(c).ids[0]: -100.0 for c in " \n"}
        got = await tokens(session, 60, grammar=grammar, stop=stop, bias=ban)
        assert number < len(got)
        assert session.length == 1 + len(got)
        return tokenizer.decode([token for token in got if token not in stop])

    text = asyncio.run(main())
    assert text.startswith(trigger)
    found, _ = json.JSONDecoder().raw_decode(text.removeprefix(trigger))
    assert found["name"] in ("Ada", "Grace")


def test_when_a_server_takes_no_grammars_then_that_is_said_once_and_they_hold(
    server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    held = engine(server(takes_grammars=False))
    tokenizer = tiny_tokenizer()

    async def main() -> None:
        for _ in range(2):
            session = await held.open()
            session.append(tokenizer.encode("x").ids)
            yes = Grammar("json_schema", '{"type": "boolean"}')
            got = await tokens(session, 20, grammar=yes, stop=frozenset((V - 1,)))
            assert tokenizer.decode(got[:-1]) in ("true", "false")

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.text.count("takes no json_schema grammars") == 1


def test_where_a_grammar_allows_many_tokens_those_that_it_does_not_are_asked_for_anew(
    server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, no list of allowed tokens is sent, as if it were too long. The scripted server then tries one
    # token after another.
    monkeypatch.setattr("antiphon.remote.engine.answer.MAX_ALLOWED", 0)
    monkeypatch.setattr("antiphon.remote.engine.answer.MAX_REJECTED", V)
    one = server(takes_grammars=False)
    held, tokenizer = engine(one), tiny_tokenizer()

    async def main() -> None:
        session = await held.open()
        session.append(tokenizer.encode("s").ids)
        yes = Grammar("json_schema", '{"type": "boolean"}')
        got = await tokens(session, 20, grammar=yes, stop=frozenset((V - 1,)))
        assert tokenizer.decode(got[:-1]) in ("true", "false")

    asyncio.run(main())
    assert any(body.get("logit_bias") for body in one.requests)
    assert not any("allowed_token_ids" in body for body in one.requests)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_a_server_is_asked_for_just_the_rows_of_the_session(server: MakeServer, seed: int) -> None:
    """Random appends, rollbacks, generations, and abandoned generations, with occasional faults."""
    draw = random.Random(seed)
    servers = [server(context_rows=200), server(context_rows=200, generates=False)]
    held = engine(*servers)

    async def left(session: VllmSession, read: int) -> list[int]:
        stream: AsyncGenerator[object, None]
        got = []
        async with aclosing(session.generate(Sampling(max_tokens=50))) as stream:
            async for token in stream:
                got.append(token.id)  # type: ignore[attr-defined]
                if len(got) == read:
                    break
        return got

    async def main() -> None:
        session, rows = await held.open(owner="me"), [1]
        session.append(rows)
        for _ in range(60):
            asked = [len(one.requests) for one in servers]
            match draw.choice(("append", "rollback", "generate", "leave")):
                case "append":
                    more = [draw.randrange(V - 1) for _ in range(draw.randrange(1, 30))]
                    session.append(more)
                    rows += more
                    if draw.random() < 0.5:
                        await session.settle()
                case "rollback":
                    first = max(1, session.context_start)
                    position = draw.randrange(first, len(rows) + 1)
                    session.rollback(position)
                    del rows[position:]
                case "generate":
                    if draw.random() < 0.3:
                        draw.choice(servers).faults.append((draw.choice(("cut", "garbage")), draw.randrange(4)))
                    expected = after(rows[-1], 5)
                    assert await tokens(session, 5) == expected
                    rows += expected
                case _:
                    expected = after(rows[-1], draw.randrange(1, 9))
                    assert await left(session, len(expected)) == expected
                    rows += expected
            assert session.length == len(rows)
            in_context = rows[session.context_start :]
            for one, before in zip(servers, asked, strict=True):
                for body in one.requests[before:]:
                    prompt = body["prompt"]
                    # The rows up to the time of the request. A cut drops the oldest.
                    whole = rows if session.context_start == 0 else in_context
                    assert prompt == whole[: len(prompt)] or tail_of(prompt, rows)
        session.close()

    asyncio.run(main())


def tail_of(prompt: list[int], rows: list[int]) -> bool:
    """Whether a prompt consists of neighbouring rows, as it may before a cut or a rollback."""
    joined, part = ",".join(map(str, ["", *rows, ""])), ",".join(map(str, ["", *prompt, ""]))
    return part in joined


def test_the_key_is_struck_from_what_a_server_says_of_its_failure(
    server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    one.key = "sk-not-to-be-seen"
    held = engine(one, key=one.key)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.extend([("error", 0)] * 2)
        with pytest.raises(RemoteError, match=r"no, \*\*\*") as caught:
            await tokens(session, 3)
        assert one.key not in str(caught.value)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert "no, ***" in caplog.text
    assert one.key not in caplog.text


def test_a_server_without_a_model_is_not_asked(server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    one = server()
    one.model = ""
    with caplog.at_level(logging.WARNING):
        held = engine(one)
    assert "does not say what it serves" in caplog.text

    async def main() -> None:
        session = await held.open()
        session.append([5])
        with pytest.raises(RemoteError, match="does not say what it serves"):
            await tokens(session, 3)

    asyncio.run(main())
    assert one.requests == []


def test_a_request_that_the_server_does_not_accept_fails_by_name_and_the_session_lives(server: MakeServer) -> None:
    one = server()
    held = engine(one)

    async def main() -> None:
        session = await held.open()
        session.append([5])
        one.faults.append(("refuse", 400))
        with pytest.raises(EngineError, match="does not accept this: busy"):
            await tokens(session, 3)
        assert await tokens(session, 3) == after(5, 3)

    asyncio.run(main())
