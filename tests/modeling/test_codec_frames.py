"""Frames that are computed within the engine's steps, and the text that they read meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.adapters.qwen3_tts.prompt import TalkerPrompt
from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import VoiceOptions
from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.codec.frames import (
    TEXT_TOKENS_AHEAD,
    FrameProgram,
    TextFeed,
    TextRows,
    TokenPieces,
)
from antiphon.modeling.codec.talker import CodecSampling
from tests.adapters import tiny_qwen3_tts as tiny
from tests.engine.local.operators import Operators
from tests.modeling.reference_frames import reference_frames

LAYOUTS = {
    "exact": EngineSettings(),
    "bucketed": EngineSettings(kv_bytes=32 << 20, kv_layout="paged", decode_shapes="bucketed"),
}
WORDS = ["Some", "say", "the", "world", "will", "end", "in", "fire", "and", "some", "say", "in", "ice"]
EOS, PAD = 1, 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tts"))


def run(folder: Path, act: Any, settings: EngineSettings = LAYOUTS["exact"]) -> Any:
    async def main() -> Any:
        model = Qwen3Tts(folder, "tiny", EngineModelOptions(settings, threads=1, weights="fp32"))
        try:
            return await asyncio.wait_for(act(model), 120)
        finally:
            model.close()

    return asyncio.run(main())


def seeded(sampling: CodecSampling, seed: int) -> CodecSampling:
    first, rest = replace(sampling.first, seed=seed), replace(sampling.rest, seed=seed + 1)
    return replace(sampling, first=first, rest=rest)


async def one_after_another(model: Qwen3Tts, ids: list[int], seed: int, count: int) -> list[list[int]]:
    """Return the reference's frames of a text. Each text token is passed with its frame."""
    session, special = await model.engine.open(512), model.parts.special_ids
    rows, left = await model.prompt_rows(ids, TalkerPrompt("ada", "en", whole=False))
    assert left is not None
    session.append_embeddings(rows)
    texts = itertools.chain([*left, special.text_eos], itertools.repeat(special.text_pad))

    def next_text() -> torch.Tensor:
        parts = model.parts
        return parts.text_projection(parts.text_embedding(torch.tensor([next(texts)])))[0]

    with torch.inference_mode():
        sampling = seeded(model.parts.sampling, seed)
        frames = [f async for f in reference_frames(model, session, next_text, sampling, count)]
    session.close()
    return frames


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_joins_leaves_and_waits_frames_are_those_made_one_after_another(folder: Path, layout: str) -> None:
    async def act(model: Qwen3Tts) -> None:
        drawn, vocabulary = random.Random(7), model.parts.vocabulary
        prompt = TalkerPrompt("ada", "en", whole=False)
        wanted = dict[tuple[str, int], list[list[int]]]()
        texts = [" ".join(drawn.sample(WORDS, drawn.randint(2, 9))) for _ in range(12)]
        for seed, text in enumerate(texts):
            wanted[text, seed] = await one_after_another(model, vocabulary.plain(text), seed, 30)

        async def spoken(text: str, seed: int) -> None:
            # Some texts wait before they join, some wait for words, and some leave before their end.
            for _ in range(drawn.randint(0, 40)):
                await asyncio.sleep(0)
            ids, more, leaves = vocabulary.plain(text), None, drawn.choice((30, 30, drawn.randint(1, 20)))
            if drawn.random() < 0.5:
                cut = drawn.randint(1, len(ids))
                ids, later = ids[:cut], ids[cut:]

                async def written() -> AsyncIterator[list[int]]:
                    for token in later:
                        for _ in range(drawn.randint(0, 30)):
                            await asyncio.sleep(0)
                        yield [token]

                more = TokenPieces(written())
            found = list[list[int]]()
            made = model.frames(ids, more, prompt, seeded(model.parts.sampling, seed), 30)
            async with aclosing(made) as frames:
                async for frame in frames:
                    found.append(frame)
                    if len(found) == leaves:
                        break
            if more is not None:
                await more.aclose()
            assert found == wanted[text, seed][:leaves]

        async with asyncio.TaskGroup() as group:
            for seed, text in [*enumerate(texts), *enumerate(texts)]:
                group.create_task(spoken(text, seed))
        assert (await model.engine.state()).sessions == 0

    run(folder, act, LAYOUTS[layout])


