"""Conversations that outlive their server: it is killed or stopped, and the next server restores them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import websockets

from antiphon.store.sessions.sqlite import FILE
from tests.conftest import SMALL, Serve

LIMIT_S = 90


async def ask(socket: Any, text: str) -> dict[str, Any]:
    """Send a written turn and return its response."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    await socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 12}}))
    return (await until(socket, "response.done"))["response"]  # type: ignore[no-any-return]


async def until(socket: Any, *kinds: str) -> dict[str, Any]:
    while True:
        event = json.loads(await socket.recv())
        socket.last = event.get("server_event_seq", getattr(socket, "last", 0))
        if event["type"] in kinds:
            return event  # type: ignore[no-any-return]


def resume(session_id: str, token: str, last: int = 7) -> str:
    """Return a `session.resume` of a client that has received the events up to number `last`."""
    event = {"type": "session.resume", "session_id": session_id, "resume_token": token}
    return json.dumps(event | {"last_received_server_event_seq": last})


@pytest.mark.parametrize("query", ["duplex=1", "resume=1"])
@pytest.mark.parametrize("killed", [True, False])
def test_when_a_server_is_killed_or_stopped_then_the_next_one_restores_its_conversation(
    serve: Serve, tmp_path: Path, query: str, killed: bool
) -> None:
    flags = ("--language-model", SMALL, "--state", str(tmp_path))

    async def begin(url: str) -> tuple[str, str, list[str], int]:
        async with websockets.connect(f"{url}/v1/realtime?{query}") as socket:
            session = {
                "type": "realtime",
                "output_modalities": ["text"],
                "modalities": ["text"],
                "instructions": "You are brief.",
            }
            if query == "resume=1":
                created = json.loads(await socket.recv())
                session.pop("modalities")
                await socket.send(json.dumps({"type": "session.update", "session": session}))
            else:
                await socket.send(json.dumps({"type": "session.update", "session": session}))
                created = json.loads(await socket.recv())
            said = []
            for text in ("My name is Bruno.", "I live by the sea."):
                response = await ask(socket, text)
                said.append(response["output"][0]["content"][0]["text"])
            if killed:
                server.popen.kill()
                await asyncio.to_thread(server.popen.wait)
            else:
                server.terminate()
                await until(socket, "session.moving")
            return created["session"]["id"], created["resume_token"], said, socket.last  # type: ignore[attr-defined]

    async def go_on(url: str, session_id: str, token: str) -> tuple[dict[str, Any], dict[str, Any], str]:
        async with websockets.connect(
            f"{url}/v1/realtime?{query.replace('=1', '=' + session_id) if 'resume' in query else query}"
        ) as socket:
            for given in ("wrong", token):
                await socket.send(resume(session_id, given, last))
                resumed = json.loads(await socket.recv())
                if given == "wrong":
                    assert resumed["error"]["code"] == "invalid_resume_token"
                    break
        async with websockets.connect(
            f"{url}/v1/realtime?{query.replace('=1', '=' + session_id) if 'resume' in query else query}"
        ) as socket:
            await socket.send(resume(session_id, token, last))
            resumed = json.loads(await socket.recv())
            response = await ask(socket, "What is my name?")
            assert socket.last > last  # type: ignore[attr-defined]
            # With a history, the prompt has more tokens than without.
            return resumed, response, str(resumed.get("resume_token"))

    server = serve(*flags, clean=not killed)
    session_id, token, said, last = asyncio.run(asyncio.wait_for(begin(server.ws), LIMIT_S))
    if killed:
        server.popen.stdout.close()  # type: ignore[union-attr]
    else:
        server.popen.wait(30)
    following = serve(*flags)
    resumed, response, fresh = asyncio.run(asyncio.wait_for(go_on(following.ws, session_id, token), LIMIT_S))
    assert resumed["type"] == "session.resumed"
    assert (resumed["session_id"], resumed["restored"], resumed["num_items"]) == (session_id, True, 4)
    assert resumed["session"]["instructions"] == "You are brief."
    assert fresh not in ("", token)
    assert response["status"] in ("completed", "incomplete")
    # The whole history is in the prompt, and was prefilled again.
    history = sum(len(text.split()) for text in said)
    assert response["usage"]["input_tokens"] > 30 + history
    assert response["usage"]["input_token_details"]["cached_tokens"] < response["usage"]["input_tokens"] / 2


def is_ready(url: str) -> bool:
    return bool(urllib.request.urlopen(f"{url}/ready", timeout=10).status == 200)


def degraded_metric(url: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("antiphon_state_degraded "))


def test_when_what_is_said_cannot_be_stored_then_the_client_is_told_before_it_is_acknowledged(
    serve: Serve, tmp_path: Path
) -> None:
    """Another process locks the file. The conversation continues, and all of it is stored in the end."""
    flags = ("--language-model", SMALL, "--state", str(tmp_path))

    async def types_until(socket: Any, kind: str) -> list[str]:
        """Return the types of the messages up to one of `kind`, with the `degraded` of each state message."""
        found: list[str] = []
        while not found or found[-1] != kind:
            event = json.loads(await socket.recv())
            shown = event["type"]
            found.append(f"{shown} {event['degraded']}" if shown == "session.state_degraded" else shown)
        return found

    async def say(socket: Any, text: str) -> list[str]:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        return await types_until(socket, "conversation.item.done")

    async def talk(url: str, http: str) -> tuple[str, str, int]:
        async with websockets.connect(f"{url}/v1/realtime?resume=1") as socket:
            created = json.loads(await socket.recv())
            session = {"type": "realtime", "output_modalities": ["text"]}
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            await until(socket, "session.updated")
            assert "session.state_degraded True" not in await say(socket, "My name is Bruno.")
            with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
                other.execute("begin immediate")
                reported = await say(socket, "I live by the sea.")
                assert reported.index("session.state_degraded True") < reported.index("conversation.item.done")
                assert degraded_metric(http) == 1
                assert is_ready(http)
                # The client is notified only once.
                assert "session.state_degraded True" not in await say(socket, "I have a dog.")
                other.execute("rollback")
            said = 3
            while "session.state_degraded False" not in await say(socket, "Are you there?"):
                said += 1
                await asyncio.sleep(0.05)
            assert degraded_metric(http) == 0
            server.popen.kill()
            await asyncio.to_thread(server.popen.wait)
            return created["session"]["id"], created["resume_token"], said + 1

    async def items_of(url: str, session_id: str, token: str) -> int:
        async with websockets.connect(f"{url}/v1/realtime?resume={session_id}") as socket:
            await socket.send(resume(session_id, token))
            return int(json.loads(await socket.recv())["num_items"])

    server = serve(*flags, clean=False)
    session_id, token, said = asyncio.run(asyncio.wait_for(talk(server.ws, server.url), LIMIT_S))
    server.popen.stdout.close()  # type: ignore[union-attr]
    following = serve(*flags)
    assert asyncio.run(asyncio.wait_for(items_of(following.ws, session_id, token), LIMIT_S)) == said
