"""Sidebands: a program beside the client's connection, with openai's own client and over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import websockets
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.server.live.sideband import MAX_SIDEBANDS
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.signals import become
from tests.server.clients import LIMIT_S, Wire, b64, connect
from tests.server.scripted import Echo, serving
from tests.server.test_mcp import Caller

KEYS = ("key-of-one", "key-of-two")
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ServerState, Echo]]:
    settings = Settings()
    with serving(replace(settings, server=replace(settings.server, api_keys=KEYS)), partner=Caller()) as it:
        yield it


def header(key: str = KEYS[0]) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


async def begun(wire: Wire, **session: Any) -> str:
    """Begin a conversation, and return its id."""
    created = await wire.until("session.created")
    await wire.say("session.update", session={"type": "realtime"} | session)
    await wire.until("session.updated")
    return str(created["session"]["id"])


async def ask(wire: Wire, text: str) -> None:
    part = {"type": "input_text", "text": text}
    await wire.say("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
    await wire.say("response.create")


async def status(ws: str, call_id: str, key: str = KEYS[0]) -> int:
    """Return the status with which a sideband is refused; 101 if it is accepted."""
    try:
        async with connect(ws, f"?call_id={call_id}", **header(key)):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


def test_openais_client_answers_a_function_beside_the_client(server: tuple[str, ServerState, Echo]) -> None:
    """The program adds the function. The client, which knows nothing of it, gets the answer in sound."""
    ws, _, _ = server

    async def main() -> tuple[list[str], list[str]]:
        openai = AsyncOpenAI(
            api_key=KEYS[0], base_url=f"{ws.replace('ws', 'http', 1)}/v1", websocket_base_url=f"{ws}/v1"
        )
        async with connect(ws, **header()) as client:
            id = await begun(client)
            async with openai.realtime.connect(call_id=id) as program, asyncio.timeout(LIMIT_S):
                first = await program.recv()
                assert (first.type, first.session.id) == ("session.created", id)  # type: ignore[union-attr]
                await program.session.update(session={"type": "realtime", "tools": [WEATHER]})  # type: ignore[list-item]
                updated = await client.until("session.updated")
                assert [tool["name"] for tool in updated["session"]["tools"]] == ["weather"]
                await ask(client, "call weather {}")
                kinds = []
                async for event in program:
                    kinds.append(event.type)
                    if event.type == "response.function_call_arguments.done":
                        await program.conversation.item.create(
                            item={"type": "function_call_output", "call_id": event.call_id, "output": "It rains."}
                        )
                        await program.response.create()
                    if event.type == "response.output_audio_transcript.done":
                        assert event.transcript == "It rains."
                        break
                await client.until("response.output_audio_transcript.done")
        return kinds, [frame["type"] for frame in client.seen]

    of_program, of_client = asyncio.run(main())
    # The program gets no audio.
    assert "response.output_audio.delta" in of_client
    assert "response.output_audio.delta" not in of_program
    assert {"session.updated", "response.created", "conversation.item.added"} <= {*of_program}


def test_who_may_join_a_session(server: tuple[str, ServerState, Echo]) -> None:
    """The key that opened it, or the client secret that opened it."""
    ws, state, _ = server

    async def secret(http: httpx.AsyncClient, instructions: str, key: str = KEYS[0]) -> str:
        body = {"session": {"type": "realtime", "instructions": instructions}}
        made = await http.post("/v1/realtime/client_secrets", json=body, headers={"Authorization": f"Bearer {key}"})
        return str(made.json()["value"])

    async def main() -> None:
        async with httpx.AsyncClient(base_url=ws.replace("ws", "http", 1)) as http:
            own, other, foreign = await secret(http, "A"), await secret(http, "B"), await secret(http, "A", KEYS[1])
            async with connect(ws, **header()) as client:
                id = await begun(client)
                assert [await status(ws, id, key) for key in (KEYS[0], KEYS[1], own)] == [101, 404, 404]
                assert await status(ws, "sess-unknown") == 404
            async with connect(ws, **header(own)) as client:
                id = str((await client.until("session.created"))["session"]["id"])
                found = [await status(ws, id, key) for key in (own, other, foreign, KEYS[0], KEYS[1])]
                assert found == [101, 404, 404, 101, 404]
            await become(lambda: id not in state.sessions.shared, 0.01)
            assert await status(ws, id, own) == 404

    asyncio.run(main())


def test_either_connection_may_leave_first(server: tuple[str, ServerState, Echo]) -> None:
    ws, state, _ = server

    async def main() -> None:
        async with connect(ws, **header()) as client:
            id = await begun(client, output_modalities=["text"])
            async with connect(ws, f"?call_id={id}", **header()) as program:
                await program.until("session.created")
            async with connect(ws, f"?call_id={id}", **header()) as stays:
                await ask(client, "I am here.")
                await stays.until("response.done")
                await client.until("response.done")
                await client.socket.close()
                with pytest.raises(ConnectionClosed):
                    await stays.until("never")
                assert stays.socket.close_code == 1000
        await become(lambda: not state.sessions.live, 0.01)
        assert not state.sessions.shared

    asyncio.run(main())


def test_a_sideband_is_resumed_and_gets_what_it_has_missed(server: tuple[str, ServerState, Echo]) -> None:
    ws, _, _ = server

    async def main() -> None:
        async with connect(ws, **header()) as client:
            id = await begun(client, output_modalities=["text"])
            async with connect(ws, f"?call_id={id}&resume=1", **header()) as program:
                created = await program.until("session.created")
                program.socket.transport.abort()
            await ask(client, "Are you there?")
            await client.until("response.done")
            async with connect(ws, f"?call_id={id}&resume={created['id']}", **header()) as program:
                fields = {"session_id": created["id"], "resume_token": created["resume_token"]}
                await program.say("session.resume", **fields, last_received_server_event_seq=0)
                resumed = await program.until("session.resumed")
                assert resumed["session"]["id"] == id
                await program.until("response.done")
                assert program.joined() == "Are you there?"
                # It acts again.
                await program.say("session.update", session={"type": "realtime", "instructions": "Be kind."})
                assert (await client.until("session.updated"))["session"]["instructions"] == "Be kind."

    asyncio.run(main())


def test_errors_go_to_the_connection_at_fault_and_a_sideband_sends_no_audio(
    server: tuple[str, ServerState, Echo],
) -> None:
    ws, _, _ = server

    async def main() -> None:
        async with connect(ws, **header()) as client:
            id = await begun(client)
            async with connect(ws, f"?call_id={id}", **header()) as program:
                await program.say("no.such.event")
                assert (await program.until("error"))["error"]["code"] == "invalid_value"
                await program.say("input_audio_buffer.append", audio=b64(np.zeros(3200, np.float32), 24000))
                assert (await program.until("error"))["error"]["code"] == "unsupported_event"
                await program.say("session.update", session={"type": "realtime", "instructions": "Be kind."})
                await client.until("session.updated")
                assert not [frame for frame in client.seen if frame["type"] == "error"]

    asyncio.run(main())


def test_a_session_has_a_limited_number_of_sidebands(server: tuple[str, ServerState, Echo]) -> None:
    ws, _, _ = server

    async def main() -> None:
        async with connect(ws, **header()) as client:
            id = await begun(client)
            url = f"{ws}/v1/realtime?call_id={id}"
            programs = [await websockets.connect(url, **header()) for _ in range(MAX_SIDEBANDS)]
            assert await status(ws, id) == 429
            # All of them get the events.
            await client.say("session.update", session={"type": "realtime", "instructions": "Be kind."})
            for program in programs:
                kinds = [json.loads(await program.recv())["type"] for _ in range(2)]
                assert kinds == ["session.created", "session.updated"]
                await program.close()

    asyncio.run(main())
