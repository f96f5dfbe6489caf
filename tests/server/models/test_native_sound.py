"""The sound of a native model over a real server: each session's own, in order, none of it twice and none of it lost.

The sound of each code tells its session, turn and place in the turn (tests/adapters/marked_minicpmo.py).
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from antiphon.adapters.minicpmo.speech_decoder import UNIT_CODES
from antiphon.certify.native_client import UnitResults
from antiphon.certify.wire import read_event
from antiphon.server.state import ServerState
from tests.adapters import marked_minicpmo, tiny_minicpmo
from tests.adapters.marked_minicpmo import Mark, marks_of
from tests.server.scripted import serving

LIMIT_S = 120
SESSIONS, UNITS = 8, 6
UNIT = 16_000


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState]]:
    models = marked_minicpmo.served(tiny_minicpmo.write(tmp_path_factory.mktemp("minicpmo")))
    with serving(models=models) as (url, state, _):
        yield url, state
    models.close()


class Caller:
    """A full-duplex client, and the sound that it got: for each response, the marks of each of its units."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.socket: ClientConnection
        self.results = UnitResults()
        self.responses: list[list[list[Mark]]] = []
        self.ends: list[str] = []
        self.session_id = self.token = ""
        self.last = 0

    async def open(self, url: str, query: str = "") -> None:
        self.socket = await connect(f"{url}/v1/duplex{query}", max_size=None)
        session = {
            "instructions": tiny_minicpmo.PROMPT,
            "temperature": 0.7,
            "turn_detection": None,
            "ref_audio": marked_minicpmo.reference(self.number),
            "extra_body": {"force_listen_count": 0, "seed": self.number},
        }
        await self.socket.send(json.dumps({"type": "session.update", "session": session}))
        created = await self.take()
        assert created["type"] == "session.created", created
        self.session_id, self.token = created["session"]["id"], created.get("resume_token", "")

    async def come_back(self, url: str) -> None:
        """Cut the connection without a close frame, and resume the session."""
        self.socket.transport.abort()
        self.socket = await connect(f"{url}/v1/realtime?resume={self.session_id}", max_size=None)
        resume = {
            "session_id": self.session_id,
            "resume_token": self.token,
            "last_received_server_event_seq": self.last,
        }
        await self.socket.send(json.dumps({"type": "session.resume"} | resume))
        resumed = await self.take()
        assert resumed["type"] == "session.resumed", resumed
        self.token = resumed["resume_token"]

    async def say(self, unit: int, part: slice = slice(None)) -> None:
        # The scripted detector does not take it for speech.
        pcm = (tiny_minicpmo.sound(unit)[part] * 0.001).clip(-0.0004, 0.0004) * 32767
        pcm = pcm.astype("<i2").tobytes()
        await self.socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64encode(pcm).decode()}))

    async def take(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(message := await self.socket.recv())
        assert event["type"] != "error", event
        self.last = max(self.last, event.get("server_event_seq", 0))
        self.results.see(read_event(message))
        match event["type"]:
            case "response.created":
                self.responses.append([])
            case "response.output_audio.delta" if event["delta"]:
                pcm = np.frombuffer(b64decode(event["delta"]), "<i2").astype(np.float32) / 32768
                self.responses[-1].append(marks_of(pcm))
            case "response.done":
                self.ends.append(event["response"]["status"])
        return event

    async def hear(self, units: int) -> None:
        """Read events until `units` units in all have their result."""
        while self.results.count < units:
            await self.take()

    def check(self) -> int:
        """Check all sound, and return the number of units with sound."""
        turns = []
        for units in self.responses:
            marks = [mark for unit in units for mark in unit]
            assert [mark.code for mark in marks] == list(range(len(marks))), "a code is missing, or came twice"
            assert {mark.session for mark in marks} <= {self.number}, "sound of another session"
            turns += sorted({mark.turn for mark in marks})
            # In the first and the last unit of a turn, the model may say less.
            assert {len(unit) for unit in units[1:-1]} <= {UNIT_CODES}, "a unit without its second of sound"
        assert turns == sorted(set(turns)), "a turn has sound in two responses"
        return sum(map(len, self.responses))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_every_unit_of_every_session_has_its_own_sound(native: tuple[str, ServerState]) -> None:
    url, state = native

    async def talk(number: int) -> int:
        caller = Caller(number)
        await caller.open(url)
        # The client sends faster than real time, so no silence is heard in between.
        for unit in range(UNITS):
            await caller.say(10 * number + unit)
        await caller.hear(UNITS)
        await caller.socket.close()
        return caller.check()

    async def main() -> list[int]:
        return await asyncio.gather(*map(talk, range(SESSIONS)))

    spoken = run(main())
    assert sum(spoken) >= SESSIONS * UNITS / 2, "the tiny model speaks in most units"
    assert state.metrics.registry.get_sample_value("antiphon_units_total", {"what": "done"}) >= SESSIONS * UNITS


def test_when_a_turn_is_cancelled_between_two_windows_then_the_next_one_has_only_its_own_sound(
    native: tuple[str, ServerState],
) -> None:
    async def main() -> Caller:
        caller = Caller(20)
        await caller.open(native[0])
        await caller.say(0)
        unit = 0
        # Cancels two turns after their first unit with sound, and hears two units of the third.
        while len(caller.ends) < 2 or len(caller.responses) < 3 or len(caller.responses[-1]) < 2:
            if caller.results.count > unit:
                unit = caller.results.count
                await caller.say(unit)
            event = await caller.take()
            if event["type"] == "response.output_audio.delta" and len(caller.ends) < 2:
                await caller.socket.send(json.dumps({"type": "response.cancel"}))
                await caller.say(unit + 1)
                while (await caller.take())["type"] != "response.done":
                    pass
                await caller.say(unit + 2)
        await caller.socket.close()
        return caller

    caller = run(main())
    assert caller.ends[:2] == ["cancelled", "cancelled"]
    assert caller.check() >= 4


def test_when_a_client_comes_back_in_the_middle_of_a_unit_then_its_sound_goes_on(
    native: tuple[str, ServerState],
) -> None:
    url, _ = native

    async def main() -> Caller:
        caller = Caller(30)
        await caller.open(url, "?resume=1")
        for unit in range(UNITS):
            await caller.say(unit, slice(0, UNIT // 2))
            if unit in (2, 4):
                await caller.come_back(url)
            await caller.say(unit, slice(UNIT // 2, None))
            await caller.hear(unit + 1)
        await caller.socket.close()
        return caller

    assert run(main()).check() >= UNITS / 2