def test_a_step_makes_one_frame_of_every_text_and_needs_no_event_loop_for_it(folder: Path) -> None:
    async def act(model: Qwen3Tts) -> tuple[list[int], int]:
        async def spoken(seed: int) -> int:
            made = model.frames(
                model.parts.vocabulary.plain("Some say"),
                None,
                TalkerPrompt("ada", "en"),
                replace(seeded(model.parts.sampling, seed), min_frames=40),
                40,
            )
            count = 0
            async for _ in made:
                count += 1
            return count

        # The first text also computes the row of the padding.
        await spoken(0)
        before = model.engine.runner.stats.steps
        counts = await asyncio.gather(*(spoken(seed) for seed in range(8)))
        return counts, model.engine.runner.stats.steps - before

    counts, steps = run(folder, act, LAYOUTS["bucketed"])
    assert counts == [40] * 8
    # There is one step for each frame, and a few more in which the texts join.
    assert 40 <= steps <= 40 + 8


def test_one_more_text_adds_no_operator_to_a_frame(folder: Path) -> None:
    async def act(model: Qwen3Tts) -> list[list[str]]:
        parts, size = model.parts, int(model.parts.decoder.config.vocab_size)
        found = list[list[str]]()
        for count in (1, 64):
            sampling = [seeded(parts.sampling, seed) for seed in range(count)]
            programs = [FrameProgram(model.frame_maker, s, parts.special_ids.end, size) for s in sampling]
            width = int(parts.decoder.config.hidden_size)
            for program in programs:
                program.give([torch.zeros(1, width)] * 3)
            for step in range(3):
                logits, hidden = torch.randn(count, size), torch.randn(count, width)
                with Operators() as operators, torch.inference_mode():
                    chosen = FrameProgram.run(programs, logits, hidden)
                    rows = [p.next_row() for p, n in zip(programs, chosen.tolist(), strict=True) if p.accept(n) >= 0]
                assert len(rows) == count
                if step == 2:
                    found.append(operators.names)
        return found

    one, many = run(folder, act)
    assert one == many


# --- the text -----------------------------------------------------------------------------------------------------


def taken(program: FrameProgram) -> int | None:
    """Return the text token of the next frame; None if the frame waits. A token's row must be its number."""
    program.row, program.row_has_text = torch.zeros(1, 1), False
    row = program.next_row()
    return None if row is None else int(row)


def program() -> FrameProgram:
    nobody: Any = None
    return FrameProgram(nobody, CodecSampling(Sampling(seed=1), Sampling(seed=1)), 5, 2000)


class Text:
    """A feed in which a token's row is its number. `asked`: the tokens of each call that computed rows."""

    def __init__(self, ids: Sequence[int] | None, more: AsyncIterator[list[int]] | None = None) -> None:
        self.asked, self.thread = list[list[int]](), ModelThread("test")
        self.rows = TextRows(self.thread, self._rows, EOS, PAD)
        self.pieces = None if more is None else TokenPieces(more)
        self.feed, self.program = TextFeed(self.rows, ids, self.pieces), program()
        self.task = self.feed.start(self.program)

    def _rows(self, ids: Sequence[int]) -> torch.Tensor:
        self.asked.append(list(ids))
        return torch.tensor(ids)[:, None].float()

    async def frame(self) -> int:
        """Read the next frame, and return its text token."""
        while (token := taken(self.program)) is None:  # noqa: ASYNC110 - rows come from a thread.
            await asyncio.sleep(0.001)
        self.feed.read_frame()
        return token

    async def close(self) -> None:
        if self.task:
            await self.task
        if self.pieces:
            await self.pieces.aclose()
        self.thread.close()


async def words(*pieces: list[int]) -> AsyncIterator[list[int]]:
    for piece in pieces:
        yield piece


def test_frames_take_the_tokens_in_order_then_the_end_then_padding() -> None:
    async def act(ids: list[int] | None, more: AsyncIterator[list[int]] | None, count: int) -> list[int]:
        text = Text(ids, more)
        found = [await text.frame() for _ in range(count)]
        await text.close()
        return found

    tokens = [*range(10, 28)]
    assert asyncio.run(act(tokens, words([31, 32], [33], [34, 35, 36]), 27)) == [*tokens, *range(31, 37), 1, 0, 0]
    assert asyncio.run(act(tokens, None, 20)) == [*tokens, 1, 0]
    # The end token may be among the tokens, or already in the session.
    assert asyncio.run(act([10, 1], None, 4)) == [10, 1, 0, 0]
    assert asyncio.run(act(None, None, 2)) == [0, 0]


