"""A language model and a voice as one partner: text is spoken clause by clause while it is still being written.

Two tasks a response: one reads the language model and cuts its text into units (the first at a clause, so that sound begins early; then
sentences), one speaks them. What they make goes through one queue. Closing the generator cancels both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from antiphon.adapters.base import (
    Answer,
    Dialogue,
    LanguageModel,
    Message,
    PartnerProfile,
    ReplyDone,
    ReplyOptions,
    Speaking,
    Synthesizer,
    Talk,
    TextDelta,
    Tool,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import RemoteProtocolError
from antiphon.splitter import Splitter

# A first unit shorter than this waits for more: "Well," alone would be followed by a gap.
MIN_FIRST_CHARS = 12
# Without a mark the first unit ends after so many words: at 20 tokens a second a clause of twelve words is half a second.
FIRST_WORDS = 4
# Bound: outputs nobody has read; the makers wait.
MAX_WAITING = 64


class Cascade:
    """A language model that speaks with a synthesizer's voice; without one it writes."""

    def __init__(self, language: LanguageModel, synthesizer: Synthesizer | None) -> None:
        self._language = language
        self.synthesizer = synthesizer
        voice = synthesizer.profile if synthesizer else None
        self.profile = PartnerProfile(
            language.profile.id, voice.sample_rate_hz if voice else 24_000, voice.voices if voice else ()
        )

    async def open(self) -> Talk:
        """A new conversation. Raises Refused where there is no room for its KV."""
        return _Talk(await self._language.open(), self.synthesizer)


class _Talk:
    def __init__(self, dialogue: Dialogue, synthesizer: Synthesizer | None) -> None:
        self._dialogue = dialogue
        self._synthesizer = synthesizer

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """See Talk."""
        await self._dialogue.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[Answer, None]:
        """See Talk."""
        if voice is None or self._synthesizer is None:
            async with aclosing(self._dialogue.reply(messages, options)) as replies:
                async for reply in replies:
                    yield reply
            return
        out: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue(MAX_WAITING)
        units: asyncio.Queue[str | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_guarded(self._write(messages, options, units, out), units, out)),
            asyncio.create_task(_guarded(self._speak(voice, units, out), None, out)),
        ]
        done: ReplyDone | None = None
        try:
            # Each of the two says None when it is through.
            for _ in tasks:
                while (item := await out.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    if isinstance(item, ReplyDone):
                        done = item
                    else:
                        yield item
            if done:
                yield done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """See Talk."""
        self._dialogue.close(keep=True)

    async def _write(
        self,
        messages: Sequence[Message],
        options: ReplyOptions,
        units: asyncio.Queue[str | None],
        out: asyncio.Queue[Answer | BaseException | None],
    ) -> None:
        splitter, first = Splitter("clause"), ""
        async with aclosing(self._dialogue.reply(messages, options)) as replies:
            async for reply in replies:
                await out.put(reply)
                if not isinstance(reply, TextDelta):
                    continue
                for unit in splitter.feed(reply.text):
                    if splitter.granularity == "sentence":
                        units.put_nowait(unit)
                        continue
                    first = f"{first} {unit}".strip()
                    if len(first) >= MIN_FIRST_CHARS or first[-1] in ".!?":
                        units.put_nowait(first)
                        first = ""
                        splitter.granularity = "sentence"
                if splitter.granularity == "clause" and (head := splitter.words(FIRST_WORDS, MIN_FIRST_CHARS)):
                    units.put_nowait(f"{first} {head}".strip())
                    first = ""
                    splitter.granularity = "sentence"
        rest = " ".join([*([first] if first else []), *splitter.flush()])
        if rest:
            units.put_nowait(rest)
        units.put_nowait(None)

    async def _speak(
        self,
        voice: VoiceOptions,
        units: asyncio.Queue[str | None],
        out: asyncio.Queue[Answer | BaseException | None],
    ) -> None:
        assert self._synthesizer
        rate_hz, at_s = self._synthesizer.profile.sample_rate_hz, 0.0
        while (unit := await units.get()) is not None:
            began_s = at_s
            try:
                async with aclosing(self._synthesizer.speak(unit, voice, lambda: Urgency.FINAL)) as sounds:
                    async for sound in sounds:
                        words = tuple(
                            replace(w, start_s=began_s + w.start_s, end_s=began_s + w.end_s) for w in sound.words
                        )
                        at_s += len(sound.pcm) / rate_hz
                        if len(sound.pcm) or words:
                            await out.put(Speaking(sound.pcm, words))
            except RemoteProtocolError:
                # A unit that the voice cannot speak is text all the same.
                continue


async def _guarded(
    work: object, units: asyncio.Queue[str | None] | None, out: asyncio.Queue[Answer | BaseException | None]
) -> None:
    """Hand a failure to the reader, and say when it is through."""
    try:
        await work  # type: ignore[misc]
    except Exception as error:
        await out.put(error)
    if units:
        units.put_nowait(None)
    await out.put(None)
