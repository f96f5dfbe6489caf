"""Live transcription: audio in, words out that do not change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

from antiphon.client.audio import Audio, WireAudio, encoded
from antiphon.client.link import LinkedSession, ResumingLink, SessionEnded

PATH = "/v1/realtime"
# The wire's rate.
RATE_HZ = 16_000


class ClientCaptions(LinkedSession):
    """One transcription session. Entered with `async with`; iterated for its words, once for each `finish`.

    `text`: all words since the last `finish`. It survives cuts of its connection.
    """

    def __init__(self, link: ResumingLink, config: dict[str, object], rate_hz: int) -> None:
        super().__init__(link)
        self._config, self._rate_hz = config, rate_hz
        self._audio = WireAudio(rate_hz, RATE_HZ)
        self._feeding: asyncio.Task[None] | None = None
        self.text = ""

    async def _begin(self) -> None:
        await self._link.send({"type": "session.update", **self._config})
        while (await self._message())["type"] != "session.updated":
            pass

    async def send(self, audio: Audio) -> None:
        """Send more audio. Waits while more is unsent than is kept. Raises SessionEnded, ValueError."""
        if pcm := self._audio.feed(audio):
            await self._link.send({"type": "input_audio_buffer.append", "audio": encoded(pcm)})

    async def finish(self) -> None:
        """End the transcript: the iteration ends with its last word. Raises SessionEnded."""
        if rest := self._audio.flush():
            await self._link.send({"type": "input_audio_buffer.append", "audio": encoded(rest)})
        await self._link.send({"type": "input_audio_buffer.commit", "final": True})

    def feed(self, pieces: AsyncIterable[Audio] | Iterable[Audio]) -> None:
        """Send pieces of audio as they come, in the background, and `finish` after the last. Pieces of what is no
        asynchronous iterable are each waited for in a thread. Raises RuntimeError where another `feed` goes on.
        """
        if self._feeding and not self._feeding.done():
            raise RuntimeError("these captions are fed already")
        self._feeding = asyncio.create_task(self._feed(pieces))

    async def _feed(self, pieces: AsyncIterable[Audio] | Iterable[Audio]) -> None:
        async for audio in pieces if isinstance(pieces, AsyncIterable) else _taken(iter(pieces)):
            await self.send(audio)
        await self.finish()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield words as they are known, until the transcript is done. Raises SessionEnded, and what feeding raised."""
        self.text = ""
        while True:
            message = await self._message()
            if message["type"] == "transcription.delta":
                self.text += message["delta"]
                yield message["delta"]
            elif message["type"] == "transcription.done":
                return

    async def _message(self) -> dict[str, Any]:
        """The next message. Raises SessionEnded for an error, which leaves nothing to wait for."""
        while True:
            message = await self._receive()
            if isinstance(message, dict) and message.get("type") == "error":
                raise SessionEnded(str(message.get("code") or "error"), str(message.get("error") or ""))
            if isinstance(message, dict) and isinstance(message.get("type"), str):
                return message

    async def _receive(self) -> dict[str, Any] | bytes:
        """The server's next message. Raises SessionEnded, and what feeding raised: nothing more would come then."""
        feeding = self._feeding
        if not feeding:
            return await self._link.receive()
        receiving = asyncio.ensure_future(self._link.receive())
        try:
            await asyncio.wait({receiving, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                self._feeding = None
                feeding.result()
            return await receiving
        finally:
            receiving.cancel()

    async def close(self) -> None:
        """End the session."""
        if self._feeding:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self._link.close()


async def _taken(pieces: Iterator[Audio]) -> AsyncIterator[Audio]:
    """Take each piece in a thread: one of a microphone is waited for."""
    done = object()
    while (audio := await asyncio.to_thread(next, pieces, done)) is not done:
        yield audio  # type: ignore[misc]
