"""The openai client's live.connect(): a spoken turn, spoken commentaries, an interruption, a mute, the close.

The types of the client check each frame. TURNS (3) is the number of commentaries.
"""

import asyncio
import base64
import json
import os
import sys
from importlib.metadata import version

import numpy as np
import soundfile
from openai import AsyncOpenAI
from openai.types.live.server_event import ServerEvent
from pydantic import TypeAdapter

RATE_HZ = 24_000
TURNS = int(os.environ.get("TURNS", "3"))
TYPES = TypeAdapter(ServerEvent)


class Seen:
    def __init__(self):
        self.kinds, self.loud, self.heard, self.said, self.frames = [], 0, "", "", 0

    def take(self, event):
        self.frames += 1
        if self.kinds[-1:] != [event.type]:
            self.kinds.append(event.type)
        match event.type:
            case "session.output_audio.delta":
                pcm = np.frombuffer(base64.b64decode(event.delta), "<i2")
                self.loud += len(pcm) if np.abs(pcm).max(initial=0) > 300 else 0
            case "session.input_transcript.delta":
                self.heard += event.delta
            case "session.output_transcript.delta":
                self.said += event.delta
            case "error":
                raise AssertionError(event)


async def until(what, reached, seconds=60):
    for _ in range(seconds * 20):
        if reached():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(what)


async def main():
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    at = np.arange(int(len(data) * RATE_HZ / rate)) * rate / RATE_HZ
    speech = np.interp(at, np.arange(len(data)), data).astype("<i2")
    seen, to_say = Seen(), [np.zeros(0, "<i2")]
    async with client.live.connect(max_retries=0) as connection:
        await connection.send(
            {"type": "session.start", "session": {"model": "gpt-live-1", "instructions": "You are terse."}}
        )

        async def read():
            while "session.closed" not in seen.kinds:
                raw = json.loads(await connection.recv_bytes())
                seen.take(TYPES.validate_python(raw))

        async def microphone():
            """Send what is to be said, or silence, as a microphone does."""
            while True:
                part, to_say[0] = to_say[0][:2400], to_say[0][2400:]
                part = np.concatenate((part, np.zeros(2400 - len(part), "<i2")))
                audio = base64.b64encode(part.tobytes()).decode()
                await connection.send({"type": "session.input_audio.append", "audio": audio})
                await asyncio.sleep(0.1)

        reading = asyncio.create_task(read())
        await until("session.started", lambda: "session.started" in seen.kinds)
        speaking = asyncio.create_task(microphone())
        to_say[0] = speech
        await until("the user's words", lambda: "surpassed" in seen.heard)
        await until("a spoken answer", lambda: seen.loud > 6_000 and seen.said)
        for number in range(TURNS):
            loud = seen.loud
            await connection.send(
                {"type": "session.commentary.append", "delegation_id": None, "content": f"The number is {number}."}
            )
            await until(f"commentary {number}", lambda loud=loud: seen.loud > loud + 2_000)
            await asyncio.sleep(1)
        await connection.send(
            {
                "type": "session.commentary.append",
                "delegation_id": None,
                "content": "Count slowly from one to one hundred, in words.",
            }
        )
        loud = seen.loud
        await until("a long answer", lambda: seen.loud > loud + RATE_HZ)
        to_say[0] = speech
        await asyncio.sleep(3)
        loud = seen.loud
        await asyncio.sleep(1.5)
        assert seen.loud - loud < RATE_HZ, "it went on"
        await connection.send({"type": "session.input_audio.mute", "event_id": "m"})
        await until("muted", lambda: "session.input_audio.muted" in seen.kinds)
        await connection.send({"type": "session.close"})
        await asyncio.wait_for(reading, 20)
        speaking.cancel()
    print(f"openai {version('openai')} live: {seen.frames} frames, none refused, {seen.loud / RATE_HZ:.1f} s of speech")


asyncio.run(main())
