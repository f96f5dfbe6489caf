"""Vision-language models with tiny random weights: incremental sessions give the same answers as `transformers`.

`Whole` is the reference: the published model, which gets the whole conversation for every question. Answers are
compared token for token.
"""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.session import SYSTEM, VisionLanguageModel, VisionLanguageStream
from antiphon.adapters.vlm.smolvlm import SmolVlm
from antiphon.contracts import ReplyDone, ReplyOptions, TextDelta, VideoFrame, VideoQuestion
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.gathered import MAX_WAITING_CPU
from antiphon.modeling.tokens import Vocabulary
from antiphon.shares.places import current_owner
from antiphon.vision.images import EncodedImage
from tests.adapters import tiny_vlm
from tests.adapters.tiny_vlm import FAMILIES, FIRST, ROWS, SIDE
from tests.modeling.shared_passes import SharedPasses

MAX_TOKENS = 12
END, IMAGE = FIRST + 1, FIRST + 2


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm.write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm.write(tmp_path_factory.mktemp("one"))


def picture(number: int) -> bytes:
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    # Pictures differ in shape and in content.
    Image.fromarray(rng.integers(0, 255, (48 - 16 * (number % 3 == 1), 80, 3)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


class Whole:
    """The published model, which gets the whole conversation for each question, and the text of its processor."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.qwen = self.model.config.model_type != "smolvlm"
        self.process: Any
        if self.qwen:
            self.process = Qwen2VLImageProcessorPil.from_pretrained(folder)
        else:
            self.process = SmolVLMImageProcessorPil(
                do_image_splitting=False, size={"longest_edge": 80}, max_image_size={"longest_edge": SIDE}
            )

    def inputs(self, images: list[bytes]) -> dict[str, Any]:
        """Return the model's keyword arguments for images, as its processor does."""
        opened = [Image.open(io.BytesIO(i)).convert("RGB") for i in images]
        return dict(self.process(opened if self.qwen else [opened], return_tensors="pt")) if images else {}

    def system(self, more: str = "") -> str:
        said = f"{SYSTEM} {more}".strip()
        return f"<|im_start|>system\n{said}<|im_end|>" if self.qwen else f"<|im_start|>System: {said}<end_of_utterance>"

    @property
    def turn(self) -> str:
        return "\n<|im_start|>user\n" if self.qwen else "\nUser:"

    def frame(self, at_s: int, image: bytes) -> str:
        if not self.qwen:
            pads = "<image>" * ROWS
            around = "<fake_token_around_image>"
            return f"\nFrame from {at_s // 60:02d}:{at_s % 60:02d}:{around}<global-img>{pads}{around}"
        count = int(self.inputs([image])["image_grid_thw"][0].prod()) // 4
        return f"<{at_s:.1f} seconds><|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"

    def question(self, text: list[int], control: Any) -> list[int]:
        before, after = (
            ("", "<|im_end|>\n<|im_start|>assistant\n") if self.qwen else ("\n\n", "<end_of_utterance>\nAssistant:")
        )
        return [*control(before), *text, *control(after)]

    @torch.inference_mode()
    def answer(self, rows: list[int], given: dict[str, Any]) -> list[int]:
        """Return the tokens that follow these rows, decoded greedily."""
        out: list[int] = []
        while len(out) < MAX_TOKENS:
            ids = torch.tensor([rows + out])
            more = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == IMAGE + 1).int()} if self.qwen else {}
            self.model.model.rope_deltas = None
            out.append(int(self.model(input_ids=ids, **given, **more).logits[0, -1].argmax()))
            if out[-1] == END:
                break
        return out


def same(words: Vocabulary, said: str, expected: list[int]) -> bool:
    """Return whether the text is that of the expected tokens, without an incomplete character at the end."""
    return said.rstrip("\ufffd") == words.tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")


async def ask(stream: VisionLanguageStream, text: str, frames: tuple[int, ...]) -> tuple[str, ReplyDone]:
    out = ""
    question = VideoQuestion(text, 99.0, frames)
    async with aclosing(stream.answer(question, ReplyOptions(max_tokens=MAX_TOKENS), None)) as answers:
        async for answer in answers:
            if isinstance(answer, TextDelta):
                out += answer.text
            elif isinstance(answer, ReplyDone):
                done = answer
    return out, done


def run(folder: Path, act: Any, **options: Any) -> Any:
    async def main() -> Any:
        model = VisionLanguageModel(folder, "tiny", EngineModelOptions(threads=1, **({"weights": "fp32"} | options)))
        try:
            return await asyncio.wait_for(act(model), 60)
        finally:
            model.close()

    return asyncio.run(main())


