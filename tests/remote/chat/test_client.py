"""Faults of a model's server, each on a real socket: which requests are repeated, and which errors are reported."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from email.utils import formatdate
from typing import Any

import anyio
import pytest

from antiphon.contracts import Reply, ReplyDone, TextDelta
from antiphon.errors import ModelError, Refused, RemoteError, RemoteProtocolError
from antiphon.remote.breaker import FAILURES_TO_OPEN, MAX_PAUSE_S
from antiphon.remote.chat.chat_completions import ChatReader
from antiphon.remote.chat.client import ModelServerClient
from antiphon.remote.pool import MAX_WAIT_S, Endpoint, Pool
from antiphon.remote.sse import LINES_A_TURN
from tests.remote.chat.scripted_server import Answer, Script, ScriptedServer, fails, hangs, says, scripted_server
from tests.remote.turns import turns_of_others

LIMIT_S = 30
KEY = "sk-not-to-be-seen"
YES = [TextDelta("Ye"), TextDelta("s."), ReplyDone("stop", 7, 0, 2)]


def run(coroutine: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def client_of(url: str, first_s: float) -> ModelServerClient:
    pool = Pool("language", [Endpoint(url)], KEY, max_s=first_s, measures=False)
    return ModelServerClient(pool, "/chat/completions", 0.2, ChatReader)


def asked(
    *scripts: Script, use: Callable[[ModelServerClient, ScriptedServer], Awaitable[Any]], first_s: float = 20.0
) -> Any:
    """Run `use` with a client of a server that follows these scripts."""

    async def main() -> Any:
        async with scripted_server(*scripts) as server:
            client = client_of(server.url, first_s)
            try:
                return await use(client, server)
            finally:
                await client.pool.close()

    return run(main())


async def collected(client: ModelServerClient, owner: str | None = None) -> list[Reply]:
    async with aclosing(client.replies(b'{"model": "clever"}', owner)) as replies:
        return [reply async for reply in replies]


def test_an_answer_is_streamed_and_the_key_is_sent() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        assert await collected(client) == YES
        assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
        assert server.asked[0].body == {"model": "clever"}

    asked(says("Ye", "s."), use=use)


async def closes(answer: Answer) -> None:
    answer.writer.close()


async def garbage(answer: Answer) -> None:
    await answer.raw(b"\x00\x01 this is no HTTP\r\n\r\n")


async def garbled_event(answer: Answer) -> None:
    await answer.head()
    await answer.event("{{{")


async def a_page(answer: Answer) -> None:
    await answer.head(200, "text/html")
    await answer.raw(b"<h1>Welcome</h1>")


@pytest.mark.parametrize("fault", [closes, garbage, garbled_event, a_page, fails(500)])
def test_what_fails_before_the_first_word_is_asked_again_once(fault: Script) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        assert await collected(client) == YES
        assert (len(server.asked), client.counts.second_attempts, client.counts.failures) == (2, 1, 1)

    asked(fault, says("Ye", "s."), use=use)


@pytest.mark.parametrize("fault", [closes, garbage, garbled_event, a_page, fails(500)])
def test_a_second_failure_is_told(fault: Script) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteError, match="the model's server"):
            await collected(client)
        assert len(server.asked) == 2

    asked(fault, use=use)


def test_when_a_server_fails_before_its_first_word_the_next_one_is_asked() -> None:
    async def main() -> None:
        async with scripted_server(fails(500)) as broken, scripted_server(says("Ye", "s.")) as other:
            endpoints = [Endpoint(broken.url), Endpoint(other.url)]
            pool = Pool("language", endpoints, KEY, max_s=20.0, measures=False)
            client = ModelServerClient(pool, "/chat/completions", 0.2, ChatReader)
            assert await collected(client) == YES
            assert (len(broken.asked), len(other.asked)) == (1, 1)
            await pool.close()

    run(main())


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def main() -> None:
        async with scripted_server(hangs) as server:
            url = server.url
        client = client_of(url, 20)
        with pytest.raises(RemoteError):
            await collected(client)

    run(main())


def test_a_late_first_word_is_asked_for_a_second_time_and_the_faster_answer_is_taken() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        assert await collected(client) == YES
        assert client.counts.second_attempts == 1
        await server.client_left()

    asked(hangs, says("Ye", "s."), use=use, first_s=0.2)


def test_a_first_attempt_that_was_only_late_is_taken_too() -> None:
    asked_again = asyncio.Event()

    async def late(answer: Answer) -> None:
        await asked_again.wait()
        await says("Ye", "s.")(answer)

    async def silent(answer: Answer) -> None:
        asked_again.set()
        await hangs(answer)

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        assert await collected(client) == YES
        assert len(server.asked) == 2

    asked(late, silent, use=use, first_s=2.0)


def test_a_server_that_never_speaks_is_given_up() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteError, match="no answer within 1 s"):
            await collected(client)
        # Each attempt is abandoned. There are two if this machine began the second one in time.
        assert server.asked
        for _ in server.asked:
            await server.client_left()

    asked(hangs, use=use, first_s=1.0)


async def stops_in_the_middle(answer: Answer) -> None:
    await answer.head()
    await answer.words("Ye")
    await answer.gone.wait()


async def ends_in_the_middle(answer: Answer) -> None:
    await answer.head()
    await answer.words("Ye")


async def error_in_the_middle(answer: Answer) -> None:
    await ends_in_the_middle(answer)
    await answer.event({"error": {"message": "no memory"}})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (stops_in_the_middle, r"silent for 0\.2 s"),
        (ends_in_the_middle, "middle of its answer"),
        (error_in_the_middle, "no memory"),
    ],
)
def test_once_a_word_was_given_out_nothing_is_asked_again(fault: Script, message: str) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        got: list[Reply] = []
        with pytest.raises(RemoteError, match=message):
            async with aclosing(client.replies(b"{}")) as replies:
                async for reply in replies:
                    got.append(reply)
        assert got == [TextDelta("Ye")]
        assert len(server.asked) == 1
        assert client.counts.failures == 1

    asked(fault, says("no"), use=use)


def test_a_stream_that_ends_without_a_last_mark_but_with_a_reason_is_whole() -> None:
    async def script(answer: Answer) -> None:
        await answer.head()
        await answer.words("Ye", "s.")
        await answer.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        assert await collected(client) == [*YES[:2], ReplyDone("stop", 0, 0, 0)]

    asked(script, use=use)


def test_a_closed_answer_is_ended_at_the_server() -> None:
    async def endless(answer: Answer) -> None:
        await answer.head()
        while not answer.gone.is_set():
            await answer.words("and ")
            await asyncio.sleep(0.01)

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        async with aclosing(client.replies(b"{}")) as replies:
            async for _ in replies:
                break
        await server.client_left()
        assert client.counts.answering == 0

    asked(endless, use=use)


def test_a_cancelled_reader_ends_its_answer_at_the_server() -> None:
    async def endless(answer: Answer) -> None:
        await answer.head()
        while not answer.gone.is_set():
            await answer.words("and ")
            await asyncio.sleep(0.01)

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        begun = anyio.Event()

        async def read() -> None:
            async with aclosing(client.replies(b"{}")) as replies:
                async for _ in replies:
                    begun.set()

        # A cancelled scope cancels each wait of its tasks again, including the waits of closing.
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await begun.wait()
            group.cancel_scope.cancel()
        await server.client_left()

    asked(endless, use=use)


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_server_is_asked_again_after_the_time_that_it_names(status: int) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        started = time.monotonic()
        assert await collected(client) == YES
        assert time.monotonic() - started >= 0.3

    asked(fails(status, retry_after="0.3"), says("Ye", "s."), use=use)


@pytest.mark.parametrize("after", ["60", formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "a date"])
def test_a_server_that_is_full_for_long_is_left_alone(after: str) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        for _ in range(3):
            with pytest.raises(Refused) as error:
                await collected(client)
            assert error.value.retry_after_s > MAX_WAIT_S
        assert len(server.asked) == 1

    asked(fails(429, retry_after=after), use=use)


def test_failures_in_a_row_open_the_breaker() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(RemoteError):
                await collected(client)
        with pytest.raises(Refused, match="does not answer"):
            await collected(client)
        assert len(server.asked) == 2 * FAILURES_TO_OPEN

    asked(fails(500), use=use)


def test_failures_and_pauses_of_one_key_are_no_matter_of_another_key() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(RemoteError):
                await collected(client, "a")
        with pytest.raises(Refused, match="does not answer"):
            await collected(client, "a")
        server.begin([says("Ye", "s."), fails(429, retry_after="86400"), says("Ye", "s.")])
        assert await collected(client, "b") == YES
        with pytest.raises(Refused) as error:
            await collected(client, "c")
        assert error.value.retry_after_s == MAX_PAUSE_S
        with pytest.raises(Refused, match="no room"):
            await collected(client, "c")
        assert await collected(client, "b") == YES

    asked(fails(500), use=use)


def test_a_pause_that_never_ends_is_a_short_one() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        for _ in range(2):
            with pytest.raises(Refused) as error:
                await collected(client)
            assert MAX_WAIT_S < error.value.retry_after_s <= MAX_PAUSE_S

    asked(fails(429, retry_after="inf"), use=use)


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_not_accepted_is_told_without_it(status: int) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(ModelError, match="does not accept the key") as error:
            await collected(client)
        assert KEY not in str(error.value)
        assert len(server.asked) == 1

    asked(fails(status, f"wrong key {KEY}"), use=use)


def test_no_log_and_no_error_has_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteProtocolError) as error:
            await collected(client)
        assert KEY not in error.value.message
        assert "because" in error.value.message
        with pytest.raises(RemoteError):
            await collected(client)
        # A failure within the stream. Its message is cut in the middle of the key when it is passed on.
        with pytest.raises(RemoteError, match="failed in its answer") as failed:
            await collected(client)
        assert KEY[:8] not in str(failed.value)

    async def in_the_stream(answer: Answer) -> None:
        await answer.head()
        await answer.event({"error": {"message": "no " * 97 + KEY}})

    asked(fails(400, f"because of {KEY}"), fails(500, KEY), fails(500, KEY), in_the_stream, use=use)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 4096 tokens", "context_length_exceeded"),
        ("the request exceeds the available context size", "context_length_exceeded"),
        ("no such field", "invalid_value"),
    ],
)
def test_a_request_that_is_not_accepted_is_told_by_name(message: str, code: str) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteProtocolError, match=message) as error:
            await collected(client)
        assert error.value.code == code
        assert len(server.asked) == 1

    asked(fails(400, message), use=use)


@pytest.mark.parametrize("status", [204, 206, 302, 307, 999])
def test_a_status_that_is_neither_an_answer_nor_a_refusal_is_a_failure_of_the_server(status: int) -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteError, match=f"failed with status {status}"):
            await collected(client)

    asked(fails(status, location="http://127.0.0.1:9/"), use=use)


def test_events_that_say_nothing_and_come_at_once_let_others_take_their_turns() -> None:
    async def script(answer: Answer) -> None:
        await answer.head()
        await answer.raw(b'data: {"choices": [{"delta": {"tool_calls": []}}]}\n\n' * 10_000)
        await answer.words("Ye", "s.")
        await answer.end()

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with turns_of_others() as turns:
            assert await collected(client) == YES
        assert turns.count >= 20_000 // LINES_A_TURN

    asked(script, use=use)


async def endless_event(answer: Answer) -> None:
    await answer.head()
    await answer.raw(b"data: ")
    while not answer.gone.is_set():
        await answer.raw(b"x" * (1 << 16))
        await asyncio.sleep(0)


def test_an_event_without_an_end_is_cut_off() -> None:
    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteError, match="too long"):
            await collected(client)

    asked(endless_event, use=use)


def test_an_error_of_any_length_is_read_to_a_bound() -> None:
    async def script(answer: Answer) -> None:
        await answer.head(400, "text/plain")
        while not answer.gone.is_set():
            await answer.raw(b"no " * 10000)
            await asyncio.sleep(0)

    async def use(client: ModelServerClient, server: ScriptedServer) -> None:
        with pytest.raises(RemoteProtocolError) as error:
            await collected(client)
        assert len(error.value.message) < 500

    asked(script, use=use)
