"""Clients of a speech stream, and of speech over REST, that know nothing of resuming and check every sample."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import websockets

from antiphon.audio.pcm import to_pcm16
from antiphon.signals import become
from tests.cluster.callers import TURN_S
from tests.cluster.scripted_voice import sound_of

SEED = 7
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "seed": SEED}


class Speaker:
    """A client of a speech stream. `config` is its configuration, besides CONFIG. `sound` has all audio as PCM16."""

    def __init__(self, url: str, **config: Any) -> None:
        self._url, self._config = url, CONFIG | config
        self.sound = b""
        self.events: list[dict[str, Any]] = []
        self._random = random.Random(SEED)

    def connected(self) -> Speaker:
        """Return the context in which it has its stream."""
        return self

    async def __aenter__(self) -> Speaker:
        self._socket = await websockets.connect(f"{self._url}/v1/audio/speech/stream", max_size=None)
        await self.send(**self._config)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def send(self, **fields: Any) -> None:
        await self._socket.send(json.dumps(fields))

    async def say(self, text: str) -> None:
        for word in text.split():
            await self.send(type="input.text", text=f"{word} ")

    async def _read(self) -> None:
        async for frame in self._socket:
            if isinstance(frame, bytes):
                self.sound += frame
            else:
                self.events.append(json.loads(frame))
        raise AssertionError(f"the door has closed: {self._socket.close_code} {self._socket.close_reason}")

    async def until(self, is_so: Callable[[], bool]) -> None:
        await become(lambda: self._reader.done() or is_so(), 0.005)
        if self._reader.done():
            self._reader.result()

    @property
    def num_done(self) -> int:
        return [event["type"] for event in self.events].count("session.done")

    @property
    def phase(self) -> str:
        return "having spoken"

    async def turn(self) -> None:
        """Have a few sentences spoken, and check their audio."""
        text = some_text(self._random)
        before, done = len(self.sound), self.num_done
        await self.say(text)
        await self.send(type="input.done")
        async with asyncio.timeout(TURN_S):
            await self.until(lambda: self.num_done > done)
        assert self.sound[before:] == to_pcm16(sound_of(text, SEED)), text

    def check(self) -> None:
        """Do nothing: each turn has checked its audio."""


class RestSpeaker:
    """A client of `/v1/audio/speech`. `url` is that of a door, http://."""

    phase = "having spoken over REST"

    def __init__(self, url: str) -> None:
        self._url = url
        self._random = random.Random(SEED)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=TURN_S) as self._client:
            yield

    async def turn(self) -> None:
        """Have a few sentences spoken, and check their audio."""
        text = some_text(self._random)
        body = {"input": text, "response_format": "pcm", "stream": True, "model": "default", "seed": SEED}
        answer = await self._client.post("/v1/audio/speech", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.content == to_pcm16(sound_of(text, SEED)), text

    def check(self) -> None:
        """Do nothing: each turn has checked its audio."""


def some_text(chance: random.Random) -> str:
    """Return a few sentences."""
    words = [f"w{chance.randrange(1000)}" for _ in range(chance.choice((1, 5, 20)))]
    return " ".join(f"{word}." if chance.random() < 0.3 else word for word in words)
