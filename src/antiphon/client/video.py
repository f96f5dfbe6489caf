"""Questions about a camera or a screen: frames and questions in, answers out."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from antiphon.client.audio import Audio, encoded
from antiphon.client.link import JsonObject, LinkedSession, ResumingLink, ServerMessage, SessionEnded

log = logging.getLogger(__name__)
PATH = "/v1/video/chat/stream"


class ClientVideo(LinkedSession):
    """One video session. It is entered with `async with`, survives a broken connection, and sends its own heartbeat."""

    def __init__(self, link: ResumingLink, config: JsonObject) -> None:
        super().__init__(link)
        self._config = config
        # The number of frames sent, and those that the server has neither acknowledged nor refused yet. While there are
        # such frames, an error concerns the first of them.
        self._num_frames = 0
        self._unanswered = dict[str, None]()
        # Whether the answer to a question is incomplete.
        self._answer_is_open = False
        self._asking = asyncio.Lock()

    async def _begin(self) -> None:
        await self._link.send({"type": "session.config", **self._config})
        await self._link.receive()

    async def show(self, image: bytes, at_s: float | None = None) -> None:
        """Send a frame.

        Args:
            image: The contents of a JPEG or PNG file.
            at_s: The frame's time, in seconds; None: now.

        Raises:
            SessionEnded: The session is over.
        """
        times = {} if at_s is None else {"pts_ms": round(at_s * 1000)}
        self._num_frames += 1
        name = str(self._num_frames)
        self._unanswered[name] = None
        frame = {"type": "video.frame", "frame_id": name, "data": b64encode(image).decode()}
        await self._link.send({**frame, **times})

    async def send_audio(self, audio: Audio) -> None:
        """Send audio that belongs to the frames, at 16 kHz.

        Raises:
            SessionEnded: The session is over.
            ValueError: The audio ends in the middle of a sample.
        """
        await self._link.send({"type": "audio.chunk", "data": encoded(audio)})

    async def ask(self, question: str) -> str:
        """Ask about the frames, and return the whole answer. Waits for earlier questions.

        Raises:
            SessionEnded: The server refuses the question, or the session is over.
        """
        async with self._asking, aclosing(self.stream(question)) as answer:
            return "".join([words async for words in answer])

    async def stream(self, question: str) -> AsyncGenerator[str, None]:
        """Ask about the frames, and yield the answer's words as they arrive.

        Only one question may run at a time. If an earlier iteration broke off, the rest of its answer is read first. If
        the server is lost, another one begins the answer again: words that it repeats are not yielded again.

        Raises:
            SessionEnded: The server refuses the question, or the session is over.
        """
        while self._answer_is_open:
            with suppress(_QuestionRefused):
                await self._next()
        await self._link.send({"type": "video.query", "text": question})
        self._answer_is_open, said, again = True, "", ""
        while self._answer_is_open:
            try:
                message = await self._next()
            except _QuestionRefused as refused:
                raise SessionEnded("error", str(refused)) from None
            if message.get("type") == "response.start":
                again = ""
            elif message.get("type") == "response.text.delta":
                again += message["delta"]
                if len(again) > len(said):
                    # If the second answer has other words than the first, its last words follow those of the first.
                    yield again[len(said) :]
                    said = again
            elif message.get("type") == "response.text.done" and not said and message["text"]:
                yield message["text"]

    async def _next(self) -> ServerMessage:
        """Return the next message of an answer. Raises _QuestionRefused, SessionEnded."""
        while True:
            message = await self._link.receive()
            if not isinstance(message, dict):
                continue
            kind = message.get("type")
            if kind == "video.frame.ack":
                self._unanswered.pop(str(message.get("frame_id")), None)
            elif kind == "error" and self._unanswered:
                del self._unanswered[next(iter(self._unanswered))]
                log.warning("a frame was refused: %s", message.get("message"))
            elif kind == "error":
                self._answer_is_open = False
                raise _QuestionRefused(message.get("message"))
            else:
                self._answer_is_open = self._answer_is_open and kind != "response.text.done"
                return message

    async def close(self) -> None:
        """End the session and close its connection. An answer that is under way is lost."""
        await self._link.close({"type": "video.done"})


class _QuestionRefused(Exception):
    """The server refuses a question; the argument is its message."""
