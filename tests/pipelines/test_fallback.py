"""Models of this process that continue while other servers fail: voices, and whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from antiphon.contracts import (
    ConversationProfile,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    SpeechChunk,
    TextDelta,
    Urgency,
    VoiceOptions,
)
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.events.tools import Tool
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.fallback import ConversationWithFallback, VoiceWithFallback
from tests.pipelines.test_cascade import RATE_HZ, Voice, Writer

LINE = "One moment."
ERRORS = [RemoteError("it is away"), Refused("it has no room", 1.0)]


class Away(Voice):
    """Fails with `error` after `num_chunks` chunks. Its audio has twice the rate of the fallback's."""

    def __init__(self, error: Exception, num_chunks: int = 0) -> None:
        super().__init__(word_times=False)
        self.profile = replace(self.profile, id="away", voices=("theirs",), sample_rate_hz=2 * RATE_HZ)
        self.error, self.num_chunks = error, num_chunks

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        assert options.voice == "theirs"
        for _ in range(self.num_chunks):
            yield SpeechChunk(np.zeros(RATE_HZ // 5, np.float32))
        raise self.error


class Partner:
    """Says the `words`, then fails with `error`, if there is one."""

    native = None

    def __init__(self, error: Exception | None, *words: str) -> None:
        self.error, self.words = error, words
        self.profile = ConversationProfile("away", 2 * RATE_HZ, ("theirs",), accepts_media=True)
        self.asked: list[tuple[Message, ...]] = []
        self.num_closed = 0

    async def open(self, owner: object = None) -> Partner:
        return self

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        for word in self.words:
            yield TextDelta(word)
        if self.error:
            raise self.error
        yield ReplyDone("stop", 1, 0, 1)

    def close(self) -> None:
        self.num_closed += 1


def spoken(voice: VoiceWithFallback) -> float:
    """Return the seconds of audio of four words."""

    async def main() -> int:
        async with aclosing(voice.speak("One two three four.", VoiceOptions("theirs"), lambda: Urgency.FINAL)) as found:
            return sum([len(chunk.pcm) async for chunk in found])

    return asyncio.run(main()) / voice.profile.sample_rate_hz


@pytest.mark.parametrize("error", ERRORS)
def test_a_text_that_a_voice_does_not_begin_is_spoken_by_the_other(error: Exception) -> None:
    other = Voice()
    assert spoken(VoiceWithFallback(Away(error), other)) == pytest.approx(0.4, abs=0.01)
    assert other.sentences == ["One two three four."]


@pytest.mark.parametrize(("error", "num_chunks"), [(ERRORS[0], 1), (ModelError("it is refused"), 0)])
def test_a_text_that_was_begun_or_refused_is_not_repeated(error: Exception, num_chunks: int) -> None:
    other = Voice()
    with pytest.raises(type(error)):
        spoken(VoiceWithFallback(Away(error, num_chunks), other))
    assert not other.sentences


def answered(
    main: Partner, writer: Writer, voice: Voice | None = None, *, speaks: bool = True
) -> tuple[list[ResponseChunk], Exception | None]:
    """Return the chunks of a response and the error that ended it."""
    found: list[ResponseChunk] = []

    async def respond() -> None:
        model = ConversationWithFallback(main, Cascade(writer, voice), LINE)
        stream = await model.open()
        options = VoiceOptions("theirs") if speaks else None
        part = replace(Message("user", "Hi"), parts=("Hi",))
        try:
            async with aclosing(stream.respond((part,), ReplyOptions(), options)) as chunks:
                async for chunk in chunks:
                    found.append(chunk)
        finally:
            stream.close()

    try:
        asyncio.run(respond())
    except (ModelError, Refused) as error:
        return found, error
    return found, None


def words_of(chunks: Sequence[ResponseChunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta)).strip()


def seconds_of(chunks: Sequence[ResponseChunk]) -> float:
    return sum(len(chunk.pcm) for chunk in chunks if isinstance(chunk, ResponseAudio)) / (2 * RATE_HZ)


@pytest.mark.parametrize("error", ERRORS)
def test_a_response_that_does_not_begin_is_made_by_the_cascade_from_text(error: Exception) -> None:
    writer, voice = Writer("It is noon."), Voice()
    chunks, failure = answered(Partner(error), writer, voice)
    assert failure is None
    assert words_of(chunks) == "It is noon."
    assert seconds_of(chunks) == pytest.approx(0.3, abs=0.01)
    assert isinstance(chunks[-1], ReplyDone)
    assert writer.seen == [(Message("user", "Hi"),)]
    assert "closed" in writer.log


def test_a_response_that_breaks_off_ends_with_the_failure_line() -> None:
    writer, voice = Writer("It is noon."), Voice()
    chunks, failure = answered(Partner(ERRORS[0], "It is"), writer, voice)
    assert failure is ERRORS[0]
    assert words_of(chunks) == f"It is {LINE}"
    assert seconds_of(chunks) == pytest.approx(0.2, abs=0.01)
    assert not writer.seen


def test_a_text_response_that_breaks_off_says_nothing_more() -> None:
    chunks, failure = answered(Partner(ERRORS[0], "It is"), Writer("It is noon."), Voice(), speaks=False)
    assert failure is ERRORS[0]
    assert words_of(chunks) == "It is"


def test_a_model_that_works_answers_alone() -> None:
    writer, main = Writer("It is noon."), Partner(None, "Here.")
    chunks, failure = answered(main, writer, Voice())
    assert failure is None
    assert words_of(chunks) == "Here."
    assert not writer.log
    assert main.num_closed == 1
