"""A conversation model and an image reader that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from antiphon.contracts import (
    ConversationProfile,
    FileInfo,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    TranscriptSegment,
    VoiceOptions,
)
from antiphon.errors import ModelError
from antiphon.events.tools import Tool
from antiphon.vision.images import EncodedImage


class Partner:
    """Keeps the messages of each request, and answers with `says`. If `held`, it waits after the first word.

    `num_ended`: the number of responses that ended or were closed.
    """

    native = None

    def __init__(self, held: bool = False) -> None:
        self.profile = ConversationProfile("scripted", 8000, ("one",))
        self.asked: list[tuple[Message, ...]] = []
        self.prefilled: list[tuple[Message, ...]] = []
        self.says = "It is level 10."
        self.held, self.num_ended = held, 0

    async def open(self, owner: object = None) -> Partner:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        self.prefilled.append(tuple(messages))

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        try:
            for word in self.says.split(" "):
                yield TextDelta(word + " ")
                yield ResponseAudio(np.zeros(80, np.float32))
                if self.held:
                    await asyncio.sleep(3600)
            yield ReplyDone("stop", 1, 0, 1)
        finally:
            self.num_ended += 1

    def close(self) -> None:
        return


class Reader:
    """Reads a picture's grey level as its text: "level 10". If `held`, each read waits for `go` to be released.

    Level 0 has no text, and level 66 fails.
    """

    def __init__(self, held: bool = False) -> None:
        self.read_levels: list[int] = []
        self.held, self.go = held, asyncio.Semaphore(0)

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        level = int(image.pixels(64)[0, 0, 0])
        self.read_levels.append(level)
        if self.held:
            await self.go.acquire()
        if level == 66:
            raise ModelError("no")
        return (f"level {level}",) if level else ()


class FileTranscriber:
    """Transcribes every file as " What is" and " this? "."""

    async def transcribe(self, pcm: Any, options: Any) -> AsyncGenerator[FileInfo | TranscriptSegment, None]:
        yield FileInfo("en", 1.0)
        yield TranscriptSegment(0, 0, 0.0, 1.0, " What is", (), 0.0, 0.0, 1.0, 0.0)
        yield TranscriptSegment(1, 0, 1.0, 2.0, " this? ", (), 0.0, 0.0, 1.0, 0.0)
