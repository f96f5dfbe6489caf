"""A raw client of realtime conversations, and helpers that several of their tests share."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import websockets
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection

from antiphon.audio import Pcm
from tests.conftest import Process
from tests.server.clients import b64

LIMIT_S = 90
EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TEXT_ONLY = {"output_modalities": ["text"], "max_output_tokens": 24}


class ConversationClient:
    """One conversation. Checks every received frame against the types of openai-python, except frames of the beta."""

    def __init__(self, socket: ClientConnection, beta: bool = False) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []
        self._beta = beta

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type} | fields))

    async def text(self, text: str) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.say("conversation.item.create", item=item)

    async def sound(self, pcm: Pcm, silence_s: float = 0.0) -> None:
        pcm = np.concatenate((pcm, np.zeros(int(16000 * silence_s), np.float32)))
        for at in range(0, len(pcm), 4000):
            await self.say("input_audio_buffer.append", audio=b64(pcm[at : at + 4000], 24000))

    async def read(self) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            frame: dict[str, Any] = json.loads(await self.socket.recv())
        if not self._beta:
            parsed = EVENT.validate_python(frame)
            assert type(parsed).model_fields["type"].annotation, frame
        self.seen.append(frame)
        return frame

    async def until(self, type: str, **fields: Any) -> dict[str, Any]:
        while True:
            frame = await self.read()
            if frame["type"] == type and all(frame.get(k) == v for k, v in fields.items()):
                return frame

    def kinds(self, response: str | None = None) -> list[str]:
        """Return the types of the events in order. Consecutive deltas of one type appear once."""
        out: list[str] = []
        for frame in self.seen:
            its_response = frame.get("response_id") or frame.get("response", {}).get("id")
            if (response is None or its_response == response) and not (
                out and out[-1] == frame["type"] and "delta" in out[-1]
            ):
                out.append(frame["type"])
        return out

    def joined(self, kind: str, response: str | None = None) -> str:
        return "".join(f["delta"] for f in self.seen if f["type"] == kind and response in (None, f["response_id"]))

    def spoken(self, response: str | None = None) -> bytes:
        kind = "response.output_audio.delta"
        return b"".join(
            base64.b64decode(f["delta"])
            for f in self.seen
            if f["type"] == kind and response in (None, f["response_id"])
        )


@asynccontextmanager
async def talk(
    server: Process,
    query: str = "?model=gpt-realtime",
    beta: bool = False,
    headers: dict[str, str] | None = None,
    **session: Any,
) -> AsyncIterator[ConversationClient]:
    """Open a conversation, and configure it with `session` before the block begins."""
    headers = (headers or {}) | ({"OpenAI-Beta": "realtime=v1"} if beta else {})
    async with websockets.connect(
        f"{server.ws}/v1/realtime{query}", max_size=None, additional_headers=headers
    ) as socket:
        wire = ConversationClient(socket, beta)
        created = await wire.until("session.created")
        assert created["session"]["object"] == "realtime.session"
        if session:
            await wire.say("session.update", session=({} if beta else {"type": "realtime"}) | session)
            await wire.until("session.updated")
        yield wire
