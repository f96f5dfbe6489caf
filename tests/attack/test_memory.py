"""A client that exceeds its memory limit gets an error. Other clients are unaffected, and all memory is released."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.attack.doors import as_key
from tests.conftest import SMALL, Process, Serve
from tests.server.clients import Wire, connect

ALICE, BOB = as_key("alice"), as_key("bob")
KIB = 1 << 10
TEXT = "word " * (40 * KIB)
MIB = KIB * KIB


@pytest.fixture(scope="module")
def tight(serve: Serve) -> Process:
    """Return a server that allows a session 1 MiB, a key 2 MiB, and all keys together 16 MiB."""
    memory = ("--session-memory-mb", "1", "--key-memory-mb", "2", "--total-memory-mb", "16")
    rate = ("--max-events-per-s", "100000")
    return serve("--language-model", SMALL, "--api-key", "alice", "--api-key", "bob", *memory, *rate)


def metric(server: Process, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def create_item(wire: Wire, text: str) -> dict[str, Any]:
    """Create a message, and return the item or the error."""
    await wire.say("conversation.item.create", item=message(text))
    return await wire.until(lambda frame: frame["type"] in ("conversation.item.done", "error"))


async def fill(wire: Wire) -> list[str]:
    """Create messages until one is refused. Return the ids of those that were accepted."""
    kept: list[str] = []
    while (answer := await create_item(wire, TEXT))["type"] != "error":
        kept.append(answer["item"]["id"])
    assert answer["error"]["code"] == "memory_limit_exceeded"
    return kept


async def held(server: Process, at_most: int) -> None:
    """Wait until the server holds at most `at_most` bytes for its clients."""
    for _ in range(400):
        if metric(server, "antiphon_held_bytes") <= at_most:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(metric(server, "antiphon_held_bytes"))


def test_when_a_conversation_is_full_then_it_goes_on_with_what_it_has(tight: Process) -> None:
    async def scenario() -> None:
        await held(tight, 0)
        before = metric(tight, 'antiphon_held_refused_total{scope="session"}')
        async with connect(tight.ws, additional_headers=ALICE) as wire:
            await wire.until("session.created")
            kept = await fill(wire)
            # Each takes 200 KiB for its text, and as much for the frames that reported it.
            assert 2 <= len(kept) <= 5
            assert metric(tight, 'antiphon_held_refused_total{scope="session"}') == before + 1
            assert 400 * KIB < metric(tight, "antiphon_held_bytes") <= MIB
            await wire.say("conversation.item.delete", item_id=kept[0])
            await wire.until("conversation.item.deleted")
            assert (await create_item(wire, TEXT[: 50 * KIB]))["type"] == "conversation.item.done"
            await wire.say("response.create", response={"input": [message(TEXT)] * 4, "conversation": "none"})
            assert (await wire.until("error"))["error"]["code"] == "memory_limit_exceeded"
        await held(tight, 0)

    asyncio.run(scenario())


def test_when_a_client_goes_on_sending_what_is_not_kept_then_its_session_ends(tight: Process) -> None:
    async def scenario() -> None:
        async with connect(tight.ws, additional_headers=ALICE) as wire:
            await wire.until("session.created")
            await fill(wire)
            with pytest.raises(ConnectionClosed) as closed:
                for _ in range(100):
                    await create_item(wire, TEXT)
                await wire.until("never")
            assert closed.value.rcvd
            assert closed.value.rcvd.code == 1009

    asyncio.run(scenario())


def test_when_a_key_holds_all_it_may_then_another_has_all_of_its_own(tight: Process) -> None:
    async def scenario() -> None:
        await held(tight, 0)
        async with (
            connect(tight.ws, additional_headers=ALICE) as one,
            connect(tight.ws, additional_headers=ALICE) as two,
            connect(tight.ws, additional_headers=ALICE) as three,
            connect(tight.ws, additional_headers=BOB) as bystander,
        ):
            for wire in (one, two, three, bystander):
                await wire.until("session.created")
            counts = [len(await fill(wire)) for wire in (one, two, three)]
            assert counts[2] < counts[0]
            # Requests and client secrets also count towards their key's limit.
            secret = {"session": {"type": "realtime", "instructions": TEXT}}
            url = f"{tight.url}/v1/realtime/client_secrets"
            async with httpx.AsyncClient() as client:
                refused = await client.post(url, json=secret, headers=ALICE)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                assert (await client.post(url, json=secret, headers=BOB)).status_code == 200
            assert len(await fill(bystander)) == counts[0]
        await held(tight, 300 * KIB)

    asyncio.run(scenario())


def test_when_bodies_arrive_then_they_are_held_by_their_key_until_the_response(tight: Process) -> None:
    message = {"role": "user", "content": "x" * (3 * MIB)}
    url = f"{tight.url}/v1/chat/completions"
    response = httpx.post(url, json={"model": "any", "messages": [message]}, headers=ALICE, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    asyncio.run(held(tight, 300 * KIB))


def test_when_a_conversation_has_as_many_items_as_it_may_then_it_takes_no_more(tight: Process) -> None:
    async def scenario() -> None:
        async with connect(tight.ws, additional_headers=BOB) as wire:
            await wire.until("session.created")
            answers = []
            while not answers or answers[-1]["type"] != "error":
                answers.append(await create_item(wire, "x"))
            # Even an empty item takes some hundred bytes.
            assert len(answers) < 3000
            assert answers[-1]["error"]["code"] == "memory_limit_exceeded"

    asyncio.run(scenario())
