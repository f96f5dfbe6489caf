"""Rows that version 0.1.0 has written are continued, as docs/stability.md promises. The store and the sockets are real.

`rows_of_0_1_0.json` has the rows of conversations in two states, as that version wrote them, each with its token.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.store.sessions import ReceivedCounts, StoredSession
from tests.scripted import speech
from tests.server.clients import b64
from tests.server.live.test_ownership import Server, answer, resuming, say, sharing

ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "rows_of_0_1_0.json").read_text())
# The turns of each row were a written one and a spoken one. A row that was stored in an answer has a third one.
TURNS = {"between two turns": ["one two", "w3 w4"], "in an answer": ["one two", "w3 w4", "five six"]}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sharing(tmp_path_factory.mktemp("state"), 1) as (found,):
        yield found


def put(host: Server, about: dict[str, Any]) -> None:
    """Write a row as its owner did before it died."""
    received = ReceivedCounts(about["received_events"], about["received_audio_ms"])
    token, snapshot = b64decode(about["token_hash"]), msgspec.json.encode(about["snapshot"])
    session = StoredSession(about["id"], about["key_hash"], token, snapshot, "dead/1", 1, received, 0, about["version"])
    host.store.put(session).result(10)


@pytest.mark.parametrize("name", list(ROWS))
def test_a_conversation_that_0_1_0_has_stored_goes_on(host: Server, name: str) -> None:
    about = ROWS[name]
    put(host, about)

    async def main() -> None:
        async with resuming(host, about["id"], about["resume_token"], about["last_received"]) as (wire, resumed):
            assert (resumed["type"], resumed["restored"]) == ("session.resumed", True)
            # The messages were a configuration, a written turn, the request for an answer, and a spoken turn. A turn
            # may begin in the silence at its end, so the client sends it again.
            assert resumed["received_events"] == 3
            await wire.say("input_audio_buffer.append", audio=b64(speech(3, 2, 15), 24_000))
            if name == "in an answer":
                # The next host skips these messages, and answers once.
                await say(wire, "five six")
                await wire.say("response.create")
                ended, done = [await wire.until("response.done") for _ in range(2)]
                assert (ended["response"]["status"], done["response"]["status"]) == ("cancelled", "completed")
            await wire.say("input_audio_buffer.append", audio=b64(speech(7, 2, 15), 24_000))
            done = await wire.until("response.done")
            assert done["response"]["output"][0]["content"][0]["text"] == "w7 w8"
            assert await answer(wire, "nine") == "nine"
            stored = json.loads(host.row(about["id"]).snapshot)["items"]
            said = [part["text"] for item in stored for part in item["parts"]]
            assert said == [text for turn in (*TURNS[name], "w7 w8", "nine") for text in (turn, turn)]

    asyncio.run(main())