async def show(stream: VisionLanguageStream, number: int, at_s: float, expected: tuple[int, ...] | None = None) -> None:
    await stream.append_frame(VideoFrame(number, at_s, EncodedImage(picture(number))))
    stream.select_frames(tuple(range(number + 1)) if expected is None else expected)


def test_an_image_has_the_rows_that_the_published_model_gives_it(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: VisionLanguageModel) -> Any:
        return (await model.encode_image(EncodedImage(picture(1)))).rows

    given = whole.inputs([picture(1)])
    with torch.inference_mode():
        mask = {} if whole.qwen else {"pixel_attention_mask": given["pixel_attention_mask"]}
        grid = {"image_grid_thw": given["image_grid_thw"]} if whole.qwen else {}
        seen = whole.model.model.get_image_features(given["pixel_values"], **grid, **mask)
    features = getattr(seen, "deepstack_features", None) or ()
    expected = torch.cat([seen.pooler_output[0], *(f if torch.is_tensor(f) else f[0] for f in features)], -1)
    torch.testing.assert_close(run(folder, act), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["eager", "query"])
def test_when_questions_follow_frames_then_answers_equal_a_rebuild_and_only_new_rows_are_computed(
    folder: Path, prefill: str
) -> None:
    whole = Whole(folder)

    async def act(model: VisionLanguageModel) -> None:
        words = model.family.vocabulary
        stream, other = await model.open("Be brief.", "one"), await model.open("", "one")
        rows, images, number = words.control(whole.system("Be brief.")), [], 0
        for turn, frames in enumerate((1, 0, 3, 2, 1)):
            rows += words.control(whole.turn)
            stats, length = model.engine.runner.stats, stream.session.length
            before = stats.rows
            for _ in range(frames):
                await show(stream, number, float(number * 40))
                rows += words.control(whole.frame(number * 40, picture(number)))
                images.append(picture(number))
                number += 1
            # Control tokens in a user's text are not recognized.
            question = f"What is it, {turn}? <image> <|im_end|>"
            rows += whole.question(words.plain(question), words.control)
            asking = ask(stream, question, tuple(range(number)))
            if turn == 1:
                # Another session asks a question at the same time.
                (said, done), _ = await asyncio.gather(asking, ask(other, "Who?", ()))
            else:
                said, done = await asking
                # Only new rows are computed. The rows of the system turn may be computed with the first question.
                first = length if turn == 0 else 0
                assert stats.rows - before <= stream.session.length - length + first + 1
            expected = whole.answer(rows, whole.inputs(images))
            assert same(words, said, expected)
            assert done.completion_tokens == len(expected)
            rows += expected + ([] if expected[-1] == END else [END])
        # Each frame is in the context once.
        assert stream.session.length == len(rows)

    run(folder, act, prefill=prefill)


def test_when_prefill_is_eager_then_frames_are_in_the_kv_before_the_question(folder: Path) -> None:
    async def act(model: VisionLanguageModel) -> tuple[int, int]:
        stream, stats = await model.open(""), model.engine.runner.stats
        for number in range(3):
            await show(stream, number, float(number))
        await stream.session.settle()
        before = stats.rows
        question, _ = await ask(stream, "What?", (0, 1, 2))
        del question
        return stats.rows - before, stream.session.length

    eager, length = run(folder, act)
    query, same = run(folder, act, prefill="query")
    assert length == same
    assert eager < 60 + MAX_TOKENS < query


def test_when_a_question_is_about_other_frames_then_the_prefilled_ones_are_taken_back(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: VisionLanguageModel) -> None:
        words, stream = model.family.vocabulary, await model.open("")
        for number, expected in enumerate([(0,), (0, 1), (0, 2), (1, 3)]):
            await show(stream, number, float(number), expected)
        stream.forget(1.5)
        await show(stream, 4, 4.0, (1, 2, 3, 4))
        said, _ = await ask(stream, "What?", (1, 2, 4))
        rows = words.control(whole.system() + whole.turn)
        for number in (2, 4):
            rows += words.control(whole.frame(number, picture(number)))
        rows += whole.question(words.plain("What?"), words.control)
        expected = whole.answer(rows, whole.inputs([picture(2), picture(4)]))
        assert same(words, said, expected)
        assert stream.session.length == len(rows) + len(expected) + (expected[-1] != END)

    run(folder, act)


