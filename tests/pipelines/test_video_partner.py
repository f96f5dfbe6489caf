"""A partner that sees, asked about what is seen: its answers are those to the whole conversation, and a question computes what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from antiphon.adapters.qwen3_omni import Qwen3Omni
from antiphon.contracts import (
    ImagePart,
    Message,
    MessagePart,
    ReplyOptions,
    ResponseChunk,
    TextDelta,
    VideoFrame,
    VideoQuestion,
)
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import Engine
from antiphon.pipelines.video_partner import (
    LEFT_FRAMES,
    MOST_FRAMES,
    SYSTEM,
    ConversationVideoModel,
    ConversationVideoStream,
)
from antiphon.vision.images import EncodedImage
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.test_qwen3_omni import TOKENS, Whole, image, sound

GREEDY = ReplyOptions(max_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    loaded = Qwen3Omni(folder, "omni", settings=EngineSettings(kv_bytes=64 << 20), weights="fp32")
    # Answers are as long as they may be.
    loaded.thinker.stop_tokens = frozenset()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


async def computed(engine: Engine) -> None:
    """Wait until all rows that sessions were given are in the KV.

    A call runs between two steps, so a step lies between one call and the next for as long as there is work.
    """
    rows = -1
    while rows != engine.runner.stats.rows:
        rows = engine.runner.stats.rows
        for _ in range(2):
            await engine.call(lambda: None)


async def answered(stream: ConversationVideoStream, question: VideoQuestion, most: int = 1000) -> str:
    """The text of an answer, which is broken off after `most` chunks."""
    out: list[ResponseChunk] = []
    async with aclosing(stream.answer(question, GREEDY, None)) as answers:
        async for answer in answers:
            out.append(answer)
            if len(out) == most:
                break
    return "".join(a.text for a in out if isinstance(a, TextDelta))


def turn(*parts: MessagePart) -> Message:
    return Message("user", "", parts=parts)


@pytest.mark.parametrize("eager", [True, False])
def test_answers_are_those_to_the_whole(model: Qwen3Omni, whole: Whole, eager: bool) -> None:
    frames = [image(i) for i in range(4)]
    heard = sound(1.3, 7)

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
    talked = [system, first, said[0], second, said[1], turn("Why?")]
    for count, text in zip((2, 4, 6), texts, strict=True):
        ids = whole.ids(talked[:count])
        written = whole.tokenizer.decode(ids, skip_special_tokens=False)
        # Bytes at the end that are no character yet are not told.
        assert written.startswith(text)
        assert len(written) - len(text) <= 3
    # "Why?" is a turn of a few tokens, whatever came before it; the first question had its frames already, where they were taken in ahead.
    assert rows[2] < 60
    assert (rows[0] < 30) == eager


def test_what_is_remembered_is_bounded() -> None:
    watching = ConversationVideoStream(None, "", eager=False)  # type: ignore[arg-type]
    for number in range(MOST_FRAMES // 2 + 1):
        watching._past += [
            turn(ImagePart(EncodedImage(b"")), ImagePart(EncodedImage(b"")), str(number)),
            Message("assistant", "Yes."),
        ]
        watching._trim()
    left = [m.parts[2] for m in watching._past if m.parts]
    assert len(left) == LEFT_FRAMES // 2
    assert left[-1] == str(MOST_FRAMES // 2)
