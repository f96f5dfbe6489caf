"""Edge cases of a session's link: misbehaving servers, messages that only the client may send, immediate refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from antiphon.client import Client, ClientConversation, ResponseEnds, ResponseWords, SessionEnded, SyncClient, link
from antiphon.client.audio import WireAudio, pcm16
from antiphon.settings import Settings
from antiphon.signals import become
from tests.server.scripted import serving

LIMIT_S = 30
CREATED = {"type": "session.created", "session_id": "s", "resume_token": "t"}


def scripted_by(
    handle: Callable[[ServerConnection], Awaitable[None]],
    use: Callable[[ClientConversation], Awaitable[Any]],
    **given: Any,
) -> Any:
    """Run `use` with a conversation at a server that handles each connection with this function."""

    async def main() -> Any:
        async with serve(handle, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            async with Client(f"http://127.0.0.1:{port}", **given) as client, client.conversation() as talk:
                return await use(talk)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def say(socket: ServerConnection, **message: Any) -> None:
    await socket.send(json.dumps(message, separators=(",", ":")))


async def until_ended(talk: ClientConversation) -> str:
    try:
        async for _ in talk:
            pass
    except SessionEnded as ended:
        return ended.code
    return ""


def test_a_server_that_takes_a_resume_and_breaks_again_is_given_up() -> None:
    connections = 0

    async def handle(socket: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        first = json.loads(await socket.recv())
        await say(
            socket,
            **(CREATED if first["type"] == "session.update" else {"type": "session.resumed", "received_events": 1}),
        )
        await socket.close(1012)

    assert scripted_by(handle, until_ended, give_up_s=0.5) == "connection_lost"
    assert 1 < connections < 20


def test_a_session_whose_host_is_lost_goes_on_at_the_next_one() -> None:
    firsts: list[str] = []

    async def handle(socket: ServerConnection) -> None:
        first = json.loads(await socket.recv())
        firsts.append(first["type"])
        if len(firsts) == 1:
            await say(socket, **CREATED)
            await socket.close(1011, "host_lost")
            return
        await say(socket, type="session.resumed", received_events=1, resume_token="u")
        await socket.close(1000, "session_closed")

    assert scripted_by(handle, until_ended) == ""
    assert firsts == ["session.update", "session.resume"]


@pytest.mark.parametrize(
    ("code", "reason", "reported"),
    [
        (1011, "internal_error", "internal_error"),
        (1001, "session_expired", "session_expired"),
        (1001, "server_shutting_down", "server_shutting_down"),
        (1000, "session_replaced", "session_replaced"),
        (1000, "session_closed", ""),
        (1008, "invalid_resume_token", "invalid_resume_token"),
    ],
)
def test_a_session_that_the_server_ends_is_over_by_its_reason(code: int, reason: str, reported: str) -> None:
    async def handle(socket: ServerConnection) -> None:
        await socket.recv()
        await say(socket, **CREATED)
        await socket.close(code, reason)

    assert scripted_by(handle, until_ended) == reported


def test_a_connection_that_breaks_before_the_session_begins_is_made_again() -> None:
    connections = 0

    async def handle(socket: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        assert json.loads(await socket.recv())["type"] == "session.update"
        if connections == 1:
            socket.transport.abort()
            return
        await say(socket, **CREATED)
        await socket.wait_closed()

    async def use(talk: ClientConversation) -> str:
        return talk.id

    assert scripted_by(handle, use) == "s"
    assert connections == 2


def test_a_message_that_cannot_be_read_ends_nothing() -> None:
    async def handle(socket: ServerConnection) -> None:
        await socket.recv()
        await say(socket, **CREATED)
        await say(socket, type="response.output_text.delta", response_id="r")
        await say(socket, type="response.output_text.delta", response_id="r", delta="Yes.")
        await say(socket, type="response.done", response_id="r", response={"status": "completed"})
        await socket.wait_closed()

    async def use(talk: ClientConversation) -> str:
        text = ""
        async for event in talk:
            text += event.text if isinstance(event, ResponseWords) else ""
            if isinstance(event, ResponseEnds):
                return text
        return ""

    assert scripted_by(handle, use) == "Yes."


@pytest.mark.parametrize("kind", ["session.event_ack", "session.end", "session.resume"])
def test_messages_of_the_connection_are_not_its_users(kind: str) -> None:
    async def handle(socket: ServerConnection) -> None:
        await socket.recv()
        await say(socket, **CREATED)
        await socket.wait_closed()

    async def use(talk: ClientConversation) -> None:
        with pytest.raises(ValueError, match=kind):
            await talk.send({"type": kind})

    scripted_by(handle, use)


def test_a_server_that_is_full_says_so_at_once() -> None:
    settings = Settings()
    settings = replace(settings, server=replace(settings.server, sessions_per_key=1))
    with serving(settings) as (url, _, _):

        async def main() -> str:
            async with Client(url.replace("ws", "http", 1)) as client, client.conversation():
                with pytest.raises(SessionEnded) as refused:
                    async with client.conversation():
                        pass
                return refused.value.code

        assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) in ("rate_limit_exceeded", "resource_exhausted")


def test_when_nobody_takes_what_comes_then_no_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, size, count = 100_000, 10_000, 200
    monkeypatch.setattr(link, "MAX_INCOMING_BYTES", limit)

    async def handle(socket: ServerConnection) -> None:
        await say(socket, **CREATED)
        for number in range(count):
            await say(socket, type="of_our_own", number=number, text="x" * size)
        await socket.wait_closed()

    async def main() -> list[Any]:
        async with serve(handle, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            carried = link.ResumingLink(f"ws://127.0.0.1:{port}", headers={}, query={})
            carried.start()
            await become(lambda: carried.incoming_bytes > limit, 0.001)
            # The socket has more messages to read.
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert carried.incoming_bytes < limit + 2 * size
            messages = [await carried.receive() for _ in range(count + 1)]
            await carried.close()
            return [message["number"] for message in messages[1:] if isinstance(message, dict)]

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == list(range(count))


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    for url in ("http://", "ftp://host", "127.0.0.1:8000"):
        with pytest.raises(ValueError, match="http:// or https://"):
            Client(url)
    client = Client()
    with pytest.raises(ValueError, match="as `tools`"):
        client.conversation(session={"tools": []})
    with pytest.raises(RuntimeError, match="within its `with` block"):
        SyncClient().transcribe(b"")


def test_sound_is_taken_in_the_types_that_microphones_give() -> None:
    samples = np.array([100, -100, 5], np.int16)
    assert pcm16(samples) == pcm16(samples.tobytes()) == pcm16(bytearray(samples.tobytes())) == samples.tobytes()
    assert pcm16((samples / 32768).astype(np.float64)) == samples.tobytes()
    with pytest.raises(TypeError, match="int32"):
        pcm16(samples.astype(np.int32))
    with pytest.raises(ValueError, match="two bytes"):
        WireAudio(8000, 16_000).feed(b"1")
