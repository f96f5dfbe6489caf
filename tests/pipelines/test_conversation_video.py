"""A conversation model that sees, asked about frames: it has one conversation, and computes only new input."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import numpy as np
import pytest

from antiphon.adapters.qwen2_5_omni.model import Qwen25Omni
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import (
    AudioPart,
    ImagePart,
    Message,
    MessagePart,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    TextDelta,
    VideoFrame,
    VideoPart,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.events.tools import Tool
from antiphon.pipelines.conversation_video import (
    KEPT_PAST_FRAMES,
    MAX_PAST_FRAMES,
    SYSTEM,
    ConversationVideoModel,
    ConversationVideoStream,
)
from antiphon.pipelines.video_sound import MAX_S, VideoSound
from antiphon.vision.images import EncodedImage
from tests.adapters import published_qwen2_5_omni, tiny_qwen2_5_omni
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.published_qwen3_omni import TOKENS, Whole, image
from tests.adapters.published_video import frame, sound, video

GREEDY = ReplyOptions(max_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    loaded = Qwen3Omni(folder, "omni", EngineModelOptions(EngineSettings(kv_bytes=64 << 20), weights="fp32", threads=1))
    # Answers reach their token limit.
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
    """Return the text of an answer, which is cut off after `most` chunks."""
    out: list[ResponseChunk] = []
    async with aclosing(stream.answer(question, GREEDY, None)) as chunks:
        async for chunk in chunks:
            out.append(chunk)
            if len(out) == most:
                break
    return "".join(a.text for a in out if isinstance(a, TextDelta))


def turn(*parts: MessagePart) -> Message:
    return Message("user", "", parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_when_questions_follow_then_answers_are_those_to_the_whole_conversation(
    model: Qwen3Omni, whole: Whole, eager: bool
) -> None:
    frames = [image(i) for i in range(4)]

    async def run() -> tuple[list[str], list[int]]:
        stream = await ConversationVideoModel(model, eager=eager).open("Look well.")
        engine, texts, rows = model.thinker.engine, list[str](), list[int]()

        async def append(number: int) -> None:
            await stream.append_frame(VideoFrame(number, float(number), frames[number].image))
            stream.select_frames(tuple(range(number + 1)))
            await stream.settled()

        async def ask(text: str, *numbers: int) -> None:
            await computed(engine)
            before = engine.runner.stats.rows
            texts.append(await answered(stream, VideoQuestion(text, 9.0, numbers)))
            rows.append(engine.runner.stats.rows - before)

        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            await append(0)
            await append(1)
            await ask("What is it?", 0, 1)
            await append(2)
            # An answer that is cut off: neither it nor its question is remembered, but the frames stay.
            await answered(stream, VideoQuestion("Never mind.", 9.0, (0, 1, 2)), most=2)
            await append(3)
            await ask("And this?", 0, 1, 2, 3)
            await ask("Why?", 0, 1, 2, 3)
            group.cancel_scope.cancel()
        stream.close()
        return texts, rows

    texts, rows = anyio.run(run)
    system = Message("system", f"{SYSTEM} Look well.")
    first = turn(video(frames[:2], 1.0, None, 0), "What is it?")
    second = turn(video(frames[2:], 1.0, None, 0), "And this?")
    said = [Message("assistant", text.strip()) for text in texts]
    messages = [system, first, said[0], second, said[1], turn("Why?")]
    for count, text in zip((2, 4, 6), texts, strict=True):
        ids = whole.ids(messages[:count])
        written = whole.tokenizer.decode(ids, skip_special_tokens=False)
        # Incomplete characters at the end are not in the answer.
        assert written.startswith(text)
        assert not written[len(text) :].strip("\ufffd")
    # "Why?" is a turn of a few tokens, regardless of the earlier turns. If the first question's frames were prefilled,
    # they are already in the KV.
    assert rows[2] < 60
    assert (rows[0] < 30) == eager


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_when_sound_comes_with_the_frames_then_a_question_costs_what_is_not_complete_yet(
    tmp_path: Path, eager: bool
) -> None:
    folder = tiny_qwen2_5_omni.write(tmp_path)
    whole = published_qwen2_5_omni.Whole(folder)
    model = Qwen25Omni(folder, "omni", EngineModelOptions(EngineSettings(kv_bytes=64 << 20), weights="fp32", threads=1))
    model.thinker.stop_tokens = frozenset()
    frames, heard = [frame(i) for i in range(6)], sound(11.3)
    engine = model.thinker.engine
    # The first question is asked after 6 frames and 6.3 s, the second after 5 s of sound and no frame.
    pieces = [heard[i * 16_000 : (i + 1) * 16_000] for i in range(6)] + [heard[96_000:100_800]]

    async def run() -> tuple[list[str], int]:
        stream = await ConversationVideoModel(model, eager=eager).open("Look well.")
        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            for number, piece in enumerate(pieces):
                if number < len(frames):
                    await stream.append_frame(VideoFrame(number, float(number), frames[number].image))
                    stream.select_frames(tuple(range(number + 1)))
                stream.append_audio(piece, float(number))
                await stream.settled()
            await computed(engine)
            before = engine.runner.stats.rows
            asked = VideoQuestion("What is it?", 6.0, tuple(range(6)), heard[:100_800], 0.0)
            texts = [await answered(stream, asked)]
            rows = engine.runner.stats.rows - before
            stream.append_audio(heard[100_800:], 6.3)
            texts.append(await answered(stream, VideoQuestion("And now?", 9.0, (), heard[100_800:], 6.3)))
            group.cancel_scope.cancel()
        stream.close()
        return texts, rows

    texts, rows = anyio.run(run)
    model.close()
    system = Message("system", f"{SYSTEM} Look well.")
    first = turn(video(frames, 1.0, heard[:100_800], 2.0), "What is it?")
    messages = [system, first, Message("assistant", texts[0].strip()), turn(AudioPart(heard[100_800:]), "And now?")]
    for count, text in zip((2, 4), texts, strict=True):
        written = whole.tokenizer.decode(whole.ids(messages[:count]), skip_special_tokens=False)
        assert written.startswith(text)
        assert not written[len(text) :].strip("\ufffd")
    # Three windows of two seconds are complete. 0.3 s of sound, the question and the answer are left to compute.
    assert (rows < 60) == eager


def test_when_sound_is_cut_into_windows_then_each_sample_is_in_one() -> None:
    heard, made = sound(5.0), VideoSound(2.0)
    assert [made.append(heard[i : i + 7_000], 3.0 + i / 16_000) for i in range(0, 80_000, 7_000)].count(True) == 2
    assert (made.at_s, made.complete_s, round(made.end_s, 4)) == (3.0, 7.0, 8.0)
    parts = [w.pcm[w.num_before : len(w.pcm) - w.num_after] for w in made.all()]
    assert np.array_equal(np.concatenate(parts), heard)
    assert [len(p) for p in parts] == [32_000, 32_000, 16_000]
    # Sound after the question is returned. Sound that begins elsewhere starts a new track.
    assert np.array_equal(made.cut(70_000), heard[70_000:])
    assert (made.cut(70_000).size, made.num_samples) == (0, 70_000)
    made.append(heard[:100], 20.0)
    assert (made.at_s, made.num_samples, made.all()) == (20.0, 100, ())
    for second in range(70):
        made.append(heard[:16_000], made.end_s)
        assert len(made.windows) <= MAX_S / 2.0
        assert made.end_s == pytest.approx(20.0 + 100 / 16_000 + second + 1)


def test_when_a_video_spans_more_than_positions_reach_then_what_was_seen_first_is_at_its_beginning() -> None:
    partner, png = Partner(), image().image.data

    async def run() -> None:
        stream = ConversationVideoStream(partner, "", eager=False, window_s=2.0)
        for number, at_s in enumerate((0.0, 200.0, 1000.0)):
            await stream.append_frame(VideoFrame(number, at_s, EncodedImage(png)))
        await answered(stream, VideoQuestion("What?", 1000.0, (0, 1, 2)))

    anyio.run(run)
    (part, _) = partner.asked[-1][-1].parts
    assert isinstance(part, VideoPart)
    assert [at_s for at_s, _ in part.frames] == [0.0, 0.0, 1000.0 - 720.0]


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
    # Each request contains its own two frames and those of all earlier questions, until these are too many.
    assert num_frames[:-1] == [2 * n for n in range(1, MAX_PAST_FRAMES // 2 + 2)]
    assert num_frames[-1] == KEPT_PAST_FRAMES + 2
    system, oldest, *_ = partner.asked[-1]
    assert system.role == "system"
    assert oldest.parts[-1] == str(MAX_PAST_FRAMES // 2 + 1 - KEPT_PAST_FRAMES // 2)
