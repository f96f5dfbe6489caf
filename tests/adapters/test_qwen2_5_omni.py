"""Qwen2.5-Omni with tiny random weights: conversations that keep their KV equal the results of `transformers`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from antiphon.adapters.qwen2_5_omni.model import Qwen25Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import Message, ReplyDone, ResponseAudio, TextDelta, VoiceOptions
from antiphon.engine.api import EngineSettings, Position
from antiphon.engine.rows import Rows
from antiphon.errors import ModelError
from antiphon.modeling.media_rows import runs
from tests.adapters import tiny_qwen2_5_omni as tiny
from tests.adapters.published_qwen2_5_omni import Whole
from tests.adapters.published_qwen3_omni import OPTIONS, PROMPTS, TOKENS, clip
from tests.adapters.published_video import frame, sound, video
from tests.pipelines.test_cascade import Voice

SMALL_KV = EngineSettings(kv_bytes=64 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen25Omni]:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1))
    # Answers always reach their limit of tokens.
    loaded.thinker.stop_tokens = frozenset()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


async def written(stream: Any, messages: list[Message], voice: VoiceOptions | None = None) -> str:
    async with aclosing(stream.respond(messages, OPTIONS, voice)) as parts:
        return "".join([p.text async for p in parts if isinstance(p, TextDelta)])


def assert_written(text: str, ids: list[int], whole: Whole) -> None:
    expected = whole.tokenizer.decode(ids, skip_special_tokens=False)
    assert expected.startswith(text)
    # An incomplete character at the end is not in the answer.
    assert len(expected) - len(text) <= 3


@pytest.mark.parametrize("name", PROMPTS)
def test_text_is_that_of_the_published_model(model: Qwen25Omni, whole: Whole, name: str) -> None:
    async def run() -> str:
        stream = await model.open()
        try:
            return await written(stream, PROMPTS[name])
        finally:
            stream.close()

    assert_written(asyncio.run(run()), whole.ids(PROMPTS[name]), whole)


def test_when_a_conversation_goes_on_then_only_what_is_new_is_computed(model: Qwen25Omni, whole: Whole) -> None:
    first = [Message("system", "Be brief."), Message("user", "(sound)", parts=(clip(1.2, 5),))]
    second = Message("user", "(sound)", parts=(clip(1.4, 6), "And now?"))
    messages = [*first, Message("assistant", "Not what it said."), second]

    async def run() -> tuple[str, int]:
        stream = await model.open()
        await written(stream, first)
        before = model.thinker.engine.runner.stats.rows
        text = await written(stream, messages)
        stream.close()
        return text, model.thinker.engine.runner.stats.rows - before

    text, rows = asyncio.run(run())
    assert_written(text, whole.ids(messages), whole)
    assert rows < whole.inputs(messages)[0].shape[1] - whole.inputs(first)[0].shape[1] + TOKENS + 4


VIDEOS = {
    "sound in step": (5, 1.0, 5.3),
    "frames twice a second": (7, 0.5, 4.0),
    "sound that ends before the frames": (5, 1.0, 2.9),
    "sound that goes on behind them": (2, 1.0, 6.1),
    "a remainder that leaves no row": (3, 1.0, 4.01),
    "no sound": (4, 0.5, None),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_and_sound_are_interleaved_as_by_the_published_processor(
    model: Qwen25Omni, whole: Whole, name: str
) -> None:
    count, step_s, seconds = VIDEOS[name]
    pcm = None if seconds is None else sound(seconds)
    part = video([frame(i) for i in range(count)], step_s, pcm, model.profile.video_window_s)
    messages = [Message("system", "Look."), Message("user", "", parts=("See: ", part, "What was that?"))]

    async def run() -> tuple[str, list[Position]]:
        stream = await model.thinker.open()
        async with aclosing(stream.reply(messages, OPTIONS)) as parts:
            text = "".join([p.text async for p in parts if isinstance(p, TextDelta)])
        assert model.thinker.media_encoder
        rows = Rows()
        for run in runs(stream.rows, 0, stream.media_rows, model.thinker.media_encoder.joined):
            count = len(run.ids) or run.stop - run.start
            rows.append([0] * count, run.positions)
        stream.close()
        return text, [rows.position(i) for i in range(rows.length)]

    text, positions = asyncio.run(run())
    ids, given = whole.inputs(messages)
    expected = whole.positions(ids, given)
    assert [tuple(p) for p in positions[: len(expected)]] == expected
    assert_written(text, whole.ids(messages), whole)


def test_when_a_synthesizer_is_loaded_then_it_speaks_what_the_thinker_writes(folder: Path) -> None:
    voice = Voice()
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1), synthesizer=voice)
    assert loaded.profile.accepts_media
    assert loaded.profile.voices == voice.profile.voices

    async def run() -> list[Any]:
        stream = await loaded.open()
        options = VoiceOptions("one")
        async with aclosing(stream.respond(PROMPTS["both"], OPTIONS, options)) as parts:
            out = [p async for p in parts]
        stream.close()
        return out

    out = asyncio.run(run())
    loaded.close()
    assert [p for p in out if isinstance(p, ResponseAudio)]
    assert [type(p) for p in out].count(ReplyDone) == 1


def test_when_weights_are_auto_then_it_writes(folder: Path) -> None:
    loaded = Qwen25Omni(folder, "omni", EngineModelOptions(SMALL_KV, threads=1))

    async def run() -> str:
        stream = await loaded.open()
        text = await written(stream, PROMPTS["both"])
        stream.close()
        return text

    assert asyncio.run(run())
    loaded.close()


def test_when_a_checkpoint_lacks_something_then_the_error_says_what(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen25Omni(tmp_path, "omni", EngineModelOptions())
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.json").unlink()
    with pytest.raises(ModelError, match="chat template"):
        Qwen25Omni(tmp_path / "copy", "omni", EngineModelOptions(weights="fp32"))
