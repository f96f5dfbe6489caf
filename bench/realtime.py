"""A client of a conversation over /v1/realtime. It uses only the wire protocol, no code of antiphon's client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import websockets

TEXT_ALONE = {"type": "realtime", "output_modalities": ["text"]}


class Talk:
    """An open conversation; see `talking`."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket

    async def send(self, type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": type} | fields))

    async def event(self) -> dict[str, Any]:
        """Return the next event. Raises RuntimeError if it is an error."""
        event: dict[str, Any] = json.loads(await self._socket.recv())
        if event["type"] == "error":
            raise RuntimeError(event)
        return event

    async def until(self, kind: str) -> None:
        while (await self.event())["type"] != kind:
            pass

    async def add(self, role: str, text: str) -> None:
        """Add a message to the conversation."""
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": role, "content": content})
        await self.until("conversation.item.done")

    async def first_word_ms(self, **response: Any) -> float:
        """Return the milliseconds from a response.create to the first word. Reads the answer to its end."""
        begun = time.perf_counter()
        await self.send("response.create", response=response)
        await self.until("response.output_text.delta")
        first_s = time.perf_counter() - begun
        await self.until("response.done")
        return first_s * 1000


@asynccontextmanager
async def talking(ws: str, session: dict[str, Any]) -> AsyncIterator[Talk]:
    """Open a conversation at a server's ws:// address, and configure its session."""
    async with websockets.connect(f"{ws}/v1/realtime?model=gpt-realtime", max_size=None, compression=None) as socket:
        talk = Talk(socket)
        await talk.send("session.update", session=session)
        await talk.until("session.updated")
        yield talk
