"""A conversation model that sees, asked about frames: it is given one conversation, and computes only what is new."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import (
    ImagePart,
    Message,
    MessagePart,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    TextDelta,
    VideoFrame,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.events.tools import Tool
from antiphon.pipelines.video_partner import (
    KEPT_PAST_FRAMES,
    MAX_PAST_FRAMES,
    SYSTEM,
    ConversationVideoModel,
    ConversationVideoStream,
)
from antiphon.vision.images import EncodedImage
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.published_qwen3_omni import TOKENS, Whole, clip, image

GREEDY = ReplyOptions(max_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    loaded = Qwen3Omni(folder, "omni", EngineModelOptions(EngineSettings(kv_bytes=64 << 20), weights="fp32"))
    # Answers are as long as they may be.
    loaded.thinker.stop_tokens = frozenset()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


async def computed(engine: LocalEngine) -> None:
    """Wait until no session of the engine has rows that a step could compute."""
    while await engine.thread.call(lambda: any(session.ready for session in engine.scheduler.sessions)):
        pass


async def answered(stream: ConversationVideoStream, question: VideoQuestion, most: int = 1000) -> str:
    """The text of an answer, which is broken off after `most` chunks."""
    out: list[ResponseChunk] = []
    async with aclosing(stream.answer(question, GREEDY, None)) as chunks:
        async for chunk in chunks:
            out.append(chunk)
            if len(out) == most:
                break
    return "".join(a.text for a in out if isinstance(a, TextDelta))


def turn(*parts: MessagePart) -> Message:
    return Message("user", "", parts=parts)


@pytest.mark.parametrize("eager", [True, False])
def test_when_questions_follow_then_answers_are_those_to_the_whole_conversation(
    model: Qwen3Omni, whole: Whole, eager: bool
) -> None:
    frames = [image(i) for i in range(4)]
    heard = clip(1.3, 7)

    async def run() -> tuple[list[str], list[int]]:
        stream = await ConversationVideoModel(model, eager=eager).open("Look well.")
        engine, texts, rows = model.thinker.engine, list[str](), list[int]()

        async def append(number: int) -> None:
            await stream.append_frame(VideoFrame(number, number / 2, frames[number].image))
            stream.select_frames(tuple(range(number + 1)))
            await stream.settled()

        async def ask(text: str, *numbers: int, pcm: bool = False) -> None:
            await computed(engine)
            before = engine.runner.stats.rows
            texts.append(await answered(stream, VideoQuestion(text, 9.0, numbers, heard.pcm if pcm else None)))
            rows.append(engine.runner.stats.rows - before)

        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            await append(0)
            await append(1)
            await ask("What is it?", 0, 1)
            await append(2)
            # An answer that is broken off: neither it nor its question stay, the frames do.
            await answered(stream, VideoQuestion("Never mind.", 9.0, (0, 1, 2)), most=2)
            await append(3)
            await ask("And this?", 0, 1, 2, 3, pcm=True)
            await ask("Why?", 0, 1, 2, 3)
            group.cancel_scope.cancel()
        stream.close()
        return texts, rows

    texts, rows = anyio.run(run)
    system = Message("system", f"{SYSTEM} Look well.")
    first = turn("<0.0 seconds>", frames[0], "<0.5 seconds>", frames[1], "What is it?")
    second = turn("<1.0 seconds>", frames[2], "<1.5 seconds>", frames[3], heard, "And this?")
    said = [Message("assistant", text.strip()) for text in texts]
    messages = [system, first, said[0], second, said[1], turn("Why?")]
    for count, text in zip((2, 4, 6), texts, strict=True):
        ids = whole.ids(messages[:count])
        written = whole.tokenizer.decode(ids, skip_special_tokens=False)
        # Bytes at the end that are no character yet are not in the answer.
        assert written.startswith(text)
        assert len(written) - len(text) <= 3
    # "Why?" is a turn of a few tokens, whatever came before it. The first question finds its frames in the KV already
    # where they were prefilled.
    assert rows[2] < 60
    assert (rows[0] < 30) == eager


class Partner:
    """A ConversationStream that answers "Yes." and keeps the messages of each response."""

    def __init__(self) -> None:
        self.asked: list[tuple[Message, ...]] = []

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(tuple(messages))
        yield TextDelta("Yes.")
        yield ReplyDone("stop", 1, 0, 1)

    def close(self) -> None:
        return


def test_when_answered_questions_have_too_many_frames_then_the_oldest_questions_leave() -> None:
    partner, png = Partner(), image().image.data

    async def run() -> None:
        stream = ConversationVideoStream(partner, "", eager=False)
        # Two frames a question: with the last of these there are more than MAX_PAST_FRAMES.
        for question in range(MAX_PAST_FRAMES // 2 + 2):
            numbers = (2 * question, 2 * question + 1)
            for number in numbers:
                await stream.append_frame(VideoFrame(number, 0.0, EncodedImage(png)))
            await answered(stream, VideoQuestion(str(question), 0.0, numbers))

    anyio.run(run)
    num_frames = [sum(isinstance(p, ImagePart) for m in messages for p in m.parts) for messages in partner.asked]
    # Each response is asked for with its own two frames and those of all questions before it, until these are too many.
    assert num_frames[:-1] == [2 * n for n in range(1, MAX_PAST_FRAMES // 2 + 2)]
    assert num_frames[-1] == KEPT_PAST_FRAMES + 2
    system, oldest, *_ = partner.asked[-1]
    assert system.role == "system"
    assert oldest.parts[-1] == str(MAX_PAST_FRAMES // 2 + 1 - KEPT_PAST_FRAMES // 2)
