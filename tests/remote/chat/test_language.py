"""A language model on another server: the history that conversations send, and the requests that are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from antiphon.contracts import Message, Reply, ReplyDone, ReplyOptions, TextDelta
from antiphon.errors import ModelError, RemoteError, RemoteProtocolError
from antiphon.events.tools import Tool, ToolCall
from antiphon.remote.address import parse_address
from antiphon.remote.chat.language import (
    DEFAULT_CONTEXT_TOKENS,
    KEPT_SHARE,
    SLICE_CHARS,
    RemoteLanguageModel,
    RemoteLanguageStream,
)
from antiphon.remote.chat.messages import NO_RESULT
from antiphon.settings import RemoteSettings
from tests.remote.chat.scripted_server import Answer, Script, ScriptedServer, fails, says, scripted_server
from tests.remote.turns import turns_of_others

LIMIT_S = 30
LONG = [Message(role, f"{n} " + "word " * 100) for n in range(30) for role in ("user", "assistant")]


def talked(
    *scripts: Script,
    use: Callable[[RemoteLanguageStream, ScriptedServer, RemoteLanguageModel], Awaitable[Any]],
    name: str = "clever",
    path: str = "",
) -> None:
    """Run `use` with a conversation. The server follows these scripts, and lists "clever" with 4,096 tokens."""

    async def main() -> None:
        async with scripted_server(*scripts) as server:
            address = parse_address(f"{server.url}{path}#{name}", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            stream = await model.open()
            try:
                await use(stream, server, model)
            finally:
                await model.pool.close()
            stream.close()
            assert model.load().conversations == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def reply(
    stream: RemoteLanguageStream, messages: Sequence[Message], options: ReplyOptions | None = None
) -> list[Reply]:
    async with aclosing(stream.reply(messages, options or ReplyOptions())) as replies:
        return [r async for r in replies]


def contents(server: ScriptedServer) -> list[str]:
    """The first word of each message of the last request."""
    return [m["content"].split(" ")[0] for m in server.asked[-1].body["messages"]]


def test_a_conversation_is_sent_whole_and_answered() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        assert model.profile.context_tokens == 4096
        got = await reply(stream, [Message("system", "Brief."), Message("user", "Hi")], ReplyOptions(max_tokens=5))
        assert got == [TextDelta("Yes"), ReplyDone("stop", 7, 0, 2)]
        body = server.asked[0].body
        assert (body["model"], body["max_tokens"]) == ("clever", 5)
        assert body["messages"] == [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}]
        assert "cache_salt" not in body

    talked(says("Yes"), use=use)


def test_a_call_that_has_no_result_yet_is_given_one() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        called = Message("assistant", "", (ToolCall("a", "look", "{}"),))
        await reply(stream, [Message("user", "Look"), called, Message("user", "And?")])
        assert [m["role"] for m in server.asked[0].body["messages"]] == ["user", "assistant", "tool", "user"]
        assert server.asked[0].body["messages"][2]["content"] == NO_RESULT

    talked(says("Yes"), use=use)


def test_what_outgrows_the_context_is_cut_back_once_and_stays_cut() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        await reply(stream, LONG[:-1])
        first = contents(server)
        assert len(first) < len(LONG) * KEPT_SHARE
        assert first[-1] == "29"
        await reply(stream, [*LONG, Message("user", "30 more")])
        # The part in the server's cache is sent again unchanged.
        assert contents(server)[: len(first)] == first

    talked(says("Yes"), use=use)


def test_another_history_is_not_cut_where_the_last_one_was() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        await reply(stream, LONG[:-1])
        await reply(stream, [Message("user", "Something"), *LONG[:3]])
        assert contents(server) == ["Something", "0", "0", "1"]

    talked(says("Yes"), use=use)


def test_where_nothing_may_leave_a_long_conversation_is_refused_before_it_is_sent() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        with pytest.raises(RemoteProtocolError) as error:
            await reply(stream, LONG, ReplyOptions(truncation="disabled"))
        assert error.value.code == "context_length_exceeded"
        assert not server.asked

    talked(says("Yes"), use=use)


def test_a_server_that_finds_it_too_long_is_sent_half() -> None:
    too_long = fails(400, "maximum context length is 1024 tokens")

    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        assert (await reply(stream, LONG[:11]))[0] == TextDelta("Yes")
        first, second = (len(a.body["messages"]) for a in server.asked)
        assert second <= first // 2 + 1

    talked(too_long, says("Yes"), use=use)


def test_a_server_that_always_finds_it_too_long_is_not_asked_for_ever() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        with pytest.raises(RemoteProtocolError, match="context"):
            await reply(stream, LONG[:11])
        assert len(server.asked) <= 3

    talked(fails(400, "maximum context length is 1 token"), use=use)


def test_the_other_name_of_the_limit_is_learned() -> None:
    async def script(answer: Answer) -> None:
        await says("Yes")(answer)

    refusal = fails(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")

    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        for _ in range(2):
            await reply(stream, [Message("user", "Hi")], ReplyOptions(max_tokens=5))
        assert ["max_completion_tokens" in a.body for a in server.asked] == [False, True, True]

    talked(refusal, script, use=use)


def test_a_server_that_lists_no_such_model_is_asked_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        assert (await reply(stream, [Message("user", "Hi")]))[0] == TextDelta("Yes")

    talked(says("Yes"), use=use, name="other")
    assert "has no model other; it has clever" in caplog.text


def test_a_server_that_is_not_there_at_the_start_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    address = parse_address("http://127.0.0.1:9/v1#m", "--language-model")
    model = RemoteLanguageModel(address, "", RemoteSettings())
    assert model.profile.id == "m"
    assert model.load().is_away
    assert "http://127.0.0.1:9/v1 does not list its models" in caplog.text


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        (b"", "no valid list of models"),
        (b"{}", "no valid list of models"),
        (b'{"data": "x"}', "no valid list of models"),
        (b'{"data": [3]}', "no valid list of models"),
        (b"[" * 100_000, "no valid list of models"),
        (b'{"data": "\xff"}', "no valid list of models"),
        (b'{"data": [' + b"{}," * 200_000 + b"{}]}", "too many objects"),
        (b'{"data": ["' + b"x" * (10 << 20) + b'"]}', "more than 2097152 bytes"),
        (b'{"data": [{"id": ["a", "list"]}, {"id": {}}, {}]}', ""),
        (b'{"data": [{"id": "' + b"x" * 1000 + b'"}]}', ""),
        (b'{"data": [{"id": "clever", "owned_by": ["vllm"], "max_model_len": "many"}]}', ""),
        (b'{"data": [{"id": "clever", "owned_by": 3, "max_model_len": 1e999}]}', ""),
        (b'{"data": [{"id": "clever", "max_model_len": -4096}]}', ""),
        (b'{"data": [{"id": "clever", "max_model_len": [4096]}]}', ""),
        (b'{"data": [{"id": "clever", "max_model_len": ' + b"9" * 400 + b"}]}", ""),
        (b'{"data": [{"id": "clever", "max_model_len": 8192.5}]}', ""),
        (b'{"data": [{"id": "clever", "max_model_len": true}]}', ""),
    ],
    ids=range(17),
)
def test_a_start_survives_a_list_of_models_of_any_type(
    data: bytes, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def models(answer: Answer) -> None:
        await answer.head(200, "application/json")
        await answer.raw(data)

    async def main() -> None:
        async with scripted_server(says("Yes")) as server:
            server.models = models
            address = parse_address(f"{server.url}#clever", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            assert model.profile.context_tokens == DEFAULT_CONTEXT_TOKENS
            assert not model.load().is_away
            assert (await reply(await model.open(), [Message("user", "Hi")]))[0] == TextDelta("Yes")
            assert "cache_salt" not in server.asked[0].body
            await model.pool.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert warning in caplog.text
    assert len(caplog.text) < 1000


def test_a_list_of_models_that_drips_holds_up_the_start_for_a_few_seconds_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("antiphon.remote.http.PROBE_TIMEOUT_S", 0.1)

    async def models(answer: Answer) -> None:
        await answer.head(200, "application/json")
        while not answer.gone.is_set():
            await answer.raw(b" ")
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with scripted_server(says("Yes")) as server:
            server.models = models
            address = parse_address(f"{server.url}#clever", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            assert model.load().is_away

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert "does not list its models: no answer within 0.1 s" in caplog.text


def test_a_long_text_that_may_hold_calls_lets_others_take_their_turns() -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        replies = stream.reply([Message("user", "Hi")], ReplyOptions(tools=(Tool("add"),)))
        async with aclosing(replies):
            # After the first word, everything has arrived. The last bracket of a slice may begin a call.
            assert await anext(replies) == TextDelta("[" * (SLICE_CHARS - 1))
            with turns_of_others() as turns:
                texts = [r.text async for r in replies if isinstance(r, TextDelta)]
            assert "".join(texts) == "[" * (9 * SLICE_CHARS + 1)
            assert turns.count >= 9

    talked(says("[" * (10 * SLICE_CHARS)), use=use)


def test_a_server_is_away_from_its_first_failure_to_its_next_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        assert not model.load().is_away
        with pytest.raises(RemoteError):
            await reply(stream, [Message("user", "Hi")])
        assert model.load().is_away
        assert f"{server.url} gave no answer" in caplog.text
        assert (await reply(stream, [Message("user", "Hi")]))[0] == TextDelta("Yes")
        assert not model.load().is_away

    talked(fails(500), fails(500), says("Yes"), use=use)


def test_a_wrong_key_is_found_at_the_start() -> None:
    async def main() -> None:
        async with scripted_server(says("Yes")) as server:
            server.models = fails(401)
            address = parse_address(f"{server.url}#clever", "--language-model")
            with pytest.raises(ModelError, match="ANTIPHON_REMOTE_KEY"):
                await asyncio.to_thread(RemoteLanguageModel, address, "wrong", RemoteSettings())

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_vllm_is_given_a_salt_of_its_own_for_each_caller() -> None:
    async def vllm(answer: Answer) -> None:
        await answer.head(200, "application/json")
        await answer.raw(b'{"data": [{"id": "clever", "owned_by": "vllm", "max_model_len": 4096}]}')

    async def main() -> None:
        async with scripted_server(says("Yes")) as server:
            server.models = vllm
            address = parse_address(f"{server.url}#clever", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            for owner in ("key-1", "key-2", "key-1", None):
                await reply(await model.open(owner), [Message("user", "Hi")])
            await model.pool.close()
            first, second, again, nobody = (a.body["cache_salt"] for a in server.asked)
            assert first == again
            assert len({first, second, nobody}) == 3
            assert "key" not in first

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_the_responses_endpoint_is_used_where_the_url_names_it() -> None:
    async def script(answer: Answer) -> None:
        await answer.head()
        await answer.event({"type": "response.output_text.delta", "delta": "Yes"})
        await answer.event(
            {"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 1}}}
        )

    async def use(stream: RemoteLanguageStream, server: ScriptedServer, model: RemoteLanguageModel) -> None:
        assert await reply(stream, [Message("user", "Hi")]) == [TextDelta("Yes"), ReplyDone("stop", 3, 0, 1)]
        assert server.asked[0].path == "/v1/responses"

    talked(script, use=use, path="/responses")
