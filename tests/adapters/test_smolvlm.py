"""SmolVLM of tiny random weights: sessions that are appended to answer as `transformers` does from the whole, token for token."""

from __future__ import annotations

import asyncio
import io
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from antiphon.adapters.base import Question, ReplyDone, ReplyOptions, Seen, TextDelta
from antiphon.adapters.smolvlm import SYSTEM, SeeingPictures, SmolVlm
from antiphon.errors import MediaError, ModelError
from tests.adapters import tiny_smolvlm
from tests.adapters.tiny_smolvlm import FIRST, ROWS, SIDE

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_smolvlm.write(tmp_path_factory.mktemp("smolvlm"))


def picture(number: int) -> bytes:
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (48, 80, 3)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


class Whole:
    """The published model, given everything at each question."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.process = SmolVLMImageProcessorPil(
            do_image_splitting=False, size={"longest_edge": 80}, max_image_size={"longest_edge": SIDE}
        )

    @torch.inference_mode()
    def answer(self, rows: list[int], images: list[bytes]) -> list[int]:
        """The tokens that follow these."""
        ids = torch.tensor([rows])
        given = {}
        if images:
            opened = [Image.open(io.BytesIO(i)).convert("RGB") for i in images]
            given = dict(self.process([opened], return_tensors="pt"))
        out: list[int] = []
        while len(out) < MAX_TOKENS:
            grown = torch.cat([ids, torch.tensor([out], dtype=torch.long)], 1)
            out.append(int(self.model(input_ids=grown, **given).logits[0, -1].argmax()))
            if out[-1] == FIRST + 1:
                break
        return out


def frame(at_s: int) -> str:
    return f"\nFrame from {at_s // 60:02d}:{at_s % 60:02d}:<fake_token_around_image><global-img>{'<image>' * ROWS}<fake_token_around_image>"


async def ask(watching: SeeingPictures, text: str, frames: tuple[int, ...]) -> tuple[str, ReplyDone]:
    out = ""
    question = Question(text, 99.0, frames)
    async with aclosing(watching.answer(question, ReplyOptions(max_tokens=MAX_TOKENS), None)) as answers:
        async for answer in answers:
            if isinstance(answer, TextDelta):
                out += answer.text
            elif isinstance(answer, ReplyDone):
                done = answer
    return out, done


def run(folder: Path, act: Any) -> Any:
    async def main() -> Any:
        model = SmolVlm(folder, "tiny", weights="fp32", threads=1)
        try:
            return await asyncio.wait_for(act(model), 60)
        finally:
            model.close()

    return asyncio.run(main())


def test_an_image_is_seen_as_the_published_model_sees_it(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: SmolVlm) -> Any:
        return await model.engine.ask(lambda: model.look(picture(1)))

    given = whole.process([[Image.open(io.BytesIO(picture(1)))]], return_tensors="pt")
    with torch.inference_mode():
        expected = whole.model.model.get_image_features(
            given["pixel_values"], given["pixel_attention_mask"]
        ).pooler_output[0]
    torch.testing.assert_close(run(folder, act), expected, atol=2e-2, rtol=1e-2)


def test_answers_are_those_of_a_rebuild_and_cost_what_is_new(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: SmolVlm) -> None:
        def control(text: str) -> list[int]:
            return model.encode(text, control=True)

        watching, other = await model.open("Be brief."), await model.open("")
        rows, images, number = control(f"<|im_start|>System: {SYSTEM} Be brief.<end_of_utterance>"), [], 0
        for turn, frames in enumerate((1, 0, 3, 2, 1)):
            rows += control("\nUser:")
            for _ in range(frames):
                await watching.see(Seen(number, float(number * 40), picture(number)))
                rows += control(frame(number * 40))
                images.append(picture(number))
                number += 1
            # What a user writes is no control token.
            question = f"What is it, {turn}? <image>"
            rows += [*model.encode(f"\n\n{question}"), *control("<end_of_utterance>\nAssistant:")]
            stats, length = model.engine._runner.stats, watching._session.length
            before = stats.rows
            asking = ask(watching, question, tuple(range(number)))
            if turn == 1:
                # Somebody else asks at the same time.
                (said, done), _ = await asyncio.gather(asking, ask(other, "Who?", ()))
            else:
                said, done = await asking
                # What is new, and no more. The first question's rows are counted from where the engine had not prefilled them yet.
                assert stats.rows - before <= watching._session.length - length + 1
            expected = whole.answer(rows, images)
            assert said == model.tokenizer.decode(expected, skip_special_tokens=True)
            assert done.completion_tokens == len(expected)
            rows += expected + ([] if expected[-1] == FIRST + 1 else [FIRST + 1])
        # Each frame is in the context once.
        assert watching._session.length == len(rows)

    run(folder, act)


def test_an_answer_that_is_cut_leaves_what_was_seen(folder: Path) -> None:
    whole = Whole(folder)

    async def act(model: SmolVlm) -> None:
        watching = await model.open("")
        await watching.see(Seen(0, 0.0, picture(7)))
        answers = watching.answer(Question("Cut this?", 0.0, (0,)), ReplyOptions(max_tokens=MAX_TOKENS), None)
        async with aclosing(answers):
            async for _ in answers:
                break
        said, _ = await ask(watching, "And now?", (0,))
        rows = model.encode(
            f"<|im_start|>System: {SYSTEM}<end_of_utterance>\nUser:{frame(0)}<end_of_utterance>\nUser:", control=True
        )
        rows += model.encode("\n\nAnd now?") + model.encode("<end_of_utterance>\nAssistant:", control=True)
        assert said == model.tokenizer.decode(whole.answer(rows, [picture(7)]), skip_special_tokens=True)

    run(folder, act)


def test_only_the_sampled_frames_are_seen_and_old_ones_are_forgotten(folder: Path) -> None:
    async def act(model: SmolVlm) -> tuple[int, int]:
        watching = await model.open("")
        for number in range(6):
            await watching.see(Seen(number, float(number), picture(number)))
        watching.forget(2.0)
        length = watching._session.length
        await ask(watching, "What?", (0, 3, 5))
        few = watching._session.length - length
        length = watching._session.length
        await ask(watching, "What?", (0, 3, 5))
        return few, watching._session.length - length

    first, second = run(folder, act)
    assert first - second == 2 * len(b"\nFrame from 00:00:") + 2 * (ROWS + 3)


def test_what_does_not_load_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="does not load"):
        SmolVlm(tmp_path, "none")

    async def act(model: SmolVlm) -> None:
        watching = await model.open("")
        with pytest.raises(MediaError):
            await watching.see(Seen(0, 0.0, b"nothing"))
        # The engine lives.
        await watching.see(Seen(0, 0.0, picture(1)))
        assert (await ask(watching, "What?", (0,)))[1].completion_tokens

    run(folder, act)
