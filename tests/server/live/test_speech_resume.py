"""Speech streams that outlive their connection: the audio of a stream that is cut off is the same as without a cut."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.conftest import Process

LIMIT_S = 90
TEXT = (
    "The sea was calm that morning. Nobody had seen the boats come in, and nobody asked. "
    "A dog barked twice. Then it was quiet again."
)
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "seed": 7}


async def spoken(url: str, cuts: int, seed: int = 1) -> tuple[list[Any], bytes, int]:
    """Speak two utterances; return their events, their audio, and the number of cuts."""
    draw = random.Random(seed)
    frames = [json.dumps(CONFIG)]
    for _ in range(2):
        frames += [json.dumps({"type": "input.text", "text": word + " "}) for word in TEXT.split()]
        frames.append(json.dumps({"type": "input.done"}))
    events: list[Any] = []
    sound, at, count, made, session, token = b"", 0, 0, 0, "", ""
    socket: ClientConnection = await connect(f"{url}/v1/audio/speech/stream?resume=1", max_size=None)
    while sum(e["type"] == "session.done" for e in events) < 2:
        try:
            if token and made < cuts and draw.random() < 0.4:
                made += 1
                socket.transport.abort()
                raise ConnectionClosed(None, None)
            if token and at < len(frames):
                await socket.send(frames[at])
                at += 1
            async with asyncio.timeout(0.01 if at < len(frames) else 20):
                data = await socket.recv()
            if isinstance(data, bytes):
                count += 1
                sound += data
                continue
            event = json.loads(data)
            if event["type"] == "session.created":
                session, token = event["session_id"], event["resume_token"]
                continue
            count += 1
            assert event.pop("server_event_seq") == count
            events.append(event)
        except TimeoutError:
            assert at < len(frames), events[-3:]
        except ConnectionClosed:
            await socket.wait_closed()
            socket = await connect(f"{url}/v1/audio/speech/stream?resume={session}", max_size=None)
            resume = {"type": "session.resume", "session_id": session, "resume_token": token}
            await socket.send(json.dumps(resume | {"last_received_server_event_seq": count}))
            resumed = json.loads(await socket.recv())
            assert resumed["type"] == "session.resumed", resumed
            token, at = resumed["resume_token"], resumed["received_events"]
    await socket.send(json.dumps({"type": "session.close"}))
    await socket.wait_closed()
    return events, sound, made


def test_when_a_stream_is_cut_off_then_its_audio_is_that_of_an_uncut_one(speaker: Process) -> None:
    async def main() -> list[tuple[list[Any], bytes, int]]:
        async with asyncio.timeout(LIMIT_S):
            return [await spoken(speaker.ws, 0), await spoken(speaker.ws, 30)]

    (events, sound, _), (torn, torn_sound, cuts) = asyncio.run(main())
    assert cuts >= 20
    assert len(sound) > 5 * 48_000
    assert torn == events
    assert torn_sound == sound


def test_when_a_resume_names_no_stream_then_it_is_refused_at_once(speaker: Process) -> None:
    async def main() -> dict[str, Any]:
        async with connect(f"{speaker.ws}/v1/audio/speech/stream?resume=sess-0") as socket:
            return json.loads(await socket.recv())  # type: ignore[no-any-return]

    assert asyncio.run(main())["error"]["code"] == "unknown_session"


def test_when_no_token_was_asked_for_then_the_streams_events_have_no_numbers(speaker: Process) -> None:
    async def main() -> dict[str, Any]:
        async with connect(f"{speaker.ws}/v1/audio/speech/stream") as socket:
            await socket.send(json.dumps(CONFIG | {"response_format": "wav", "stream_audio": False}))
            await socket.send(json.dumps({"type": "input.text", "text": "Hello."}))
            await socket.send(json.dumps({"type": "input.done"}))
            return json.loads(await socket.recv())  # type: ignore[no-any-return]

    event = asyncio.run(main())
    assert event["type"] == "audio.start"
    assert "server_event_seq" not in event
