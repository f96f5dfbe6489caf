"""A language model and a voice as one partner: text is spoken clause by clause while it is still being written.

Two tasks a response: one reads the language model and cuts its text into units (the first at a clause or a few words, so that sound begins
early; then sentences, or what there is of one when the sound before it is about to run out), one speaks them. What they make
goes through one queue. Closing the generator cancels both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np

from antiphon.contracts import (
    ConversationProfile,
    ConversationStream,
    LanguageModel,
    LanguageStream,
    LiveSynthesizer,
    Message,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    Synthesizer,
    TextDelta,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.events.words import Word
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.text.sentences import SentenceSplitter
from antiphon.text.word_timing import WordPacer

# A first unit shorter than this waits for more: "Well," alone would be followed by a gap.
MIN_FIRST_CHARS = 10
# Without a mark the first unit ends after so many words: each one more is 70 ms later on two cores, and three sound for as long as
# the next ten take to be written.
FIRST_WORDS = 3
# With less than this left of the sound so far, what is written of a sentence is spoken before it is complete: a voice begins within
# 50 ms, and a break of breath is heard less than a gap. Seconds; words.
RUNNING_OUT_S, FEWEST_WORDS = 0.3, 3
NO_SOUND = np.zeros(0, np.float32)


class Cascade:
    """A language model that speaks with a synthesizer's voice; without one it writes."""

    native = None

    def __init__(
        self,
        language: LanguageModel,
        synthesizer: Synthesizer | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._language = language
        self._clock = clock
        self.synthesizer = synthesizer
        voice = synthesizer.profile if synthesizer else None
        self.profile = ConversationProfile(
            language.profile.id, voice.sample_rate_hz if voice else 24_000, voice.voices if voice else ()
        )

    async def open(self) -> ConversationStream:
        """A new conversation. Raises Refused where there is no room for its KV."""
        return _CascadeStream(await self._language.open(), self.synthesizer, self._clock)


def spoken(
    dialogue: LanguageStream,
    synthesizer: Synthesizer | None,
    options: ReplyOptions,
    voice: VoiceOptions | None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[ResponseChunk, None]:
    """What a dialogue answers, spoken as it is written; see ConversationStream.respond."""
    return _CascadeStream(dialogue, synthesizer, clock).respond((), options, voice)


class _Pace:
    """How much is left of the sound made so far, were it heard from the first on without a break."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s: float | None = None
        # Units given to the voice and not spoken yet.
        self.waiting = 0

    def made(self, seconds: float) -> None:
        """More sound was made."""
        self._ends_s = max(self._ends_s or 0.0, self._clock()) + seconds

    @property
    def running_out(self) -> bool:
        """The voice has nothing to do, and what it made is nearly over."""
        return not self.waiting and self._ends_s is not None and self._ends_s - self._clock() < RUNNING_OUT_S


class _CascadeStream:
    def __init__(self, dialogue: LanguageStream, synthesizer: Synthesizer | None, clock: Callable[[], float]) -> None:
        self._dialogue = dialogue
        self._synthesizer = synthesizer
        self._clock = clock

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """See ConversationStream."""
        await self._dialogue.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """See ConversationStream."""
        if voice is None or self._synthesizer is None:
            async with aclosing(self._dialogue.reply(messages, options)) as replies:
                async for reply in replies:
                    yield reply
            return
        units: asyncio.Queue[str | None] = asyncio.Queue()
        pace = _Pace(self._clock)
        work = (
            lambda put: self._write(messages, options, units, put, pace),
            lambda put: self._speak(voice, units, put, pace),
        )
        async with aclosing(side_by_side(*work)) as answers:
            async for answer in answers:
                yield answer

    def close(self) -> None:
        """See ConversationStream."""
        self._dialogue.close(keep=True)

    async def _write(
        self,
        messages: Sequence[Message],
        options: ReplyOptions,
        units: asyncio.Queue[str | None],
        put: PutChunk,
        pace: _Pace,
    ) -> None:
        assert self._synthesizer
        splitter, first, live = SentenceSplitter("clause"), "", self._synthesizer.profile.streams_text

        def speak(unit: str) -> None:
            pace.waiting += 1
            units.put_nowait(unit)
            splitter.granularity = "sentence"

        async with aclosing(self._dialogue.reply(messages, options)) as replies:
            async for reply in replies:
                await put(reply)
                if not isinstance(reply, TextDelta):
                    continue
                if live:
                    # It reads while it speaks: there is nothing to be cut.
                    units.put_nowait(reply.text)
                    continue
                for unit in splitter.feed(reply.text):
                    if splitter.granularity == "sentence":
                        speak(unit)
                        continue
                    first = f"{first} {unit}".strip()
                    if len(first) >= MIN_FIRST_CHARS or first[-1] in ".!?":
                        speak(first)
                        first = ""
                if splitter.granularity == "clause" and (head := splitter.cut_words(FIRST_WORDS, MIN_FIRST_CHARS)):
                    speak(f"{first} {head}".strip())
                    first = ""
                elif pace.running_out and (head := splitter.cut_clause(FEWEST_WORDS)):
                    speak(head)
        rest = " ".join([*([first] if first else []), *splitter.flush()])
        if rest:
            speak(rest)
        units.put_nowait(None)

    async def _speak(
        self,
        voice: VoiceOptions,
        units: asyncio.Queue[str | None],
        put: PutChunk,
        pace: _Pace,
    ) -> None:
        assert self._synthesizer
        rate_hz, at_s = self._synthesizer.profile.sample_rate_hz, 0.0
        if self._synthesizer.profile.streams_text:
            live, paced = cast(LiveSynthesizer, self._synthesizer), WordPacer()
            async with aclosing(live.speak_live(_pieces(units, paced), voice)) as sounds:
                async for sound in sounds:
                    await put(ResponseAudio(sound.pcm, paced.advance(len(sound.pcm) / rate_hz)))
            if words := paced.finish():
                await put(ResponseAudio(NO_SOUND, words))
            return
        while (unit := await units.get()) is not None:
            began_s, paced = at_s, WordPacer()
            if not self._synthesizer.profile.word_times:
                paced.feed(unit)
            try:
                async with aclosing(self._synthesizer.speak(unit, voice, lambda: Urgency.FINAL)) as sounds:
                    async for sound in sounds:
                        length_s = len(sound.pcm) / rate_hz
                        words = _moved(sound.words or paced.advance(length_s), began_s)
                        at_s += length_s
                        pace.made(length_s)
                        if len(sound.pcm) or words:
                            await put(ResponseAudio(sound.pcm, words))
                if words := _moved(paced.finish(), began_s):
                    await put(ResponseAudio(NO_SOUND, words))
            except RemoteProtocolError:
                # A unit that the voice cannot speak is text all the same.
                continue
            finally:
                pace.waiting -= 1


def _moved(words: Sequence[Word], by_s: float) -> tuple[Word, ...]:
    return tuple(replace(w, start_s=by_s + w.start_s, end_s=by_s + w.end_s) for w in words)


async def _pieces(units: asyncio.Queue[str | None], paced: WordPacer) -> AsyncGenerator[str, None]:
    while (piece := await units.get()) is not None:
        paced.feed(piece)
        yield piece
