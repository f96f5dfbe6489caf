"""The observer's notes, its order of reading, and its messages to the language model; model and reader are scripted."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import (
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    SpeechChunk,
    TextDelta,
    VideoFrame,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.pipelines.observer import MAX_ANSWER_TOKENS, Observer, ObserverStream
from antiphon.pipelines.unread_frames import MAX_UNREAD
from antiphon.vision.images import EncodedImage
from tests.pipelines.scripted import FileTranscriber, Partner, Reader


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((40, 60, 3), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def run(
    act: Callable[[ObserverStream], Any],
    partner: Partner | None = None,
    reader: Reader | None = None,
    synthesizer: Any = None,
) -> Any:
    async def main() -> Any:
        models: Any = (partner or Partner(), reader or Reader(), FileTranscriber(), synthesizer)
        stream = await Observer(*models).open("Be brief.")
        task = asyncio.create_task(stream.run())
        try:
            async with asyncio.timeout(20):
                return await act(stream)
        finally:
            task.cancel()
            stream.close()

    return asyncio.run(main())


async def show(stream: ObserverStream, *levels: int, first: int = 0, read: bool = True) -> None:
    """Append a frame a second, each of one grey level. `read`: wait until the text of all is read."""
    for i, level in enumerate(levels, first):
        await stream.append_frame(VideoFrame(i, float(i), EncodedImage(png(level))))
    if read:
        await stream.settled()


async def ask(stream: ObserverStream, text: str, at_s: float, frames: tuple[int, ...] = (), pcm: Any = None) -> str:
    out = ""
    async for answer in stream.answer(VideoQuestion(text, at_s, frames, pcm), ReplyOptions(), None):
        if isinstance(answer, TextDelta):
            out += answer.text
    return out


def test_when_questions_follow_then_each_is_told_what_is_new_and_nothing_twice() -> None:
    partner = Partner()

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10, 10, 200)
        assert await ask(stream, "What is it?", 2.0) == "It is level 10. "
        await show(stream, 90, first=3)
        await ask(stream, "And now?", 3.0, pcm=np.zeros(16_000, np.float32))
        await ask(stream, "Still?", 3.0)

    run(act, partner)
    first, second, third = partner.asked
    assert [m.role for m in first] == ["system", "user"]
    assert first[0].text.endswith("Be brief.")
    # Messages are appended, never changed, so the KV of earlier messages stays valid.
    assert second[:2] == first
    assert third[: len(second)] == second
    assert second[2] == Message("assistant", "It is level 10. ")
    assert 'At 0.0 to 1.0 s: it says "level 10"; it is dark, still, mostly black.' in first[1].text
    assert 'At 2.0 s: it says "level 200" in a new scene; it is bright, much motion, mostly white.' in first[1].text
    assert first[1].text.endswith("It is 2 s now. Question: What is it?")
    assert "level 200" not in second[3].text
    assert "level 90" in second[3].text
    assert 'Somebody said: "What is this?".' in second[3].text
    assert "Nothing new." in third[5].text
    # The notes were prefilled, so only the question is left to compute.
    (notes,) = (m[-1].text for m in partner.prefilled if "level 200" in m[-1].text)
    assert first[1].text.startswith(notes)


def test_when_a_question_is_spoken_then_its_transcript_is_asked() -> None:
    partner = Partner()

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10)
        await ask(stream, "", 0.0, pcm=np.zeros(16_000, np.float32))

    run(act, partner)
    assert partner.asked[0][1].text.endswith("Question: What is this?")


def test_when_a_question_names_a_time_then_the_note_of_that_time_is_told_again() -> None:
    partner = Partner()

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10, 200, 90, 30, 120)
        await ask(stream, "Now?", 4.0)
        await ask(stream, "What did the screen say 3 seconds ago?", 4.0)
        stream.forget(3.0)
        await ask(stream, "And 4 seconds ago?", 4.0)
        await ask(stream, "And at 99 s?", 4.0)

    run(act, partner)
    texts = [asked[-1].text for asked in partner.asked]
    assert (
        'The time asked about is 1 s; then it says "level 200" in a new scene; it is bright, much motion, mostly white.'
        in texts[1]
    )
    # The nearest frame that is still known.
    assert "about is 0 s; then " in texts[2]
    assert "level 30" in texts[2]
    assert "The time asked about is 99 s; then nothing is known of it." in texts[3]


def test_when_frames_look_the_same_then_one_is_read_and_the_newest_is_read_first() -> None:
    reader = Reader(held=True)

    async def act(stream: ObserverStream) -> None:
        await show(stream, 50, read=False)
        await asyncio.sleep(0.02)
        await show(stream, 80, 80, 80, 120, first=1, read=False)
        for _ in range(3):
            reader.go.release()
        await show(stream)
        await ask(stream, "What is it?", 4.0)

    partner = Partner()
    run(act, partner, reader)
    assert reader.read_levels == [50, 120, 80]
    notes = partner.asked[0][1].text
    assert 'At 0.0 s: it says "level 50"' in notes
    assert 'At 1.0 to 3.0 s: it says "level 80"' in notes
    assert 'At 4.0 s: it says "level 120"' in notes


def test_when_a_frame_cannot_be_read_or_too_many_wait_then_the_others_are_read() -> None:
    reader = Reader(held=True)

    async def act(stream: ObserverStream) -> None:
        levels = [66, *(7 * k + 80 for k in range(MAX_UNREAD + 3))]
        await show(stream, *levels, read=False)
        for _ in levels:
            reader.go.release()
        await show(stream)

    run(act, reader=reader)
    assert len(reader.read_levels) <= MAX_UNREAD + 1


def test_when_an_answer_is_broken_off_then_it_is_not_remembered() -> None:
    partner = Partner(held=True)

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10)
        cut = asyncio.create_task(ask(stream, "First?", 0.0))
        while not partner.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        partner.held = False
        await ask(stream, "Second?", 0.0)

    run(act, partner)
    second = partner.asked[1]
    assert len(second) == 2
    # The notes that were new then are still new.
    assert "level 10" in second[1].text


def test_when_a_frame_comes_during_a_prefill_then_it_is_read() -> None:
    class Slow(Partner):
        def __init__(self) -> None:
            super().__init__()
            self.go = asyncio.Event()

        async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
            await super().prefill(messages, tools)
            await self.go.wait()

    partner = Slow()

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10)
        while not partner.prefilled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await show(stream, 200, first=1, read=False)
        partner.go.set()
        await stream.settled()
        await ask(stream, "What is it?", 1.0)

    run(act, partner)
    assert 'At 1.0 s: it says "level 200"' in partner.asked[0][1].text


def test_when_a_frame_is_no_image_then_it_is_an_error() -> None:
    async def act(stream: ObserverStream) -> None:
        with pytest.raises(MediaError):
            await stream.append_frame(VideoFrame(0, 0.0, EncodedImage(b"nothing")))

    run(act)


def test_when_an_answer_is_made_up_then_it_is_replaced() -> None:
    partner = Partner()
    partner.says = "It is a cat that sits on a mat."

    class Voice:
        async def speak(self, text: str, options: Any, urgency: Any) -> AsyncGenerator[SpeechChunk, None]:
            yield SpeechChunk(np.full(len(text), 0.5, np.float32))

    async def act(stream: ObserverStream) -> list[ResponseChunk]:
        await show(stream, 10, 200)
        question = VideoQuestion("What animal is it?", 1.0, (0, 1))
        return [a async for a in stream.answer(question, ReplyOptions(), VoiceOptions("one"))]

    text, audio, done = run(act, partner, synthesizer=Voice())
    assert text == TextDelta(
        "I cannot see that: I only read text and notice motion, light and colours. Right now it is bright, much "
        'motion, mostly white, and the text on it is "level 200".'
    )
    # The made-up answer is not heard, and was not waited for.
    assert len(audio.pcm) == len(text.text)
    assert isinstance(done, ReplyDone)
    assert partner.num_ended == 1


def test_when_a_model_repeats_the_question_without_end_then_its_answer_ends_and_is_replaced() -> None:
    class Repeating(Partner):
        async def respond(
            self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
        ) -> AsyncGenerator[ResponseChunk, None]:
            # If the answer is released, its number of tokens is limited too.
            assert options.max_tokens == MAX_ANSWER_TOKENS
            while True:
                await asyncio.sleep(0)
                yield TextDelta("What animal is it? ")

    async def act(stream: ObserverStream) -> str:
        await show(stream, 0)
        return await ask(stream, "What animal is it?", 0.0)

    assert run(act, Repeating()).startswith("I cannot see that")


def test_when_a_prefill_is_refused_then_frames_are_read_all_the_same() -> None:
    class Refusing(Partner):
        async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
            raise RemoteProtocolError("invalid_value", "The model's chat template does not take it.", "messages")

    async def act(stream: ObserverStream) -> str:
        await show(stream, 10)
        await show(stream, 200, first=1)
        return await ask(stream, "What is it?", 1.0)

    assert run(act, Refusing()) == "It is level 10. "


def test_when_a_question_is_about_text_and_the_answer_is_not_then_the_text_is_the_answer() -> None:
    partner = Partner()
    partner.says = "I do not know."

    async def act(stream: ObserverStream) -> str:
        await show(stream, 90)
        return await ask(stream, "What can be read there?", 0.0)

    assert run(act, partner) == 'It says "level 90".'


def test_when_an_answer_was_made_up_then_the_next_does_not_follow_it() -> None:
    partner = Partner()
    partner.says = "It is a cat."

    async def act(stream: ObserverStream) -> None:
        await show(stream, 10)
        await ask(stream, "What animal is it?", 0.0)
        partner.says = "It is level 10."
        await ask(stream, "What level is it?", 0.0)

    run(act, partner)
    second = partner.asked[1]
    assert len(second) == 2
    assert "level 10" in second[1].text


def test_when_a_question_is_about_the_whole_picture_then_plain_facts_answer_it() -> None:
    partner = Partner()
    partner.says = "It is mostly white."

    async def act(stream: ObserverStream) -> list[str]:
        await show(stream, 250)
        return [
            await ask(stream, "What colour is the picture?", 1.0),
            await ask(stream, "What colour is the mug?", 1.0),
        ]

    whole, mug = run(act, partner)
    assert whole == "It is mostly white. "
    assert mug.startswith("I cannot see that")


def test_when_a_question_waits_for_frames_then_they_are_read_before_all_others() -> None:
    partner, reader = Partner(), Reader(held=True)

    async def act(stream: ObserverStream) -> None:
        await show(stream, 50, 80, 120, 160, 200, read=False)
        await asyncio.sleep(0.02)
        asking = asyncio.create_task(ask(stream, "What is it?", 4.0, frames=(1, 3)))
        await asyncio.sleep(0.02)
        for _ in range(3):
            reader.go.release()
            await asyncio.sleep(0.02)
        await asking

    run(act, partner, reader)
    assert reader.read_levels[1:3] == [160, 80]
    (asked,) = partner.asked
    assert "level 80" in asked[1].text
    assert "level 160" in asked[1].text
