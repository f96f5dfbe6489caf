"""Synthesizers that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np

from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.words import Word

RATE_HZ = 24_000


class Scripted:
    """Speaks a tenth of a second for each letter; `bad` fails, `foreign` cannot be spoken, `full` is refused.

    `log`: the sentences that began, ended or were abandoned. `gate`: awaited before each chunk.
    """

    def __init__(self) -> None:
        self.profile = SynthesizerProfile("scripted", RATE_HZ, ("one", "two"), ("en",), (0.5, 2.0), word_times=True)
        self.log: list[str] = []
        self.asked: list[VoiceOptions] = []
        self.urgencies: list[Urgency] = []
        self.chunks = 0
        self.gate: asyncio.Event | None = None

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.log.append(f"begin {text}")
        self.asked.append(options)
        try:
            if "foreign" in text:
                raise RemoteProtocolError("unsupported_text", "none of this text can be spoken")
            for i, letter in enumerate(text):
                if self.gate:
                    await self.gate.wait()
                if "bad" in text and i == 2:
                    raise ModelError("no")
                if "full" in text:
                    raise Refused("no room", 1.0)
                self.urgencies.append(urgency())
                self.chunks += 1
                words = (Word(text, 0.0, 0.1 * len(text), 1.0),) if not i else ()
                yield SpeechChunk(np.full(RATE_HZ // 10, ord(letter) / 1000, np.float32), words)
                await asyncio.sleep(0)
            self.log.append(f"end {text}")
        finally:
            self.log.append(f"left {text}")


class Live(Scripted):
    """Speaks while the text is written, a chunk for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.profile = replace(self.profile, streams_text=True, word_times=False)

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        self.log.append("begin live")
        try:
            async for text in texts:
                for letter in text:
                    yield SpeechChunk(np.full(RATE_HZ // 10, ord(letter) / 1000, np.float32))
                if "bad" in text:
                    raise ModelError("no")
        finally:
            self.log.append("left live")
