"""Faults inside the server: a store that fails, hangs or returns wrong data, and a model that raises or is wrong.

Each fault has one stated consequence, and the server stays ready. test_dead_models.py has models whose threads end or
hang.
"""

from __future__ import annotations

import asyncio
import io
import wave
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import httpx
import pytest

from antiphon.contracts import Hypothesis, Window
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError, StoreError
from antiphon.server.credentials import Caller
from antiphon.server.live.moving import stored_row
from antiphon.server.live.moving.persistence import caller_hash
from antiphon.store.sessions import ClaimRefusal, Hold, Host, StoredSession
from antiphon.transports.journal import ResumeToken
from tests.scripted import ScriptedTranscriber, speech
from tests.server.clients import Wire, connect
from tests.server.scripted import serving

SETTINGS = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


class FaultyStore:
    """A store of conversations whose `put` and `get` the test defines."""

    degraded = None

    def __init__(self, row: StoredSession | Exception | None = None, write: Exception | bool = True) -> None:
        self._row, self._write = row, write

    def put(self, session: StoredSession, *, turn_kept: bool = False) -> Future[None]:
        written: Future[None] = Future()
        if isinstance(self._write, Exception):
            written.set_exception(self._write)
        elif self._write:
            written.set_result(None)
        return written

    def get(self, session_id: str) -> StoredSession | None:
        if isinstance(self._row, Exception):
            raise self._row
        return self._row

    def host(self, name: str) -> Host | None:
        return None

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        row = self.get(session_id)
        return replace(row, owner=new_owner, fence=seen_fence + 1) if row else ClaimRefusal.UNKNOWN

    def tail(self, session_id: str) -> tuple[()]:
        return ()

    def release(self, hold: Hold) -> None:
        return

    def forget(self, hold: Hold) -> None:
        return


async def is_ready(ws: str) -> bool:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{ws.replace('ws', 'http', 1)}/ready")).status_code == 200


TOKEN = ResumeToken()
SECRET = TOKEN.renew()


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (StoreError("the disk is gone"), "resource_exhausted"),
        (b"", "unknown_session"),
        (b'{"wire": {}, "opening": {}, "items": []}', "unknown_session"),
        (
            b'{"wire": {"session_id": "s", "dialect": "none", "session": {}}, "opening": {}, "items": []}',
            "unknown_session",
        ),
        (b"\xff", "unknown_session"),
    ],
)
def test_when_a_stored_session_cannot_be_read_then_resuming_it_is_refused_by_name(
    row: StoreError | bytes, code: str
) -> None:
    stored = StoredSession("sess-1", caller_hash(Caller()), TOKEN.hash, row) if isinstance(row, bytes) else row

    async def main(ws: str) -> None:
        async with connect(ws, "?resume=sess-1") as wire:
            await wire.say("session.resume", session_id="sess-1", resume_token=SECRET, last_received_server_event_seq=0)
            assert (await wire.read())["error"]["code"] == code
        # The place of the session is free again.
        assert await is_ready(ws)

    with serving() as (ws, state, _):
        state.sessions.store = FaultyStore(stored)  # type: ignore[assignment]
        asyncio.run(main(ws))
        assert state.admission.num_sessions == 0


@pytest.mark.parametrize("write", [StoreError("no space left"), False])
def test_when_a_write_fails_or_hangs_then_the_client_is_told_before_its_item_is_acknowledged(
    write: Exception | bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_row, "STORE_S", 0.01)

    async def main(ws: str) -> None:
        async with connect(ws, "?resume=1") as wire:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
            await wire.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            await wire.say("conversation.item.create", item=item)
            await wire.until("conversation.item.done")
            reported = [frame["type"] for frame in wire.seen]
            assert reported.index("session.state_degraded") < reported.index("conversation.item.done")
            assert await is_ready(ws)

    with serving() as (ws, state, _):
        state.sessions.store = FaultyStore(write=write)  # type: ignore[assignment]
        asyncio.run(main(ws))


class InLane(ScriptedTranscriber):
    """Decodes in a lane. The test defines the work in the lane."""

    def __init__(self, lane: Lane[Any, Any]) -> None:
        super().__init__()
        self._lane = lane

    async def decode(self, window: Window) -> Hypothesis:
        await self._lane.run(window)
        return await super().decode(window)


def raises(jobs: Sequence[Any]) -> Sequence[Any]:
    raise ModelError("out of memory")


def raises_what_no_contract_allows(jobs: Sequence[Any]) -> Sequence[Any]:
    raise KeyError("a library's own")


def gives_too_many(jobs: Sequence[Any]) -> Sequence[Any]:
    return [None, *jobs]


def gives_none(jobs: Sequence[Any]) -> Any:
    return None


@pytest.mark.parametrize("fault", [raises, raises_what_no_contract_allows, gives_too_many, gives_none])
def test_when_a_model_fails_then_the_turn_fails_by_name_and_the_next_one_is_transcribed(fault: Any) -> None:
    works: list[Any] = [fault]
    lane: Lane[Any, Any] = Lane("transcriber", lambda jobs: works[0](jobs))

    async def turn(wire: Wire, first: int) -> dict[str, Any]:
        await wire.sound(speech(first, 3), 24_000)
        await wire.say("input_audio_buffer.commit")
        return await wire.until(
            lambda frame: frame["type"].endswith(("transcription.failed", "transcription.completed"))
        )

    async def main(ws: str) -> None:
        async with connect(ws, "?intent=transcription") as wire:
            await wire.say("session.update", session=SETTINGS)
            failed = await turn(wire, 1)
            assert failed["type"].endswith("failed")
            assert failed["error"]["code"]
            works[0] = list
            assert (await turn(wire, 5))["type"].endswith("completed")
            assert await is_ready(ws)

    with serving(transcriber=InLane(lane), lanes=(lane,)) as (ws, *_):
        asyncio.run(main(ws))
    lane.close()
    assert not lane.lost


def sound_file() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(32_000))
    return out.getvalue()


@pytest.mark.parametrize("error", [ModelError("out of memory"), RuntimeError("a codec's own"), MemoryError()])
def test_when_a_file_fails_inside_then_it_is_a_500_by_name_and_its_place_is_free(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr("antiphon.server.routes.transcriptions.measure_s", fail)
    with serving() as (ws, state, _):
        url = f"{ws.replace('ws', 'http', 1)}/v1/audio/transcriptions"
        answer = httpx.post(url, data={"model": "default"}, files={"file": ("a.wav", sound_file())}, timeout=30)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] in ("processing_error", "server_error")
        assert "codec" not in answer.text
        assert state.admission.num_sessions == 0
        assert asyncio.run(is_ready(ws))
