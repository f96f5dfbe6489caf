"""Servers that send answers of any type and size, or refuse a grammar: which owners this affects, and how long."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from antiphon.engine.api import Grammar
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.remote.breaker import FAILURES_TO_OPEN, MAX_PAUSE_S
from antiphon.remote.engine.endpoints import LOOK_AGAIN_S, MAX_REFUSED, TRIVIAL, RefusedGrammars
from antiphon.remote.engine.engine import VllmSession
from antiphon.remote.engine.sglang import Sglang
from antiphon.remote.engine.wires import VllmCompletions, VllmGenerate, Wire
from tests.engine.contract.engines import tiny_tokenizer
from tests.engine.local import tiny
from tests.remote.engine.scripted_vllm import ScriptedVllm
from tests.remote.engine.test_faults import MakeServer, after, engine, server, tokens

V = tiny.VOCABULARY
STOP = frozenset((V - 1,))
GOOD = Grammar("json_schema", '{"enum": ["Ada", "Grace"]}')
__all__ = ["server"]


def bad(number: int) -> Grammar:
    return Grammar("json_schema", json.dumps({"enum": ["Ada", "Grace"], "description": f"bad {number}"}))


async def opened(held: object, owner: str | None = None) -> VllmSession:
    session: VllmSession = await held.open(owner=owner)  # type: ignore[attr-defined]
    session.append(tiny_tokenizer().encode("x").ids)
    return session


async def said(session: VllmSession, grammar: Grammar) -> str:
    return tiny_tokenizer().decode((await tokens(session, 20, grammar=grammar, stop=STOP))[:-1])


def with_grammars(one: ScriptedVllm) -> list[bool]:
    """Return for each request for tokens whether it had a grammar."""
    return ["structured_outputs" in body for body in one.requests]


def test_a_grammar_that_a_server_refuses_is_no_matter_of_another_key_and_not_of_another_grammar(
    server: MakeServer,
) -> None:
    one = server()
    one.refuses.add("bad")
    held = engine(one)

    async def main() -> None:
        # A refused grammar costs a request with the grammar, one with a trivial grammar, and those of local
        # enforcement.
        assert await said(await opened(held, "a"), bad(1)) in ('"Ada"', '"Grace"')
        assert with_grammars(one)[:2] == [True, True]
        assert not any(with_grammars(one)[2:])
        one.requests.clear()
        for _ in range(2):
            assert await said(await opened(held, "b"), GOOD) in ('"Ada"', '"Grace"')
        assert await said(await opened(held, "a"), GOOD) in ('"Ada"', '"Grace"')
        assert with_grammars(one) == [True] * 3
        one.requests.clear()
        # The refusal is remembered for its key. Another key and another grammar are tried, without a trivial grammar.
        await said(await opened(held, "a"), bad(1))
        assert not any(with_grammars(one))
        for owner, grammar in (("b", bad(1)), ("a", bad(2))):
            one.requests.clear()
            await said(await opened(held, owner), grammar)
            assert with_grammars(one)[0]
            assert not any(with_grammars(one)[1:])

    asyncio.run(main())


def test_a_server_that_takes_no_grammar_is_looked_at_again_after_some_minutes(
    server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server(takes_grammars=False)
    held = engine(one)

    async def main() -> None:
        for owner in ("a", "b"):
            await said(await opened(held, owner), GOOD)
        assert sum(with_grammars(one)) == 2
        one.requests.clear()
        one.takes_grammars = True
        monkeypatch.setattr(time, "monotonic", lambda now_s=time.monotonic: now_s() + LOOK_AGAIN_S)
        await said(await opened(held, "b"), GOOD)
        assert with_grammars(one) == [True]

    asyncio.run(main())


def test_only_so_many_refused_grammars_are_remembered_and_for_some_minutes() -> None:
    refused = RefusedGrammars()
    assert refused.refused("a", bad(0), 0)
    refused.tried("json_schema", 0, takes=True)
    assert not any(refused.refused("a", bad(n), 1) for n in range(1, MAX_REFUSED))
    assert refused.is_refused("a", bad(0), LOOK_AGAIN_S - 1)
    assert not refused.is_refused("a", bad(0), LOOK_AGAIN_S)
    refused.refused("a", bad(MAX_REFUSED), 1)
    assert not refused.is_refused("a", bad(0), 1)
    assert refused.is_refused("a", bad(1), 1)
    # A server that accepts no schemas may accept another kind of grammar.
    refused.tried("json_schema", 2, takes=False)
    assert refused.is_refused("b", GOOD, 2)
    assert not refused.is_refused("b", TRIVIAL["lark"], 2)


def test_failures_of_one_key_do_not_take_the_server_from_another(server: MakeServer) -> None:
    one = server()
    held = engine(one)

    async def main() -> None:
        session = await opened(held, "a")
        for _ in range(FAILURES_TO_OPEN):
            one.faults.extend([("error", 0)] * 2)
            with pytest.raises((RemoteError, Refused)):
                await tokens(session, 3)
        with pytest.raises(Refused):
            await tokens(session, 3)
        one.faults.clear()
        other = await held.open(owner="b")
        other.append([5])
        assert await tokens(other, 3) == after(5, 3)

    asyncio.run(main())


def vllm(choice: object, **more: object) -> bytes:
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


NO_ANSWERS = [
    vllm({"token_ids": [V]}),
    vllm({"token_ids": [3, 1 << 40]}),
    vllm({"token_ids": [-1]}),
    vllm({"token_ids": [True]}),
    vllm({"token_ids": [1.0]}),
    vllm({"token_ids": [3] * 100_000}),
    vllm({"token_ids": [], "finish_reason": "length"}),
    vllm({"token_ids": [3], "finish_reason": ["stop"]}),
    vllm({"token_ids": [3], "finish_reason": "x" * 100_000}),
    b"data: " + b"[" * 100_000 + b"\n\n",
    b'data: {"error": "\xff"}\n\n',
    b"data: {}\n\n" * 1000,
    b"\n" * 100_000,
]


@pytest.mark.parametrize("data", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
@pytest.mark.parametrize("grammar", [None, GOOD], ids=["", "in a grammar"])
def test_what_is_no_answer_fails_by_name_and_the_session_goes_on(
    data: bytes, grammar: Grammar | None, caplog: pytest.LogCaptureFixture
) -> None:
    one = ScriptedVllm(tiny_tokenizer(), V)
    held = engine(one)

    async def main() -> None:
        session = await opened(held)
        one.faults.extend([("events", 0)] * 2)
        one.events.extend([data] * 2)
        with pytest.raises(RemoteError) as caught:
            await tokens(session, 12, **({"grammar": grammar, "stop": STOP} if grammar else {}))
        assert len(str(caught.value)) < 500
        assert len(one.prompts) == 2
        session.append([5])
        assert await tokens(session, 3) == after(5, 3)

    try:
        with caplog.at_level(logging.WARNING):
            asyncio.run(main())
    finally:
        one.stop()


ODD: list[object] = [
    "x",
    1,
    [1],
    {"a": 1},
    True,
    -1,
    1.5,
    None,
    ["x"],
    [[1]],
    [None],
    [{"logprob": "x"}],
    {"content": 1},
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("wire", [VllmCompletions("m", STOP), VllmGenerate("m", STOP), Sglang()])
def test_what_may_be_missing_may_have_any_type(wire: Wire, odd: object) -> None:
    if isinstance(wire, Sglang):
        meta = {"completion_tokens": 2, "prompt_tokens": odd, "cached_tokens": odd, "output_token_logprobs": odd}
        found = wire.read(json.dumps({"output_ids": [3, 4], "meta_info": meta}).encode(), 0)
    else:
        usage = {"prompt_tokens": odd, "prompt_tokens_details": {"cached_tokens": odd}}
        for reported in (odd, {"token_logprobs": odd, "content": odd}):
            for counts in (odd, usage, {"prompt_tokens_details": odd}):
                event = {"choices": [{"token_ids": [3, 4], "logprobs": reported}], "usage": counts}
                found = wire.read(json.dumps(event).encode(), 0)
    assert found
    assert list(found.tokens) == [3, 4]
    assert not found.logprobs or len(found.logprobs) == 2
    for count in (found.prompt_tokens, found.cached_tokens):
        assert count is None or (type(count) is int and count >= 0)


def listed(**entry: object) -> bytes:
    return json.dumps({"data": [{"id": "smollm2", "max_model_len": 4096} | entry]}).encode()


LISTS = [
    b"",
    b"null",
    b'{"data": {"a": 1}}',
    b'{"data": "x"}',
    b'{"data": [1, "x", null]}',
    b"[" * 100_000,
    listed(id=["a", "list"]),
    listed(id={"a": 1}),
    listed(id="x" * 100_000),
    listed(id=None),
    listed(extra="x" * (10 << 20)),
    b'{"data": [' + b"{}," * 200_000 + b"{}]}",
]


@pytest.mark.parametrize("data", LISTS, ids=range(len(LISTS)))
def test_a_list_of_models_that_is_none_is_said_at_the_start_which_goes_on(
    server: MakeServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    one.says["/v1/models"] = data
    with caplog.at_level(logging.WARNING):
        held = engine(one)
    assert "does not say what it serves" in caplog.text
    assert len(caplog.text) < 1000
    one.says.clear()

    async def main() -> None:
        session = await held.open()
        session.append([5])
        assert await tokens(session, 3) == after(5, 3)

    asyncio.run(main())


@pytest.mark.parametrize(
    "value", ["4096", "many", [4096], {"a": 1}, True, -5, 0, 1.5, None, 10**30, float("inf")], ids=range(11)
)
def test_a_context_of_any_type_is_taken_where_it_is_a_number(server: MakeServer, value: object) -> None:
    one = server()
    one.says["/v1/models"] = listed(max_model_len=value).replace(b"Infinity", b"1e999")
    assert engine(one).context_rows == 4096


@pytest.mark.parametrize("block", ["0", "9" * 5000, "x", "999999999"])
def test_a_block_of_any_size_leaves_the_engine_with_one(block: str) -> None:
    one = ScriptedVllm(tiny_tokenizer(), V)
    try:
        one.says["/metrics"] = f'vllm:cache_config_info{{block_size="{block}"}} 1\n'.encode()
        assert 0 < engine(one).server.block_rows <= 4096
        one.says["/metrics"] = b"x" * (10 << 20)
        assert engine(one).server.block_rows == 16
    finally:
        one.stop()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"tokens": 3}', b'{"tokens": ["a"]}', b"[" * 100_000])
def test_a_tokenizer_that_answers_anything_is_not_the_models(
    server: MakeServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    one.says["/tokenize"] = data
    engine(one)
    assert "does not say what it serves: the model's server sent no valid list of tokens" in caplog.text
    one.says["/tokenize"] = b'{"tokens": [1]}'
    with pytest.raises(ModelError, match="another tokenizer"):
        engine(one)


def test_a_pause_of_a_day_is_a_short_one_and_only_for_the_key_that_got_it() -> None:
    one = ScriptedVllm(tiny_tokenizer(), V)
    one.retry_after = "86400"
    held = engine(one)

    async def main() -> None:
        session = await opened(held, "a")
        one.faults.extend([("refuse", 429)])
        for _ in range(2):
            with pytest.raises(Refused) as error:
                await tokens(session, 3)
            assert 2 < error.value.retry_after_s <= MAX_PAUSE_S
        other = await held.open(owner="b")
        other.append([5])
        assert await tokens(other, 3) == after(5, 3)

    try:
        asyncio.run(main())
    finally:
        one.stop()
