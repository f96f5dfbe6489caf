"""A telephone call at a door: a caller whose carrier plays the sound as Twilio does, and an application beside it.

The carrier is written from Twilio's documents (`bench/carrier.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import numpy as np
from bench import carrier
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import to_ulaw
from antiphon.audio.pcm import Resampler
from tests.cluster.processes import Host

SAMPLES = int(carrier.RATE_HZ * carrier.FRAME_S)
LIMIT_S = 40.0
# The key of the caller's stream, and of the application; and the path of the stream.
KEY = "key-1"
MEDIA = f"/v1/telephone/media/{KEY}"


class Line:
    """One call. `buffer`: what the carrier plays. `clears`: how often it was emptied."""

    def __init__(self, socket: ClientConnection) -> None:
        self.buffer = carrier.PlayBuffer(asyncio.get_running_loop().time)
        self.clears = 0
        self._socket = socket
        self._words = np.zeros(0, np.float32)

    @property
    def closed(self) -> tuple[int, str]:
        """The code and the reason with which the stream was closed; 0 and "" until then."""
        return self._socket.close_code or 0, self._socket.close_reason or ""

    def speak(self, pcm: Pcm) -> None:
        """Say words at 16 kHz, after those before them."""
        self._words = np.concatenate((self._words, Resampler(16_000, carrier.RATE_HZ).feed(pcm)))

    async def press(self, key: str) -> None:
        await self._socket.send(carrier.dtmf(key))

    async def carry(self) -> None:
        """Send what the caller says, and play and return marks, until the stream is closed."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        with suppress(ConnectionClosed):
            while True:
                for name in self.buffer.due():
                    await self._socket.send(carrier.mark(name))
                said, self._words = self._words[:SAMPLES], self._words[SAMPLES:]
                said = np.concatenate((said, np.zeros(SAMPLES - len(said), np.float32)))
                await self._socket.send(carrier.media(to_ulaw(said)))
                due_s += carrier.FRAME_S
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due_s):
                        while True:
                            await self._take(json.loads(await self._socket.recv()))

    async def _take(self, message: dict[str, Any]) -> None:
        assert message["streamSid"] == carrier.STREAM
        self.clears += message["event"] == "clear"
        for name in self.buffer.take(message):
            await self._socket.send(carrier.mark(name))

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():  # noqa: ASYNC110 (many things change it)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def call(ws: str, path: str, start: str, **options: Any) -> AsyncIterator[Line]:
    """Open a media stream, begin the call and carry it while the block runs. `options` are those of `connect`."""
    async with connect(ws + path, **options) as socket:
        line = Line(socket)
        await socket.send(carrier.connected())
        await socket.send(start)
        task = asyncio.create_task(line.carry())
        try:
            yield line
        finally:
            task.cancel()


async def listed(door: Host, key: str = KEY) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=door.url, headers={"Authorization": f"Bearer {key}"}) as http:
        found: list[dict[str, Any]] = (await http.get("/v1/telephone/calls")).json()["data"]
        return found


async def id_of_call(door: Host) -> str:
    """Return the id of the only call, when it has begun."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := await listed(door)):  # noqa: ASYNC110 (it is of another process)
            await asyncio.sleep(0.02)
    (only,) = found
    return str(only["id"])


class Application:
    """An application that follows a call, and says texts as the caller."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def until(self, type: str) -> Any:
        """Return the next event of this type."""
        async with asyncio.timeout(LIMIT_S):
            while (event := json.loads(await self._socket.recv()))["type"] != type:
                pass
        return event

    async def say(self, type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": type, **fields}))

    async def ask(self, words: str) -> None:
        part = {"type": "input_text", "text": words}
        await self.say("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
        await self.say("response.create")


@asynccontextmanager
async def application(door: Host, id: str) -> AsyncIterator[Application]:
    """Join a call as soon as a host has it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                # Unread events do not delay the end of the connection.
                url = f"{door.ws}/v1/realtime?call_id={id}"
                socket = await connect(url, additional_headers=headers, max_queue=None)
                break
            except InvalidStatus:
                await asyncio.sleep(0.02)
    async with socket:
        yield Application(socket)
