"""Frames that are slow to decode are decoded in a thread, without any other effect."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from websockets.asyncio.client import connect

from antiphon.events.transcription import AppendAudio
from antiphon.protocols.connection import Command
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.wire import Received
from antiphon.server.live.open_wire import LARGE_FRAME_BYTES
from antiphon.settings import Settings
from tests.server.scripted import serving

SECOND = bytes(2 * 24_000)


def append(num_seconds: int) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(SECOND * num_seconds).decode()})


def test_when_a_frame_is_large_then_a_thread_decodes_it_and_events_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed, calls = RealtimeConnection.feed, list[tuple[int, str]]()
    fed, go_on = threading.Event(), threading.Event()

    def watched(self: RealtimeConnection, data: str | bytes | AppendAudio) -> Received[Command]:
        calls.append((len(data) if isinstance(data, str) else 0, threading.current_thread().name))
        if isinstance(data, str) and len(data) >= LARGE_FRAME_BYTES:
            fed.set()
            assert go_on.wait(20)
        return feed(self, data)

    monkeypatch.setattr(RealtimeConnection, "feed", watched)

    async def main(url: str) -> None:
        async with (
            connect(f"{url}/v1/realtime?model=echo", max_size=None) as one,
            connect(f"{url}/v1/realtime?model=echo") as other,
        ):
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a b c"}]}
            await one.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await one.send(json.dumps({"type": "response.create"}))
            await one.send(append(10))
            await asyncio.to_thread(fed.wait, 20)
            # The loop serves other clients while the frame is decoded, and the response waits for the wire.
            await other.send(append(1))
            await other.send(json.dumps({"type": "input_audio_buffer.commit"}))
            await until(other, "input_audio_buffer.committed")
            go_on.set()
            frames = await until(one, "response.done")
            text = "".join(f["delta"] for f in frames if f["type"] == "response.output_audio_transcript.delta")
            assert text.split() == ["a", "b", "c"]

    with serving() as (url, _, _):
        asyncio.run(main(url))
    large = {name for size, name in calls if size >= LARGE_FRAME_BYTES}
    small = {name for size, name in calls if size < LARGE_FRAME_BYTES}
    assert large
    assert len(small) == 1
    assert not large & small


async def until(socket: Any, wanted: str) -> list[dict[str, Any]]:
    """Read up to the frame of this type, and return all frames that were read."""
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1]["type"] != wanted:
        frames.append(json.loads(await asyncio.wait_for(socket.recv(), 20)))
    return frames


@pytest.mark.parametrize(
    ("query", "kind", "code"),
    [
        ("?model=echo", "conversation.item.create", "invalid_event"),
        ("?intent=transcription", "session.update", "invalid_event"),
        ("?duplex=1&model=echo", "session.update", "event_too_large"),
    ],
)
@pytest.mark.parametrize("is_last", [False, True], ids=["named first", "named last"])
def test_when_a_frame_is_too_large_then_the_error_names_it_as_the_client_did(
    query: str, kind: str, code: str, *, is_last: bool
) -> None:
    about, padding = {"event_id": "mine_7"}, {"padding": "x" * 4096}
    frame = {"type": kind, **(padding if is_last else about), **(about if is_last else padding)}

    async def main(url: str) -> dict[str, Any]:
        async with connect(f"{url}/v1/realtime{query}") as socket:
            await socket.send(json.dumps(frame))
            error: dict[str, Any] = (await until(socket, "error"))[-1]["error"]
            return error

    settings = Settings()
    small = replace(settings, audio=replace(settings.audio, max_frame_bytes=2048))
    with serving(small) as (url, _, _):
        error = asyncio.run(main(url))
    assert (error["code"], error["event_id"]) == (code, "mine_7")
