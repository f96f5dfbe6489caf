"""Servers that share a Redis or a Postgres: one is killed, and another one continues its conversation."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.conftest import SMALL, Serve
from tests.server.clients import Wire, connect
from tests.store.servers import PASSWORD, PostgresServer, RedisServer, Server

LIMIT_S = 90
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "My name is Bruno."}]}


async def resume(ws: str, session_id: str, token: str) -> dict[str, Any]:
    async with connect(ws, f"?resume={session_id}") as wire:
        fields = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": 0}
        await wire.say("session.resume", **fields)
        return await wire.read()


async def begin(wire: Wire) -> tuple[str, str]:
    created = await wire.read()
    await wire.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
    await wire.say("conversation.item.create", item=ITEM)
    await wire.until("conversation.item.done")
    return created["session"]["id"], created["resume_token"]


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
def test_when_a_server_is_killed_then_another_one_has_its_conversation_once_its_time_is_over(
    serve: Serve, kind: type[Server]
) -> None:
    if missing := kind.missing():
        pytest.skip(missing)
    store = kind()
    store.start()
    flags = ("--language-model", SMALL, "--state", store.url, "--host-name", "it", "--host-ttl-s", "2")
    try:
        one, two = serve(*flags, clean=False), serve(*flags)

        async def main() -> None:
            async with connect(one.ws, "?resume=1") as wire:
                session_id, token = await begin(wire)
                # While the first server is alive, the second relays to it.
                relayed = await resume(two.ws, session_id, token)
                assert (relayed["type"], relayed["how"]) == ("session.resumed", "relayed")
                token = relayed["resume_token"]
                one.popen.kill()
                await asyncio.to_thread(one.popen.wait)
            killed_s = time.monotonic()
            while (frame := await resume(two.ws, session_id, token))["type"] == "error":
                assert frame["error"]["code"] == "session_elsewhere"
                assert time.monotonic() - killed_s < LIMIT_S
            assert (frame["type"], frame["how"], frame["num_items"]) == ("session.resumed", "claimed", 1)

        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
        one.popen.stdout.close()  # type: ignore[union-attr]
        two.terminate()
        two.popen.wait(30)
        assert PASSWORD not in one.log.read_text() + two.log.read_text()
    finally:
        store.close()
