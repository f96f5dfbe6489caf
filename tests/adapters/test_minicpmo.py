"""MiniCPM-o 4.5 against the released code, on tiny random weights (tiny_minicpmo.py).

The golden numbers are from OpenBMB's MiniCPM-o-Demo (`MiniCPMO45/modeling_minicpmo_unified.py`, `DuplexCapability`,
transformers 4.51), for the same audio and pictures. Tokens and codes were decoded greedily.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.minicpmo.audio_batch import AudioPages
from antiphon.adapters.minicpmo.checkpoint import read
from antiphon.adapters.minicpmo.model import HISTORY_SHARE, MiniCpmO, MiniCpmOStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ListenStep, NativeOptions, NativeStep, SpeakStep, Unit
from antiphon.errors import MediaError, ModelError
from antiphon.events.duplex import NativeSampling
from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from tests.adapters import tiny_minicpmo as tiny
from tests.modeling.shared_passes import SharedPasses

GOLDEN = json.loads((tiny.GOLDEN / "minicpmo.json").read_text())
FLOATS = np.load(tiny.GOLDEN / "minicpmo.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("minicpmo"))


@pytest.fixture
def model(folder: Path) -> Any:
    made = MiniCpmO(folder, "tiny", EngineModelOptions(weights="fp32", threads=1), window=tiny.WINDOW)
    yield made
    made.close()


def unit(number: int) -> Unit:
    frames = []
    for i in range(tiny.FRAMES.get(number, 0)):
        file = io.BytesIO()
        tiny.picture(10 * number + i).save(file, "PNG")
        frames.append(file.getvalue())
    return Unit(tiny.sound(number), tuple(frames), tiny.SLICES.get(number, 1))


OPTIONS = NativeOptions(
    instructions=tiny.PROMPT,
    voice_reference=tiny.reference(),
    listen_only_units=tiny.FORCED_FIRST,
    sampling=NativeSampling(temperature=0.0),
)


def test_embeddings_of_audio_are_the_released_ones(model: MiniCpmO) -> None:
    encoder = model.parts.audio_encoder
    np.testing.assert_allclose(encoder.encode_clip(tiny.reference()), FLOATS["reference"], atol=2e-4)
    heard = model.hearing.open()
    for number in range(tiny.NUM_UNITS):
        found = asyncio.run(model.hearing.feed(heard, tiny.sound(number)))
        np.testing.assert_allclose(found, FLOATS[f"audio{number}"], atol=5e-4)


def test_a_history_precedes_the_first_unit_and_its_beginning_is_left_out_if_it_is_long(model: MiniCpmO) -> None:
    async def rows(history: str) -> int:
        stream = await model.open(NativeOptions(tiny.PROMPT, recall=lambda: history))
        length = stream.context_rows
        stream.close()
        return length

    async def main() -> None:
        empty = await rows("")
        said = "User: hello\n"
        assert await rows(said) - empty == len(model.encode(f"{said}\n"))
        assert await rows(said * 1000) - empty == int(model.profile.window[1] * HISTORY_SHARE)

    asyncio.run(main())


def test_when_a_conversation_is_closed_then_the_pages_of_its_audio_are_free(model: MiniCpmO) -> None:
    async def main() -> None:
        pages = model.hearing.pages = AudioPages(model.parts.audio_encoder, 1, captures=False)
        stream, free = await model.open(NativeOptions(tiny.PROMPT)), pages.pool.free_pages
        await stream.append(unit(0))
        assert pages.pool.free_pages == free - 1
        with pytest.raises(ModelError, match="a unit is 16000 finite samples"):
            await stream.append(Unit(np.full(16_000, np.nan, np.float32)))
        stream.close()
        await model.engine.thread.call(lambda: None)
        assert pages.pool.free_pages == free

    asyncio.run(main())


def test_embeddings_of_frames_are_the_released_ones(model: MiniCpmO) -> None:
    for number, count in tiny.FRAMES.items():
        pictures = [tiny.picture(10 * number + i) for i in range(count)]
        parts = [x for p in pictures for x in model.parts.vision_encoder.prepare(p, tiny.SLICES.get(number, 1))]
        rows = [model.parts.vision_encoder.encode([part])[0] for part in parts]
        np.testing.assert_allclose(np.stack(rows), FLOATS[f"image{number}"], atol=5e-4)


def test_when_the_voice_has_a_device_of_its_own_then_only_its_parts_are_there(folder: Path) -> None:
    # The meta device takes the place of a second GPU.
    parts = read(folder, torch.device("cpu"), torch.float32, torch.device("meta"))
    voice, others = (parts.text_conditions, parts.code_decoder), (parts.decoder, parts.audio_encoder)
    assert {p.device.type for part in voice for p in part.parameters()} == {"meta"}
    assert {p.device.type for part in others for p in part.parameters()} == {"cpu"}
    assert {p.device.type for p in parts.vision_encoder.parameters()} == {"cpu"}


class Recorder:
    """A CodeVocoder that records its calls, and returns ten samples a code. It is its only stream."""

    lookahead = 3

    def __init__(self) -> None:
        self.windows: list[list[Any]] = []

    async def open(self, reference: Any) -> Recorder:
        return self

    async def decode(self, codes: Any, *, last: bool) -> Any:
        self.windows.append([list(codes), last])
        return np.zeros(10 * (len(codes) - (0 if last else self.lookahead)), np.float32)

    def end_turn(self) -> None:
        pass

    def close(self) -> None:
        pass


def converse(model: MiniCpmO, options: NativeOptions, check: Callable[[int, MiniCpmOStream, Any], None]) -> None:
    async def main() -> None:
        stream = await model.open(options)
        for number in range(tiny.NUM_UNITS):
            if number in tiny.FORCED:
                stream.interrupt()
            await stream.append(unit(number))
            check(number, stream, await stream.step())
        stream.close()

    asyncio.run(main())


@pytest.mark.slow
def test_decisions_tokens_and_codes_are_the_released_ones(folder: Path) -> None:
    recorder = Recorder()
    model = MiniCpmO(
        folder, "tiny", EngineModelOptions(weights="fp32", threads=1), window=tiny.WINDOW, vocoder=recorder
    )
    ids = model.parts.ids

    def compare(number: int, stream: MiniCpmOStream, step: Any) -> None:
        golden = GOLDEN["units"][number]
        closing = [ids.turn_eos] if golden["ids"][0] == ids.turn_eos and number in tiny.FORCED else []
        assert [*closing, *stream.chooser.chosen, ids.unit_end] == golden["ids"], number
        assert isinstance(step, ListenStep) == golden["listen"]
        assert stream.context_rows == golden["cache"]
        assert recorder.windows == golden["windows"]
        if not golden["listen"]:
            assert step.end_of_turn == golden["end_of_turn"]
            assert len(step.pcm) == 10 * sum(len(w) - (0 if last else 3) for w, last in golden["windows"])
        recorder.windows.clear()

    converse(model, OPTIONS, compare)
    model.close()


def test_when_a_frame_is_no_image_then_its_unit_fails_and_the_frames_of_other_conversations_share_a_pass(
    model: MiniCpmO,
) -> None:
    async def main() -> None:
        encode = model.parts.vision_encoder.encode
        shared = model.images = SharedPasses(model.engine.thread, encode, lambda image: image.count)
        streams = [await model.open(OPTIONS) for _ in range(3)]
        units = (unit(3), Unit(tiny.sound(0), (b"nothing",)), unit(15))
        calls = [stream.append(one) for stream, one in zip(streams, units, strict=True)]
        found = await shared.together(calls, 2)
        assert [type(each) for each in found] == [type(None), MediaError, type(None)]
        # An image; an image and its slices.
        assert shared.passes == [1 + len(FLOATS["image15"])]
        # Nothing of the failed unit was appended.
        await streams[1].append(unit(0))
        for stream in streams:
            await stream.step()
        rows, image_rows = [stream.context_rows for stream in streams], 2 + len(FLOATS["image3"][0])
        assert [count - rows[1] for count in rows] == [image_rows, 0, image_rows * len(FLOATS["image15"])]
        for stream in streams:
            stream.close()

    asyncio.run(main())


def test_when_weights_are_int8_then_it_converses(folder: Path) -> None:
    async def main() -> list[NativeStep]:
        model = MiniCpmO(folder, "tiny", EngineModelOptions(weights="int8", threads=1), window=tiny.WINDOW)
        stream = await model.open(
            NativeOptions(tiny.PROMPT, sampling=NativeSampling(temperature=0.0), listen_only_units=0)
        )
        steps = []
        for number in range(16):
            await stream.append(Unit(tiny.sound(number)))
            steps.append(await stream.step())
        stream.close()
        model.close()
        return steps

    assert any(isinstance(step, SpeakStep) for step in asyncio.run(main()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "minicpmv", "tts_config": {}}, "its model_type is 'minicpmv'"),
        ({"tts_config": tiny.CONFIG["tts_config"] | {"num_vq": 4}}, "its speech decoder is of another kind"),
        ({"tts_config": {"backbone_model": "llama"}}, "config.json: .*tts_config"),
        ({"query_num": "many"}, r"config.json: .*query_num"),
    ],
)
def test_when_a_checkpoint_is_of_another_kind_then_the_error_says_so(
    folder: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | changes))
    with pytest.raises(ModelError, match=f"is not a MiniCPM-o 4.5 checkpoint: {says}"):
        read(tmp_path, torch.device("cpu"), torch.float32)


def test_when_models_are_warmed_then_a_native_partner_listens_and_speaks(folder: Path) -> None:
    recorder = Recorder()
    model = MiniCpmO(folder, "tiny", EngineModelOptions(weights="fp32", threads=1), vocoder=recorder)
    nothing = dict.fromkeys(
        ("transcriber", "vad", "turn_detector", "language_model", "synthesizer", "image_reader", "video_model")
    )
    loaded = LoadedModels(**nothing, conversation_model=NativeConversationModel(model), names=(), lanes=())
    asyncio.run(loaded.warm())
    assert recorder.windows
    model.close()
