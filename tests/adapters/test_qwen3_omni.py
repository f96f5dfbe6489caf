"""Qwen3-Omni with tiny random weights: conversations that keep their KV equal the results of `transformers`.

Text, codes and audio are compared with the published model, which gets the whole conversation each time.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.qwen3_omni.talker import TALKER_SAMPLING
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import (
    ImagePart,
    MediaPart,
    Message,
    ReplyDone,
    ResponseAudio,
    TextDelta,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.modeling import chat
from antiphon.modeling.chat import MAX_SPARE_PARTS
from antiphon.modeling.codec.talker import FirstCodeChooser
from antiphon.modeling.omni.conversation import SpokenTokens
from antiphon.vision.images import EncodedImage
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.published_qwen3_omni import (
    FRAMES,
    OPTIONS,
    PROMPTS,
    TOKENS,
    Made,
    Whole,
    answer,
    assert_equal,
    clip,
    folder_of,
    image,
)
from tests.adapters.published_video import frame, sound, video
from tests.adapters.tiny_qwen3_omni import FRAME_SAMPLES, ID

SMALL_KV = EngineSettings(kv_bytes=64 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    loaded = Qwen3Omni(folder, "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1))
    assert loaded.talker
    greedy = loaded.talker.sampling
    loaded.talker.sampling = replace(
        greedy, first=replace(greedy.first, temperature=0.0), rest=replace(greedy.rest, temperature=0.0)
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_text_and_audio_are_those_of_the_published_model(model: Qwen3Omni, whole: Whole, name: str) -> None:
    async def run() -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, PROMPTS[name], stop)
        finally:
            stream.close()

    stop = whole.stop(PROMPTS[name])
    assert_equal(asyncio.run(run()), whole.generate(PROMPTS[name], stop))


VIDEOS = {
    "sound in step": (3, 1.0, 3.0),
    "sound longer than a window of the encoder": (4, 2.0, 9.3),
    "a remainder shorter than a chunk of the encoder": (2, 4.0, 8.4),
    "sound that ends before the frames": (4, 1.0, 1.7),
    "no sound": (3, 1.0, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEOS)
def test_frames_and_sound_are_interleaved_as_by_the_published_processor(
    model: Qwen3Omni, whole: Whole, name: str
) -> None:
    count, step_s, seconds = VIDEOS[name]
    pcm = None if seconds is None else sound(seconds)
    part = video([frame(i) for i in range(count)], step_s, pcm, model.profile.video_window_s)
    texts = ("What is that?", "What was that?", *(f"Number {n}?" for n in range(8)))
    asked = ([Message("system", "Look."), Message("user", "", parts=("See: ", part, text))] for text in texts)
    # A question whose answer can be made to end. With random weights, other answers repeat a single token.
    messages = next(m for m in asked if set(whole.ids(m)[4:]) - set(whole.ids(m)[:4]))

    async def run() -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, messages, stop)
        finally:
            stream.close()

    stop = whole.stop(messages)
    assert_equal(asyncio.run(run()), whole.generate(messages, stop))


@pytest.mark.slow
def test_when_a_conversation_goes_on_then_both_decoders_compute_only_what_is_new(
    model: Qwen3Omni, whole: Whole
) -> None:
    first = [Message("system", "Be brief."), Message("user", "(sound)", parts=(clip(1.2, 5),))]
    second = Message("user", "(sound)", parts=(clip(1.4, 6), "And now?"))

    async def run(said: str) -> tuple[Made, int, int]:
        stream = await model.open()
        try:
            await answer(model, stream, first, whole.stop(first))
            assert model.talker
            thinker, talker = model.thinker.engine.runner.stats, model.talker.engine.runner.stats
            before = thinker.rows, talker.rows
            messages = [*first, Message("assistant", said), second]
            made = await answer(model, stream, messages, whole.stop(messages))
            return made, thinker.rows - before[0], talker.rows - before[1]
        finally:
            stream.close()

    # The history has a different text than the model wrote.
    said = "Not what it said."
    messages = [*first, Message("assistant", said), second]
    made, thinker_rows, talker_rows = asyncio.run(run(said))
    assert_equal(made, whole.generate(messages, whole.stop(messages)))
    ids, _ = whole.inputs(messages)
    known, _ = whole.inputs(first)
    assert thinker_rows < ids.shape[1] - known.shape[1] + TOKENS + 4
    # The user's first turn is not computed again; each frame is a row.
    users, _ = whole.inputs([second])
    assert talker_rows < users.shape[1] + 9 + 2 * (FRAMES + 12)


@pytest.mark.slow
def test_when_other_conversations_run_and_are_broken_off_then_responses_do_not_change(
    model: Qwen3Omni, whole: Whole
) -> None:
    names = ("text", "sound", "image", "turns")
    stops = {name: whole.stop(PROMPTS[name]) for name in names}
    expected = {name: whole.generate(PROMPTS[name], stops[name]) for name in names}

    async def broken_off(name: str, after: int) -> None:
        stream = await model.open()
        count = 0
        async with aclosing(stream.respond(PROMPTS[name], OPTIONS, VoiceOptions("chelsie"))) as parts:
            async for _ in parts:
                count += 1
                if count == after:
                    break
        stream.close()

    async def run(name: str) -> Made:
        async with asyncio.TaskGroup() as group:
            for i, other in enumerate(names):
                group.create_task(broken_off(other, 3 + 2 * i))
            stream = await model.open()
            made = await answer(model, stream, PROMPTS[name], stops[name])
            stream.close()
        # Frames are recorded for all conversations together.
        return replace(made, frames=[])

    for name in names:
        assert_equal(asyncio.run(run(name)), expected[name])
    assert model.talker
    for engine in (model.thinker.engine, model.talker.engine):
        assert asyncio.run(engine.state()).sessions == 0


@pytest.mark.slow
def test_voices_differ_and_each_equals_the_published_one(model: Qwen3Omni, whole: Whole) -> None:
    stop = whole.stop(PROMPTS["text"])
    other = whole.generate(PROMPTS["text"], stop, "chelsie")

    async def run(speaker: str) -> Made:
        stream = await model.open()
        try:
            return await answer(model, stream, PROMPTS["text"], stop, speaker)
        finally:
            stream.close()

    chelsie = asyncio.run(run("chelsie"))
    assert_equal(chelsie, other)
    assert not torch.equal(asyncio.run(run("ethan")).audio[:300], chelsie.audio[:300])


def test_when_there_is_no_voice_then_the_response_is_text_only(model: Qwen3Omni) -> None:
    async def run() -> list[Any]:
        stream = await model.open()
        try:
            async with aclosing(stream.respond(PROMPTS["sound"], OPTIONS, None)) as parts:
                return [p async for p in parts]
        finally:
            stream.close()

    out = asyncio.run(run())
    assert not [p for p in out if isinstance(p, ResponseAudio)]
    assert [p for p in out if isinstance(p, TextDelta)]
    assert isinstance(out[-1], ReplyDone)


def test_words_have_times_and_the_end_comes_last(model: Qwen3Omni, whole: Whole) -> None:
    async def run() -> list[Any]:
        stream = await model.open()
        assert model.talker
        model.thinker.stop_tokens = frozenset((whole.stop(PROMPTS["text"]),))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.talker, "sampling", replace(model.talker.sampling, max_frames=12))
            async with aclosing(stream.respond(PROMPTS["text"], OPTIONS, VoiceOptions("ethan"))) as parts:
                out = [p async for p in parts]
        stream.close()
        return out

    out = asyncio.run(run())
    assert isinstance(out[-1], ReplyDone)
    words = [w for p in out if isinstance(p, ResponseAudio) for w in p.words]
    text = "".join(p.text for p in out if isinstance(p, TextDelta))
    assert [w.text for w in words] == text.split()
    # Twelve frames. The first is shorter, because the vocoder needs two inputs for a sample.
    lost = 12 * FRAME_SAMPLES - sum(len(p.pcm) for p in out if isinstance(p, ResponseAudio))
    assert 0 < lost < FRAME_SAMPLES


def test_when_the_model_calls_a_tool_then_the_call_is_not_spoken(model: Qwen3Omni) -> None:
    async def spoken(rows: list[int], tokens: Sequence[int]) -> list[int]:
        chat = SimpleNamespace(rows=list(rows), hidden=None)
        said = SpokenTokens(chat, frozenset((1,)), model.call_opening)  # type: ignore[arg-type]
        for token in tokens:
            chat.rows.append(token)
            said.feed(token)
        said.end()
        assert await said.prompt() == rows
        return [t async for t in said.tokens()]

    opening = ID["<tool_call>"]
    assert model.call_opening == opening
    assert asyncio.run(spoken([9, 9, 9, 9, 9], [5, 6, opening, 7, 1])) == [5, 6]
    assert asyncio.run(spoken([9, 9, 9, 9, 9], [5, 1, 7])) == [5]
    # A response that must be a call is not spoken.
    assert asyncio.run(spoken([9, 9, 9, opening, 9], [5, 6, 1])) == []


@pytest.mark.slow
def test_when_media_leave_a_conversation_then_only_the_last_few_are_held(model: Qwen3Omni) -> None:
    async def run() -> None:
        stream = await model.open()
        for name in ("both", "image"):
            async with aclosing(stream.respond(PROMPTS[name], OPTIONS, None)) as parts:
                async for _ in parts:
                    pass
        # Some rows are cached, in case their media are used again.
        assert list(stream.chat.media_rows)[-1] == PROMPTS["image"][1].parts[1]
        for number in range(12):
            many = [Message("user", "", parts=(image(number), "?"))]
            async with aclosing(stream.respond(many, OPTIONS, None)) as parts:
                async for _ in parts:
                    pass
        assert len(stream.chat.media_rows) == MAX_SPARE_PARTS + 1
        stream.close()

    asyncio.run(run())


def test_audio_may_end_with_the_first_code() -> None:
    logits = torch.zeros(1, 1100)
    logits[0, 50] = 9
    chooser = FirstCodeChooser(TALKER_SAMPLING.first, 50, 1100, TALKER_SAMPLING.min_frames)
    assert FirstCodeChooser.choose([chooser], logits).tolist() == [50]


def test_when_weights_are_auto_then_it_writes_and_speaks_and_int8_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="mixtures"):
        Qwen3Omni(folder, "omni", EngineModelOptions(weights="int8"))
    loaded = Qwen3Omni(folder, "omni", EngineModelOptions(SMALL_KV, threads=1))

    async def run() -> list[Any]:
        stream = await loaded.open()
        out = []
        async with aclosing(stream.respond(PROMPTS["both"], OPTIONS, VoiceOptions("ethan", seed=1))) as parts:
            async for part in parts:
                out.append(part)
                if isinstance(part, ResponseAudio):
                    break
        stream.close()
        return out

    out = asyncio.run(run())
    loaded.close()
    assert [p for p in out if isinstance(p, TextDelta)]
    assert len(out[-1].pcm)


def test_when_there_is_no_talker_then_it_hears_and_writes(folder: Path, tmp_path: Path, whole: Whole) -> None:
    shutil.copytree(folder, tmp_path / "thinker")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "thinker" / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    loaded = Qwen3Omni(tmp_path / "thinker", "omni", EngineModelOptions(SMALL_KV, weights="fp32", threads=1))
    loaded.thinker.stop_tokens = frozenset()

    async def run() -> list[int]:
        stream = await loaded.open()
        async with aclosing(stream.respond(PROMPTS["both"], OPTIONS, VoiceOptions("ethan"))) as parts:
            assert not [p async for p in parts if isinstance(p, ResponseAudio)]
        rows = [row for row in stream.chat.rows[-TOKENS:] if isinstance(row, int)]
        stream.close()
        return rows

    assert loaded.profile.voices == ()
    assert asyncio.run(run()) == whole.ids(PROMPTS["both"])
    loaded.close()


@pytest.mark.slow
def test_when_rows_leave_the_context_before_they_are_computed_then_the_response_is_spoken(
    model: Qwen3Omni, whole: Whole
) -> None:
    long = [Message("user", "", parts=(*(image(i) for i in range(130)), "What was that?"))]

    async def run() -> list[Any]:
        small = Qwen3Omni(
            folder_of(whole), "omni", EngineModelOptions(replace(SMALL_KV, context_rows=512), weights="fp32", threads=1)
        )
        small.thinker.stop_tokens = frozenset()
        stream = await small.open()
        out = []
        async with aclosing(stream.respond(long, OPTIONS, VoiceOptions("ethan", seed=3))) as parts:
            async for part in parts:
                out.append(part)
                if isinstance(part, ResponseAudio):
                    break
        assert [s for s in stream.chat.media_rows.values() if s.hidden is None]
        stream.close()
        small.close()
        return out

    assert isinstance(asyncio.run(run())[-1], ResponseAudio)


def test_when_conversations_hold_all_the_media_they_may_then_new_ones_are_refused_until_one_ends(
    model: Qwen3Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say(stream: Any, *parts: Any) -> None:
        async with aclosing(stream.respond([Message("user", "", parts=parts)], OPTIONS, None)) as answers:
            async for _ in answers:
                pass

    images = [image(i) for i in range(5)]

    async def run() -> None:
        one, other = await model.open(), await model.open()
        await say(one, images[1], "?")
        budget = model.thinker.media_budget
        assert budget.num_bytes == sum(rows.num_bytes for rows in one.chat.media_rows.values()) > 0
        # Room for two images of this size, but not for another one.
        limit_bytes = 2 * budget.num_bytes
        kv_bytes = model.thinker.engine.last_state.kv_total_bytes
        monkeypatch.setattr(chat, "KV_PER_MEDIA", -(-kv_bytes // limit_bytes))
        await say(one, images[1], images[2], "?")
        with pytest.raises(Refused, match="MB of encoded sound and images"):
            await say(other, images[3], "?")
        with pytest.raises(Refused):
            await say(one, images[1], images[2], images[3], "?")
        await say(other, "Words need no room.")
        # Media that a conversation no longer uses make room for new ones.
        await say(one, "?")
        await say(one, images[4], "?")
        assert set(one.chat.media_rows) == {images[4]}
        one.close()
        await say(other, images[3], "?")
        other.close()
        assert budget.num_bytes == 0

    asyncio.run(run())


@pytest.mark.slow
def test_when_a_part_is_in_many_requests_then_it_is_encoded_once(model: Qwen3Omni) -> None:
    encoded: list[MediaPart] = []

    class Counted:
        def __init__(self, encoder: Any) -> None:
            self.placeholder_ids, self.has_tap, self._encoder = encoder.placeholder_ids, encoder.has_tap, encoder
            self.joined, self.window_s, self.video_rows = encoder.joined, encoder.window_s, encoder.video_rows

        async def encode(self, part: MediaPart) -> Any:
            encoded.append(part)
            return await self._encoder.encode(part)

    # There are more images than fit into the context. Images that truncation dropped are not encoded again.
    parts = [image(i) for i in range(120)]
    messages = [Message("user", "", parts=(p, str(i))) for i, p in enumerate(parts)]

    async def run() -> None:
        stream = await model.open()
        ahead = [asyncio.create_task(stream.prefill(messages[:i])) for i in range(1, 7)]
        await asyncio.sleep(0)
        ahead[2].cancel()
        options = replace(OPTIONS, truncation=0.2)
        for _ in range(3):
            async with aclosing(stream.respond(messages, options, None)) as answers:
                async for _ in answers:
                    pass
        await asyncio.gather(*ahead, return_exceptions=True)
        stream.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.thinker, "media_encoder", Counted(model.thinker.media_encoder))
        asyncio.run(run())
    assert sorted(map(parts.index, encoded)) == list(range(120))


def test_when_a_checkpoint_lacks_something_then_the_error_says_what(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        Qwen3Omni(tmp_path, "omni", EngineModelOptions())
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.json").unlink()
    with pytest.raises(ModelError, match="chat template"):
        Qwen3Omni(tmp_path / "copy", "omni", EngineModelOptions(weights="fp32"))
    shutil.copytree(folder, tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    running = threading.active_count()
    with pytest.raises(ModelError, match="preprocessor_config"):
        Qwen3Omni(tmp_path / "blind", "omni", EngineModelOptions(weights="fp32"))
    # The engine that was started has been stopped.
    assert threading.active_count() <= running


def test_when_an_image_is_broken_then_the_response_fails_and_the_conversation_goes_on(
    model: Qwen3Omni, whole: Whole
) -> None:
    async def run() -> Made:
        stream = await model.open()
        broken = [Message("user", "", parts=(ImagePart(EncodedImage(b"no image")), "What is it?"))]
        with pytest.raises(RemoteProtocolError, match="image"):
            await answer(model, stream, broken, stop)
        made = await answer(model, stream, PROMPTS["text"], stop)
        stream.close()
        return made

    stop = whole.stop(PROMPTS["text"])
    assert_equal(asyncio.run(run()), whole.generate(PROMPTS["text"], stop))
