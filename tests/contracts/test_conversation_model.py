"""The contract of conversation models: one in this process, and the same one on another antiphon over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from antiphon.contracts import (
    AudioPart,
    ConversationModel,
    ConversationStream,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
)
from antiphon.errors import ModelError
from antiphon.remote.address import CONVERSATION_MODEL, parse_address
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.settings import RemoteSettings
from tests.scripted import speech, text
from tests.server.scripted import RATE_HZ, WORD_S, Echo, serving

LIMIT_S = 30
SYSTEM = Message("system", "Be brief.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and the Echo that answers in it."""

    model: ConversationModel
    echo: Echo


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Echo]]:
    """Yield the URL of another antiphon that answers by Echo."""
    echo = Echo(0.001)
    with serving(partner=echo) as (url, _, _):
        yield url, echo


@pytest.fixture(params=["here", "ws://", "http://"])
def tested(request: pytest.FixtureRequest, served: tuple[str, Echo]) -> Subject:
    if request.param == "here":
        echo = Echo(0.001)
        return Subject(echo, echo)
    url, echo = served
    echo.asked.clear()
    address = f"{url.replace('ws://', request.param)}/v1#echo"
    parsed = parse_address(address, "--conversation-model", schemes=CONVERSATION_MODEL)
    return Subject(RemoteConversationModel(parsed, "", RemoteSettings()), echo)


def run(tested: Subject, use: Callable[[ConversationStream], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        stream = await tested.model.open()
        try:
            return await use(stream)
        finally:
            stream.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def answer(
    tested: Subject, stream: ConversationStream, messages: Sequence[Message], *, speaks: bool = True
) -> list[ResponseChunk]:
    voice = VoiceOptions(tested.model.profile.voices[0]) if speaks else None
    async with aclosing(stream.respond(messages, ReplyOptions(), voice)) as chunks:
        return [chunk async for chunk in chunks]


def words_of(chunks: Sequence[ResponseChunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta)).strip()


def test_a_response_has_text_audio_words_and_an_end(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        chunks = await answer(tested, stream, [SYSTEM, Message("user", "one two three")])
        assert words_of(chunks) == "one two three"
        audio = [chunk for chunk in chunks if isinstance(chunk, ResponseAudio)]
        samples = np.concatenate([chunk.pcm for chunk in audio])
        assert len(samples) == round(3 * WORD_S * RATE_HZ) * tested.model.profile.sample_rate_hz // RATE_HZ
        assert [word.text for chunk in audio for word in chunk.words] == ["one", "two", "three"]
        ends = [word.end_s for chunk in audio for word in chunk.words]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(3 * WORD_S, abs=0.05)
        assert isinstance(chunks[-1], ReplyDone)
        assert chunks[-1].reason == "stop"
        assert tested.echo.asked[-1] == ("Be brief.", "one two three")

    run(tested, use)


def test_a_response_without_a_voice_is_text_only(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        chunks = await answer(tested, stream, [Message("user", "one two")], speaks=False)
        assert words_of(chunks) == "one two"
        assert not any(isinstance(chunk, ResponseAudio) for chunk in chunks)

    run(tested, use)


def test_the_model_has_the_conversation_as_it_was_heard(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        said = [Message("user", "one two three")]
        await answer(tested, stream, said)
        # All of it was heard, then only a word of the next answer, then nothing of the third.
        said += [Message("assistant", "one two three"), Message("user", "four five")]
        await answer(tested, stream, said)
        said += [Message("assistant", "four"), Message("user", "six")]
        await answer(tested, stream, said)
        said += [Message("user", "seven")]
        await answer(tested, stream, said)
        assert tested.echo.asked[-1] == ("one two three", "one two three", "four five", "four", "six", "seven")

    run(tested, use)


def test_closing_ends_the_response_and_the_next_one_is_whole(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        voice = VoiceOptions(tested.model.profile.voices[0])
        long = [Message("user", " ".join(f"word{k}" for k in range(500)))]
        chunks = stream.respond(long, ReplyOptions(), voice)
        await anext(chunks)
        await chunks.aclose()
        again = [*long, Message("assistant", "word0"), Message("user", "and now")]
        assert words_of(await answer(tested, stream, again)) == "and now"
        assert tested.echo.asked[-1] == tuple(message.text for message in again)

    run(tested, use)


def test_a_failure_is_raised_and_the_conversation_goes_on(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        with pytest.raises(ModelError):
            await answer(tested, stream, [Message("user", "fail")])
        assert words_of(await answer(tested, stream, [Message("user", "go on")])) == "go on"

    run(tested, use)


def test_conversations_are_apart(tested: Subject) -> None:
    async def use(stream: ConversationStream) -> None:
        other = await tested.model.open()
        try:
            both = await asyncio.gather(
                answer(tested, stream, [Message("user", "one")]), answer(tested, other, [Message("user", "two")])
            )
            assert [words_of(chunks) for chunks in both] == ["one", "two"]
        finally:
            other.close()

    run(tested, use)


def test_audio_reaches_a_model_that_hears(tested: Subject) -> None:
    if not tested.model.profile.accepts_media:
        return

    async def use(stream: ConversationStream) -> None:
        part = AudioPart(speech(5, 3, 20))
        # The transcript is written here, and may arrive after the response.
        said = [Message("user", "", parts=(part,))]
        heard = words_of(await answer(tested, stream, said, speaks=False))
        assert heard.endswith(text(5, 3))
        said = [Message("user", text(5, 3), parts=(part,)), Message("assistant", heard), Message("user", "yes")]
        await answer(tested, stream, said, speaks=False)
        assert tested.echo.asked[-1] == (heard, heard, "yes")

    run(tested, use)