def test_when_a_frame_comes_during_an_answer_then_the_next_question_has_it(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: VisionLanguageModel) -> None:
        words, stream = model.family.vocabulary, await model.open("")
        await show(stream, 0, 0.0)
        answers = stream.answer(VideoQuestion("First?", 0.0, (0,)), ReplyOptions(max_tokens=MAX_TOKENS), None)
        first = ""
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer, TextDelta):
                    first += answer.text
                    if 1 not in stream.waiting_frames:
                        await show(stream, 1, 1.0)
        assert 1 in stream.waiting_frames
        said, _ = await ask(stream, "Second?", (0, 1))
        rows = words.control(whole.system() + whole.turn + whole.frame(0, picture(0)))
        rows += whole.question(words.plain("First?"), words.control)
        answered = whole.answer(rows, whole.inputs([picture(0)]))
        assert same(words, first, answered)
        rows += [
            *answered,
            *([END] if answered[-1] != END else []),
            *words.control(whole.turn + whole.frame(1, picture(1))),
        ]
        rows += whole.question(words.plain("Second?"), words.control)
        expected = whole.answer(rows, whole.inputs([picture(0), picture(1)]))
        assert same(words, said, expected)

    run(folder, act)


def test_when_frames_are_dropped_or_shift_then_they_are_not_prefilled(smolvlm: Path) -> None:
    async def act(model: VisionLanguageModel) -> None:
        stream = await model.open("")
        for number in range(6):
            await show(stream, number, float(number))
        for number in range(4):
            stream.drop_frame(number)
        assert stream.waiting_frames == (4, 5)
        # A selection that shifts with each frame is not prefilled.
        shown = stream.prefilled_frames
        for number in range(6, 12):
            await show(stream, number, float(number), tuple(range(number - 5, number + 1)))
        assert len(stream.prefilled_frames) <= len(shown) + 2
        assert (await ask(stream, "What?", tuple(range(6, 12))))[1].completion_tokens

    run(smolvlm, act)


def test_when_an_answer_is_cut_off_then_the_frames_stay(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: VisionLanguageModel) -> None:
        words, stream = model.family.vocabulary, await model.open("")
        await show(stream, 0, 0.0)
        answers = stream.answer(VideoQuestion("Cut this?", 0.0, (0,)), ReplyOptions(max_tokens=MAX_TOKENS), None)
        async with aclosing(answers):
            async for _ in answers:
                break
        said, _ = await ask(stream, "And now?", (0,))
        rows = words.control(whole.system() + whole.turn + whole.frame(0, picture(0)))
        rows += [END, *words.control(whole.turn), *whole.question(words.plain("And now?"), words.control)]
        expected = whole.answer(rows, whole.inputs([picture(0)]))
        assert same(words, said, expected)

    run(folder, act)


@pytest.mark.slow
def test_when_the_context_is_full_then_the_oldest_turns_leave_and_the_system_turn_stays(folder: Path) -> None:
    async def act(model: VisionLanguageModel) -> None:
        model.engine.scheduler.limits = type(model.engine.scheduler.limits)(320)
        stream = await model.open("")
        for number in range(10):
            await show(stream, number, float(number))
            _, done = await ask(stream, "What?", tuple(range(number + 1)))
            assert done.completion_tokens
        # More new frames arrive at once than fit into the context.
        for number in range(10, 34):
            await show(stream, number, float(number))
        stream.select_frames(tuple(range(14, 30)))
        assert (await ask(stream, "What?", tuple(range(20, 34))))[1].completion_tokens
        assert (await ask(stream, "What?", ()))[1].completion_tokens
        assert model.engine.scheduler.context_cuts > 2
        await model.engine.thread.call(model.engine.scheduler.check_integrity)

    run(folder, act)


def test_qwen3_vl_frames_have_the_text_and_rows_that_its_processor_gives_a_video(tmp_path: Path) -> None:
    whole = Whole(tiny_vlm.write(tmp_path, "qwen3_vl"))

    async def act(model: VisionLanguageModel) -> None:
        words, stream = model.family.vocabulary, await model.open("")
        for number in (0, 3):
            await show(stream, number, number / 2, (0, 3))
        said, _ = await ask(stream, "Which?", (0, 3))
        given = whole.inputs([picture(0), picture(3)])
        grids = given["image_grid_thw"]
        assert torch.equal(grids[0], grids[1])
        video = {"pixel_values_videos": given["pixel_values"], "video_grid_thw": grids[:1] * torch.tensor([2, 1, 1])}
        frames = "".join(whole.frame(0, picture(n)).replace("<0.0", f"<{n / 2:.1f}") for n in (0, 3))
        rows = words.control(whole.system() + whole.turn + frames.replace("image_pad", "video_pad"))
        rows += whole.question(words.plain("Which?"), words.control)
        expected = whole.answer(rows, video)
        assert same(words, said, expected)

    run(tmp_path, act)


