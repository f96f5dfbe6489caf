"""A client of a server in its own process: sessions behave as over a network, and open no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import psutil
import pytest
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from antiphon.client import (
    AudioToPlay,
    Client,
    ClientConversation,
    ConversationEvent,
    Reconnected,
    ResponseEnds,
    SessionEnded,
    UserSaid,
)
from antiphon.client.in_process import MAX_MESSAGES, AppSocket
from antiphon.server.app import build
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.scripted import ScriptedTranscriber, speech, text
from tests.server.scripted import WORD_S, Echo, scripted_models

LIMIT_S = 60
VAD = {"type": "server_vad", "silence_duration_ms": 300}


@asynccontextmanager
async def served(settings: Settings | None = None) -> AsyncIterator[tuple[Any, ServerState]]:
    """The application of a server over scripted models, on this event loop."""
    state = ServerState(settings or Settings(), Metrics(), scripted_models(Echo(), ScriptedTranscriber()))
    async with anyio.create_task_group() as state.group:
        yield build(state), state
        state.group.cancel_scope.cancel()


def in_process(use: Callable[[Client, ServerState], Awaitable[Any]], settings: Settings | None = None) -> Any:
    async def main() -> Any:
        async with served(settings) as (app, state), Client(app=app) as client:
            return await use(client, state)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def until(talk: ClientConversation, kind: type[ConversationEvent]) -> list[ConversationEvent]:
    seen = list[ConversationEvent]()
    async for event in talk:
        seen.append(event)
        if isinstance(event, kind):
            return seen
    raise AssertionError(f"no {kind.__name__} in {seen}")


def test_a_conversation_is_as_over_a_network_and_opens_no_socket() -> None:
    async def use(client: Client, state: ServerState) -> list[ConversationEvent]:
        before = len(psutil.Process().net_connections())
        async with client.conversation(turn_detection=VAD) as talk:
            await talk.send_audio(speech(1, 3, silence_frames=30))
            seen = await until(talk, ResponseEnds)
            assert len(psutil.Process().net_connections()) == before
            assert state.admission.num_under_way == 1
        return seen

    seen = in_process(use)
    assert [e.text for e in seen if isinstance(e, UserSaid)] == [text(1, 3)]
    assert seen[-1].text == text(1, 3)
    heard = [e for e in seen if isinstance(e, AudioToPlay)]
    assert round(heard[-1].end_ms) == round(3 * WORD_S * 1000)


def test_a_connection_that_is_cut_is_resumed_with_nothing_lost() -> None:
    async def use(client: Client, _: ServerState) -> list[ConversationEvent]:
        seen = list[ConversationEvent]()
        async with client.conversation(speaks=False) as talk:
            for number in range(5):
                await talk.send_text(f"turn {number}")
                assert await talk.link.cut()
                seen += await until(talk, ResponseEnds)
        return seen

    seen = in_process(use)
    assert [e.text for e in seen if isinstance(e, ResponseEnds)] == [f"turn {number}" for number in range(5)]
    assert len([e for e in seen if isinstance(e, Reconnected)]) == 5


def test_files_and_captions_are_transcribed() -> None:
    async def use(client: Client, _: ServerState) -> str:
        async with client.captions(language="en") as captions:
            captions.feed([speech(1, 2, silence_frames=10), speech(3, 2, silence_frames=30)])
            return "".join([words async for words in captions]).strip()

    assert in_process(use) == text(1, 4)


def test_what_is_refused_is_told_as_over_a_network() -> None:
    settings = replace(Settings(), server=replace(Settings().server, api_keys=("secret",)))

    async def use(client: Client, _: ServerState) -> tuple[str, str]:
        with pytest.raises(SessionEnded) as session:
            async with client.conversation():
                pass
        with pytest.raises(SessionEnded) as request:
            await client.transcribe(b"no audio")
        return session.value.code, request.value.code

    assert in_process(use, settings) == ("invalid_api_key", "invalid_api_key")


def test_what_the_application_sends_before_it_closes_is_received_and_then_the_close() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], scope["query_string"], (b"x-name", b"value") in scope["headers"]) == ("/p", b"a=1", True)
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        assert (await receive())["text"] == "hello"
        await send({"type": "websocket.send", "text": "one"})
        await send({"type": "websocket.send", "bytes": b"two", "text": None})
        await send({"type": "websocket.close", "code": 4000, "reason": "enough"})
        assert (await receive())["type"] == "websocket.disconnect"
        reported.append("left")

    reported = list[str]()

    async def main() -> tuple[list[Any], Any]:
        async with await AppSocket(app, "ws://here/p?a=1", {"X-Name": "value"}).open() as socket:
            await socket.send("hello")
            got = [await socket.recv(), await socket.recv()]
            for use in (socket.recv, lambda: socket.send("more")):
                with pytest.raises(ConnectionClosedError) as closed:
                    await use()
            return got, closed.value.rcvd

    got, close = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert got == ["one", b"two"]
    assert (close.code, close.reason) == (4000, "enough")
    assert reported == ["left"]


def test_an_application_that_fails_or_refuses_is_an_error_of_the_caller() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a defect")

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1008})

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        raise RuntimeError("a defect")

    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def main() -> None:
        with pytest.raises(ConnectionError, match="without an answer"):
            await AppSocket(leaves, "ws://here/", {}).open()
        with pytest.raises(RuntimeError, match="a defect"):
            await AppSocket(fails, "ws://here/", {}).open()
        with pytest.raises(InvalidStatus):
            await AppSocket(refuses, "ws://here/", {}).open()
        socket = await AppSocket(breaks, "ws://here/", {}).open()
        with pytest.raises(ConnectionClosedError):
            await socket.recv()
        await socket.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_who_gives_up_before_the_application_accepts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.client.in_process.OPEN_S", 0.05)
    reported = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        reported.append((await receive())["type"])
        await send({"type": "websocket.accept"})
        await asyncio.gather(*(send({"type": "websocket.send", "text": "x"}) for _ in range(3 * MAX_MESSAGES)))
        reported.append("over")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await AppSocket(app, "ws://here/", {}).open()
        for _ in range(1000):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert reported == ["websocket.disconnect", "over"]


def test_who_sends_faster_than_the_other_takes_waits_and_a_close_ends_that() -> None:
    reported = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(2 * MAX_MESSAGES):
            await send({"type": "websocket.send", "text": "x"})
        reported.append("all was sent")
        while (await receive())["type"] != "websocket.disconnect":
            pass
        reported.append("left")

    async def main() -> None:
        socket = await AppSocket(app, "ws://here/", {}).open()
        for _ in range(MAX_MESSAGES):
            await socket.send("y")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.send("y"), 0.05)
        assert reported == []
        await socket.close()
        with pytest.raises(ConnectionClosedOK):
            await socket.send("y")
        for _ in range(10 * MAX_MESSAGES):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert reported == ["all was sent", "left"]
