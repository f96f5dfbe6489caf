"""Small raw clients, for tests that send messages that no library would send."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import numpy as np
import soxr
import websockets
from websockets.asyncio.client import ClientConnection

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from tests.conftest import Process

LIMIT_S = 60


async def until_idle(server: Process) -> None:
    """Wait until the server has no session and its lanes have no job."""
    async with httpx.AsyncClient() as client:
        for _ in range(LIMIT_S * 20):
            text = (await client.get(f"{server.url}/metrics")).text
            busy = [
                line
                for line in text.splitlines()
                if line.startswith(("antiphon_sessions{", "antiphon_queue_jobs", "antiphon_running_jobs"))
                and not line.endswith(" 0.0")
            ]
            if not busy:
                return
            await anyio.sleep(0.05)
    raise AssertionError(busy)


def b64(pcm: Pcm, rate: int = 16000) -> str:
    """Return 16 kHz audio as base64 of 16-bit PCM at `rate`."""
    data = pcm if rate == 16000 else np.asarray(soxr.resample(pcm, 16000, rate), np.float32)
    return base64.b64encode(to_pcm16(data)).decode()


class Wire:
    """One socket. `say` sends an event, `until` reads up to a given frame, and `seen` has all received frames."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type, **fields}))

    async def sound(self, pcm: Pcm, rate: int = 16000, chunk_s: float = 0.5) -> None:
        step = int(chunk_s * 16000)
        for at in range(0, len(pcm), step):
            await self.say("input_audio_buffer.append", audio=b64(pcm[at : at + step], rate))

    async def read(self) -> dict[str, Any]:
        with anyio.fail_after(LIMIT_S):
            frame: dict[str, Any] = json.loads(await self.socket.recv())
        self.seen.append(frame)
        return frame

    async def until(self, wanted: str | Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            frame = await self.read()
            if frame["type"].endswith(wanted) if isinstance(wanted, str) else wanted(frame):
                return frame

    def joined(self) -> str:
        return "".join(f["delta"] for f in self.seen if f["type"].endswith(".delta"))


@asynccontextmanager
async def connect(ws: str, query: str = "", **options: Any) -> AsyncIterator[Wire]:
    async with websockets.connect(f"{ws}/v1/realtime{query}", max_size=None, **options) as socket:
        yield Wire(socket)


async def vllm(wire: Wire, pcm: Pcm, **update: Any) -> str:
    """Return the complete transcript of some audio, in the vLLM dialect."""
    await wire.say("session.update", model="default", **update)
    await wire.sound(pcm)
    await wire.say("input_audio_buffer.commit", final=True)
    return str((await wire.until("transcription.done"))["text"])
