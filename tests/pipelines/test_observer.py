"""What the observer notes, when it reads, and what it tells the language model, over a scripted partner and reader."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import (
    ConversationProfile,
    FileInfo,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    SpeechChunk,
    TextDelta,
    TranscriptSegment,
    VideoFrame,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.errors import MediaError, ModelError
from antiphon.events.tools import Tool
from antiphon.pipelines.observer import MAX_UNREAD, Observer, ObserverStream, time_of
from antiphon.vision.images import EncodedImage


class Partner:
    """Remembers what it was asked and answers with `says`; held, it waits after the first word."""

    native = None

    def __init__(self, held: bool = False) -> None:
        self.profile = ConversationProfile("scripted", 8000, ("one",))
        self.asked: list[tuple[Message, ...]] = []
        self.prefilled: list[tuple[Message, ...]] = []
        self.says = "It is level 10."
        self.held, self.left = held, 0

    async def open(self) -> Partner:
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
            self.left += 1

    def close(self) -> None:
        return


class Reader:
    """Reads a picture's grey level as its text; each read waits for a `go` where it is held."""

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


class Hearing:
    async def transcribe(self, pcm: Any, options: Any) -> AsyncGenerator[FileInfo | TranscriptSegment, None]:
        yield FileInfo("en", 1.0)
        yield TranscriptSegment(0, 0, 0.0, 1.0, " What is", (), 0.0, 0.0, 1.0, 0.0)
        yield TranscriptSegment(1, 0, 1.0, 2.0, " this? ", (), 0.0, 0.0, 1.0, 0.0)


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((40, 60, 3), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def run(act: Callable[[ObserverStream], Any], partner: Partner | None = None, reader: Reader | None = None) -> Any:
    async def main() -> Any:
        observer = Observer(partner or Partner(), reader or Reader(), Hearing())  # type: ignore[arg-type]
        watching = await observer.open("Be brief.")
        task = asyncio.create_task(watching.run())
        try:
            async with asyncio.timeout(20):
                return await act(watching)
        finally:
            task.cancel()
            watching.close()

    return asyncio.run(main())


async def see(watching: ObserverStream, *levels: int, first: int = 0, read: bool = True) -> None:
    for i, level in enumerate(levels, first):
        await watching.append_frame(VideoFrame(i, float(i), EncodedImage(png(level))))
    while read and any(m.reading.lines is None for m in watching._moments):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def ask(watching: ObserverStream, text: str, at_s: float, frames: tuple[int, ...] = (), pcm: Any = None) -> str:
    out = ""
    async for answer in watching.answer(VideoQuestion(text, at_s, frames, pcm), ReplyOptions(), None):
        if isinstance(answer, TextDelta):
            out += answer.text
    return out


@pytest.mark.parametrize(
    ("text", "now_s", "at_s"),
    [
        ("What did the screen say 20 s ago?", 50.0, 30.0),
        ("what was there a minute ago", 100.0, 40.0),
        ("and ten seconds ago?", 4.0, 0.0),
        ("What does it show at 1:05?", 200.0, 65.0),
        ("How many are visible at 19 seconds?", 30.0, 19.0),
        ("How many bottles are there now?", 30.0, None),
        ("Is anybody at home?", 30.0, None),
        ("Who looks at me?", 30.0, None),
    ],
)
def test_the_time_a_question_is_about(text: str, now_s: float, at_s: float | None) -> None:
    assert time_of(text, now_s) == at_s


def test_each_question_gets_what_is_new_and_nothing_twice() -> None:
    partner = Partner()

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10, 10, 200)
        assert await ask(watching, "What is it?", 2.0) == "It is level 10. "
        await see(watching, 90, first=3)
        await ask(watching, "And now?", 3.0, pcm=np.zeros(16_000, np.float32))
        await ask(watching, "Still?", 3.0)

    run(act, partner)
    first, second, third = partner.asked
    assert [m.role for m in first] == ["system", "user"]
    assert first[0].text.endswith("Be brief.")
    # Appended to, never changed: the model's KV of all before stays.
    assert second[:2] == first
    assert third[: len(second)] == second
    assert second[2] == Message("assistant", "It is level 10. ")
    assert 'At 0.0 to 1.0 s: it says "level 10" (dark, still, mostly black).' in first[1].text
    assert 'At 2.0 s: it says "level 200" (a new scene, bright, much motion, mostly white).' in first[1].text
    assert first[1].text.endswith("It is 2 s now. Question: What is it?")
    assert "level 200" not in second[3].text
    assert "level 90" in second[3].text
    assert 'Somebody said: "What is this?".' in second[3].text
    assert "Nothing new." in third[5].text
    # What was read was taken in before it was asked about: the question is all that is left to compute.
    (notes,) = (m[-1].text for m in partner.prefilled if "level 200" in m[-1].text)
    assert first[1].text.startswith(notes)


def test_a_spoken_question_is_a_question() -> None:
    partner = Partner()

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10)
        await ask(watching, "", 0.0, pcm=np.zeros(16_000, np.float32))

    run(act, partner)
    assert partner.asked[0][1].text.endswith("Question: What is this?")


