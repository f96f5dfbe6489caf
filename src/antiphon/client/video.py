"""A camera or a screen that can be asked about: frames in, questions in, answers out."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from antiphon.client.link import ResumingLink, SessionEnded
from antiphon.client.sound import Sound, encoded

PATH = "/v1/video/chat/stream"


class ClientVideo:
    """One video session. Entered with `async with`. It survives cuts of its connection; a `ping` keeps it alive."""

    def __init__(self, link: ResumingLink, config: Mapping[str, Any]) -> None:
        self._link, self._config = link, config
        self._num_frames = 0
        # One question at a time: a second one would take its answer's words for the first's.
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> ClientVideo:
        """Connect, and wait for the session. Raises SessionEnded where the server refuses it, or is not there."""
        self._link.start()
        try:
            await self._link.send({"type": "session.config", **self._config})
            await self._link.receive()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def link(self) -> ResumingLink:
        """What carries the session."""
        return self._link

    async def show(self, image: bytes, at_s: float | None = None) -> None:
        """Send a frame, a JPEG or PNG file. `at_s`: its time; None: now. Raises SessionEnded."""
        times = {} if at_s is None else {"pts_ms": round(at_s * 1000)}
        await self._link.send({"type": "video.frame", "data": b64encode(image).decode(), **times})

    async def send_sound(self, sound: Sound) -> None:
        """Send what is heard beside the frames, at 16 kHz. Raises SessionEnded, ValueError."""
        await self._link.send({"type": "audio.chunk", "data": encoded(sound)})

    async def ask(self, question: str) -> str:
        """Ask about what was shown, and return the whole answer. Raises SessionEnded."""
        return "".join([words async for words in self.stream(question)])

    async def stream(self, question: str) -> AsyncIterator[str]:
        """Ask about what was shown, and yield the answer's words as they come. Raises SessionEnded."""
        async with self._asking:
            await self._link.send({"type": "video.query", "text": question})
            told = False
            while True:
                message = await self._link.receive()
                kind = message.get("type") if isinstance(message, dict) else ""
                assert isinstance(message, dict)
                if kind == "response.text.delta":
                    told = True
                    yield message["delta"]
                elif kind == "response.text.done":
                    if not told and message["text"]:
                        yield message["text"]
                    return
                elif kind == "error":
                    raise SessionEnded("error", str(message.get("message")))

    async def close(self) -> None:
        """End the session."""
        with suppress(SessionEnded):
            await self._link.send({"type": "video.done"})
        await self._link.close()
