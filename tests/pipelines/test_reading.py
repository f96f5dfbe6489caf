"""The stage before every voice: pauses, and the times of written words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.events.words import Word
from antiphon.pipelines.reading import ReadingVoice
from antiphon.text.markup import plain

RATE_HZ = 1000


class Voice:
    """A voice that speaks each word for a tenth of a second and reports its time. `texts`: the texts to speak."""

    def __init__(self, languages: tuple[str, ...] = ("en",)) -> None:
        self.profile = SynthesizerProfile("v", RATE_HZ, ("one",), languages, (0.5, 2.0), word_times=True)
        self.texts: list[str] = []

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.texts.append(text)
        for i, word in enumerate(text.split()):
            yield SpeechChunk(np.ones(100, np.float32), (Word(word, i / 10, (i + 1) / 10, 1.0),))


class LiveVoice(Voice):
    """A voice that speaks a text while the text is written: each piece for a tenth of a second."""

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        self.texts.append("")
        async for text in texts:
            self.texts[-1] += text
            yield SpeechChunk(np.ones(100, np.float32))


def spoken(voice: Voice, text: str, language: str | None = None) -> list[SpeechChunk]:
    async def main() -> list[SpeechChunk]:
        reading = ReadingVoice(voice)
        async with aclosing(reading.speak(text, VoiceOptions("one", language=language), lambda: Urgency.FINAL)) as out:
            return [chunk async for chunk in out]

    return asyncio.run(main())


def times(chunks: list[SpeechChunk]) -> list[tuple[str, float, float]]:
    return [(w.text, round(w.start_s, 3), round(w.end_s, 3)) for c in chunks for w in c.words]


def test_a_pause_is_silence_and_moves_the_words_after_it() -> None:
    voice = Voice()
    chunks = spoken(voice, plain('<speak>one <break time="800ms"/> two</speak>'))
    assert [t.strip() for t in voice.texts] == ["one", "two"]
    assert times(chunks) == [("one", 0, 0.1), ("two", 0.9, 1.0)]
    heard = np.concatenate([c.pcm for c in chunks])
    assert len(heard) == 1000
    assert not heard[100:900].any()
    assert heard[:100].all()
    assert heard[900:].all()


def test_written_words_have_the_times_of_what_is_said_for_them() -> None:
    voice = Voice()
    assert times(spoken(voice, "From 10–12 * 😀 **now**")) == [
        ("From", 0, 0.1),
        ("10–12", 0.1, 0.4),
        ("*", 0.4, 0.4),
        ("😀", 0.4, 0.4),
        ("**now**", 0.4, 0.5),
    ]
    assert voice.texts == ["From 10 to 12 now"]


def test_when_a_text_says_nothing_then_the_voice_is_not_asked_and_its_words_take_no_time() -> None:
    voice = Voice()
    assert times(spoken(voice, "... 😀")) == [("...", 0, 0), ("😀", 0, 0)]
    assert not voice.texts


@pytest.mark.parametrize(
    ("languages", "language", "said"),
    [(("de",), None, "10 bis 12"), (("en", "de"), "de", "10 bis 12"), (("en", "de"), None, "10–12")],
)
def test_the_language_is_the_one_asked_for_or_the_only_one(
    languages: tuple[str, ...], language: str | None, said: str
) -> None:
    voice = Voice(languages)
    spoken(voice, "10–12", language)
    assert voice.texts == [said]


def test_a_text_that_is_still_written_is_spoken_up_to_each_pause() -> None:
    voice = LiveVoice()
    voice.profile = replace(voice.profile, word_times=False)

    async def texts() -> AsyncGenerator[str, None]:
        for piece in ("It is −", "5 °C. ", plain('<break time="2s"/>'), "y *", "* 2 ", "end"):
            yield piece

    async def main() -> list[SpeechChunk]:
        async with aclosing(ReadingVoice(voice).speak_live(texts(), VoiceOptions("one"))) as out:
            return [chunk async for chunk in out]

    chunks = asyncio.run(main())
    assert [" ".join(t.split()) for t in voice.texts] == ["It is minus 5 °C.", "y to the power of 2 end"]
    assert [len(c.pcm) for c in chunks if not c.pcm.any()] == [2 * RATE_HZ]