def test_a_question_about_a_time_gets_that_moment_again() -> None:
    partner = Partner()

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10, 200, 90, 30, 120)
        await ask(watching, "Now?", 4.0)
        await ask(watching, "What did the screen say 3 seconds ago?", 4.0)
        watching.forget(3.0)
        await ask(watching, "And 4 seconds ago?", 4.0)
        await ask(watching, "And at 99 s?", 4.0)

    run(act, partner)
    texts = [asked[-1].text for asked in partner.asked]
    assert (
        'The time asked about is 1 s; then it says "level 200" (a new scene, bright, much motion, mostly white).'
        in texts[1]
    )
    # The nearest that is still known.
    assert "about is 0 s; then " in texts[2]
    assert "level 30" in texts[2]
    assert "The time asked about is 99 s; then nothing is known of it." in texts[3]


def test_what_looks_the_same_is_read_once_and_the_newest_first() -> None:
    reader = Reader(held=True)

    async def act(watching: ObserverStream) -> None:
        await see(watching, 50, read=False)
        await asyncio.sleep(0.02)
        await see(watching, 80, 80, 80, 120, first=1, read=False)
        for _ in range(3):
            reader.go.release()
        await see(watching)
        assert [m.reading.lines for m in watching._moments] == [("level 50",), *[("level 80",)] * 3, ("level 120",)]
        assert watching.num_read == 3

    run(act, reader=reader)
    assert reader.read_levels == [50, 120, 80]


def test_what_cannot_be_read_says_nothing_and_what_is_too_late_is_not_read() -> None:
    reader = Reader(held=True)

    async def act(watching: ObserverStream) -> None:
        levels = [66, *(7 * k + 80 for k in range(MAX_UNREAD + 3))]
        await see(watching, *levels, read=False)
        for _ in levels:
            reader.go.release()
        await see(watching)

    run(act, reader=reader)
    assert len(reader.read_levels) <= MAX_UNREAD + 1


def test_an_answer_that_was_cut_is_not_remembered() -> None:
    partner = Partner(held=True)

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10)
        cut = asyncio.create_task(ask(watching, "First?", 0.0))
        while not partner.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        partner.held = False
        await ask(watching, "Second?", 0.0)

    run(act, partner)
    second = partner.asked[1]
    assert len(second) == 2
    # What was new then is still new.
    assert "level 10" in second[1].text


def test_a_frame_that_comes_while_notes_are_taken_in_is_read() -> None:
    class Slow(Partner):
        def __init__(self) -> None:
            super().__init__()
            self.go = asyncio.Event()

        async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
            await super().prefill(messages, tools)
            await self.go.wait()

    partner = Slow()

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10)
        while not partner.prefilled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await see(watching, 200, first=1, read=False)
        partner.go.set()
        await watching.settled()
        assert watching._moments[1].reading.lines == ("level 200",)

    run(act, partner)


def test_what_is_no_image_is_refused() -> None:
    async def act(watching: ObserverStream) -> None:
        with pytest.raises(MediaError):
            await watching.append_frame(VideoFrame(0, 0.0, EncodedImage(b"nothing")))

    run(act)


def test_what_is_made_up_is_not_said() -> None:
    partner = Partner()
    partner.says = "It is a cat that sits on a mat."

    class Voice:
        async def speak(self, text: str, options: Any, urgency: Any) -> AsyncGenerator[SpeechChunk, None]:
            yield SpeechChunk(np.full(len(text), 0.5, np.float32))

    async def act(watching: ObserverStream) -> list[ResponseChunk]:
        watching._synthesizer = Voice()  # type: ignore[assignment]
        await see(watching, 10, 200)
        question = VideoQuestion("What animal is it?", 1.0, (0, 1))
        return [a async for a in watching.answer(question, ReplyOptions(), VoiceOptions("one"))]

    text, sound, done = run(act, partner)
    assert text == TextDelta(
        "I cannot see that: I only read text and notice motion, light and colours. Right now it is bright, much motion, mostly white, "
        'and the text on it is "level 200".'
    )
    # Nothing of the made-up answer sounds, and it was not waited for.
    assert len(sound.pcm) == len(text.text)
    assert isinstance(done, ReplyDone)
    assert partner.left == 1


def test_what_is_written_is_said_as_it_was_read_if_need_be() -> None:
    partner = Partner()
    partner.says = "I do not know."

    async def act(watching: ObserverStream) -> str:
        await see(watching, 90)
        return await ask(watching, "What can be read there?", 0.0)

    assert run(act, partner) == 'It says "level 90".'


def test_what_was_made_up_is_not_what_the_next_is_made_like() -> None:
    partner = Partner()
    partner.says = "It is a cat."

    async def act(watching: ObserverStream) -> None:
        await see(watching, 10)
        await ask(watching, "What animal is it?", 0.0)
        partner.says = "It is level 10."
        await ask(watching, "What level is it?", 0.0)

    run(act, partner)
    second = partner.asked[1]
    assert len(second) == 2
    assert "level 10" in second[1].text


def test_plain_facts_may_be_said_of_the_whole_picture() -> None:
    partner = Partner()
    partner.says = "It is mostly white."

    async def act(watching: ObserverStream) -> list[str]:
        await see(watching, 250)
        return [
            await ask(watching, "What colour is the picture?", 1.0),
            await ask(watching, "What colour is the mug?", 1.0),
        ]

    whole, mug = run(act, partner)
    assert whole == "It is mostly white. "
    assert mug.startswith("I cannot see that")


def test_what_a_question_is_about_is_read_before_all_else() -> None:
    partner, reader = Partner(), Reader(held=True)

    async def act(watching: ObserverStream) -> None:
        await see(watching, 50, 80, 120, 160, 200, read=False)
        await asyncio.sleep(0.02)
        asking = asyncio.create_task(ask(watching, "What is it?", 4.0, frames=(1, 3)))
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