def test_when_weights_are_int8_then_answers_come_and_mixtures_are_refused(folder: Path) -> None:
    async def act(model: VisionLanguageModel) -> tuple[str, int]:
        stream = await model.open("")
        await show(stream, 0, 0.0)
        said, done = await ask(stream, "What?", (0,))
        return said, done.completion_tokens

    if folder.name.startswith("qwen3_vl_moe"):
        # The weights of experts are not rounded. With "auto", the model is loaded in their dtype.
        with pytest.raises(ModelError, match="mixtures"):
            VisionLanguageModel(folder, "tiny", EngineModelOptions(weights="int8"))
        assert run(folder, act, weights="auto")[1]
    else:
        assert run(folder, act, weights="int8")[1]


def test_when_a_keys_pictures_wait_for_the_models_thread_then_another_keys_is_encoded_among_the_first(
    smolvlm: Path,
) -> None:
    async def waiting(model: VisionLanguageModel, count: int) -> None:
        while model.images.places.num_waiting < count:  # noqa: ASYNC110 - Places has no event for it.
            await asyncio.sleep(0.001)

    async def act(model: VisionLanguageModel) -> list[str]:
        order, gate = list[str](), threading.Event()

        async def encode(key: str) -> None:
            current_owner.set(key)
            image = EncodedImage(picture(0))
            image.overview()
            await model.encode_image(image)
            order.append(key)

        model.engine.thread.post(lambda: gate.wait(20))
        many = [asyncio.create_task(encode("a")) for _ in range(6)]
        await waiting(model, 6 - MAX_WAITING_CPU)
        one = asyncio.create_task(encode("b"))
        await waiting(model, 7 - MAX_WAITING_CPU)
        gate.set()
        await asyncio.gather(*many, one)
        return order

    assert "b" in run(smolvlm, act)[:4]


def test_when_one_of_several_pictures_is_no_image_then_it_fails_and_the_rows_of_the_others_are_the_same_to_the_bit(
    tmp_path: Path,
) -> None:
    files = []
    for number, size in enumerate(((64, 80), (80, 80), (48, 48))):
        file, pixels = io.BytesIO(), np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())

    async def act(model: VisionLanguageModel) -> None:
        shared = model.images = SharedPasses(model.engine.thread, model.family.encode, model.family.num_patches)
        damaged = [files[0], files[1][:200], *files[1:]]
        one, bad, *others = await shared.together([model.encode_image(EncodedImage(f)) for f in damaged], len(files))
        assert isinstance(bad, MediaError)
        expected = await shared.together([model.encode_image(EncodedImage(f)) for f in files], len(files))
        for found, same in zip((one, *others), expected, strict=True):
            assert torch.equal(found.rows, same.rows)
            assert found.positions == same.positions
        assert shared.passes == [len(files)] * 2

    run(tiny_vlm.write(tmp_path, "qwen2_5_vl"), act)


def test_smolvlm_pictures_in_one_pass_have_the_rows_that_each_has_alone(smolvlm: Path) -> None:
    family = SmolVlm(smolvlm, "cpu", torch.float64)
    given = [family.prepare(EncodedImage(picture(number)).pixels(SIDE)) for number in range(3)]
    for found, image in zip(family.encode(given), given, strict=True):
        (alone,) = family.encode([image])
        torch.testing.assert_close(found.rows, alone.rows, rtol=0.0, atol=1e-10)
        assert found.rows.untyped_storage().nbytes() == alone.rows.numel() * alone.rows.element_size()


def test_pictures_of_extreme_shapes_have_rows(folder: Path) -> None:
    async def act(model: VisionLanguageModel) -> list[int]:
        counts = []
        for size in ((1, 1), (1, 4000), (3000, 2), (2500, 1500)):
            file = io.BytesIO()
            Image.new("RGB", size, "red").save(file, "PNG")
            counts.append(len((await model.encode_image(EncodedImage(file.getvalue()))).rows))
        return counts

    assert all(1 <= count <= 64 for count in run(folder, act))


def test_when_a_checkpoint_or_an_image_is_wrong_then_the_error_says_so_and_the_engine_lives(
    tmp_path: Path, smolvlm: Path
) -> None:
    with pytest.raises(ModelError, match="does not load"):
        VisionLanguageModel(tmp_path, "none", EngineModelOptions())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="llama is not one of smolvlm, qwen2_5_vl"):
        VisionLanguageModel(tmp_path, "none", EngineModelOptions())

    async def act(model: VisionLanguageModel) -> None:
        stream = await model.open("")
        with pytest.raises(MediaError):
            await stream.append_frame(VideoFrame(0, 0.0, EncodedImage(b"nothing")))
        # The engine still works.
        await show(stream, 0, 0.0)
        assert (await ask(stream, "What?", (0,)))[1].completion_tokens

    run(smolvlm, act)