def test_the_row_of_padding_is_made_once_for_all_texts() -> None:
    async def act() -> list[list[int]]:
        text = Text(None)
        await text.frame()
        another = program()
        assert TextFeed(text.rows, None).start(another) is None
        assert taken(another) == PAD
        await text.close()
        return text.asked

    assert asyncio.run(act()) == [[PAD]]


def test_words_are_read_only_a_little_ahead_of_the_frames() -> None:
    async def act() -> None:
        read = list[int]()

        async def written() -> AsyncIterator[list[int]]:
            for number in range(10, 40):
                read.append(number)
                yield [number]

        text = Text([5], written())
        for taken, expected in enumerate((5, *range(10, 40), EOS, PAD)):
            assert await text.frame() == expected
            # The tokens that were used, the tokens that are ready, and one more that was read.
            assert len(read) <= taken + TEXT_TOKENS_AHEAD + 1
        await text.close()

    asyncio.run(act())


def test_words_that_no_frame_took_are_given_back_whole() -> None:
    async def act(num_frames: int) -> list[list[int]]:
        text = Text([5], words([10, 11], [12], [13, 14], [15]))
        for _ in range(num_frames):
            await text.frame()
        assert text.task
        text.task.cancel()
        await asyncio.wait([text.task])
        text.feed.give_back(text.program.num_taken)
        assert text.pieces
        left = [piece async for piece in text.pieces]
        text.task = None
        await text.close()
        return left

    assert asyncio.run(act(1)) == [[10, 11], [12], [13, 14], [15]]
    # A word that has begun is not repeated.
    assert asyncio.run(act(2)) == [[12], [13, 14], [15]]
    assert asyncio.run(act(3)) == [[12], [13, 14], [15]]
    assert asyncio.run(act(4)) == [[13, 14], [15]]


def test_a_piece_that_a_cancelled_reader_asked_for_is_the_next_ones() -> None:
    async def act() -> None:
        gate, closed = asyncio.Event(), list[bool]()

        async def written() -> AsyncIterator[list[int]]:
            try:
                await gate.wait()
                yield [1]
                yield [2]
                raise ModelError("the writer failed")
            finally:
                closed.append(True)

        pieces = TokenPieces(written())
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        gate.set()
        assert await anext(pieces) == [1]
        assert await anext(pieces) == [2]
        for _ in range(2):
            with pytest.raises(ModelError, match="writer"):
                await anext(pieces)
        await pieces.aclose()
        assert closed

    asyncio.run(act())


def test_when_the_writer_fails_then_the_text_that_waits_for_it_fails(folder: Path) -> None:
    async def act(model: Qwen3Tts) -> None:
        async def written() -> AsyncIterator[list[int]]:
            yield [70]
            raise ModelError("the writer failed")

        more, found = TokenPieces(written()), list[list[int]]()
        made = model.frames([65], more, TalkerPrompt("ada", "en", whole=False), model.parts.sampling)
        with pytest.raises(ModelError, match="the writer failed"):
            async for frame in made:
                found.append(frame)
        await more.aclose()
        assert (await model.engine.state()).sessions == 0

    run(folder, act)


def test_when_the_audio_ends_before_the_text_then_the_rest_is_spoken_as_another(folder: Path) -> None:
    async def act(model: Qwen3Tts) -> None:
        given = list[list[int]]()
        frames = model.frames

        async def short(ids: Sequence[int], more: Any, prompt: Any, sampling: Any, most: int | None = None) -> Any:
            given.append(list(ids))
            async for frame in frames(ids, more, prompt, sampling, 2):
                yield frame

        model.frames = short

        async def written() -> AsyncIterator[str]:
            for word in WORDS[:9]:
                yield f" {word}"

        async for _ in model.speak_live(written(), VoiceOptions("ada", language="en")):
            pass
        tokens = [model.parts.vocabulary.plain(f" {word}") for word in WORDS[:9]]
        # Each word is spoken once, or had begun when the audio ended.
        assert given[0] == tokens[0]
        assert all(ids in tokens for ids in given)
        assert len(given) > 2
        assert [tokens.index(ids) for ids in given] == sorted({tokens.index(ids) for ids in given})

    run(folder, act)
