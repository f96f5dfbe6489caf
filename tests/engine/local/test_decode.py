"""Decode steps of fixed sizes: their padding, and their independence of the tensors' values."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from antiphon.engine.api import EMBEDDED, EngineSettings, Sampling
from antiphon.engine.local.decode import PassShape, PassShapes, PassSize
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.kv.cache import PAGE_ROWS
from antiphon.engine.local.kv.page_pool import PagePool, PageTable
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.step import StepChunk
from antiphon.errors import ModelError
from tests.engine.local import tiny
from tests.engine.local.operators import Operators
from tests.engine.local.tiny import FAMILIES, WIDTH

torch.set_num_threads(1)
PAGED = EngineSettings(kv_bytes=4 << 20, kv_layout="paged")


def pool_of(runner: Runner) -> PagePool:
    storage = runner.storage(PAGED)
    assert isinstance(storage, PagePool)
    return storage


def chunk(table: PageTable, start: int, count: int = 1) -> StepChunk:
    """Rows of a session; the session itself does not matter here."""
    nobody: Any = None
    return StepChunk(nobody, table, start, (1,) * count, None, (), 0)


def shapes_of(runner: Runner, pool: PagePool, *, sessions: int = 8, rows: int = 128) -> PassShapes:
    return PassShapes(runner.decoder_pass, pool, 1, 2, sessions, rows, capture=False)


@pytest.mark.parametrize("size", [PassSize(4, 4, 1, 2), PassSize(40, 4, 16, 2)], ids=["decode", "prefill"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_pass_makes_no_choice_by_what_a_tensor_holds(family: str, size: PassSize) -> None:
    """Fake tensors have shapes but no values: reading a value raises. So the host never waits for the device."""
    runner = Runner(tiny.model(family))
    shape = PassShape(runner.decoder_pass, pool_of(runner), torch.zeros(1, 4, WIDTH), 1, size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits, hidden, _ = shape.compute()
    assert logits.shape == (4, tiny.VOCABULARY)
    assert hidden is not None
    assert hidden.shape == (4, WIDTH)


@torch.inference_mode()
def test_steps_are_padded_to_powers_of_two_of_sessions_and_pages() -> None:
    runner = Runner(tiny.model("qwen3"))
    pool = pool_of(runner)
    shapes = shapes_of(runner, pool)
    tables = [pool.extend(None, 4 * PAGE_ROWS, 0, shared=False) for _ in range(5)]
    found = []
    for count, start in ((1, 3), (3, 3), (4, PAGE_ROWS), (5, 2 * PAGE_ROWS), (5, 3 * PAGE_ROWS + 1)):
        size = shapes.size([chunk(t, start) for t in tables[:count]])
        assert size
        found.append((size.rows, size.tiles, size.tile_rows, size.pages))
    assert found == [(1, 1, 1, 1), (4, 4, 1, 1), (4, 4, 1, 2), (8, 8, 1, 4), (8, 8, 1, 4)]


def test_a_step_with_prefill_gets_the_smallest_size_that_has_its_rows_and_tiles() -> None:
    runner = Runner(tiny.model("qwen3"))
    pool = pool_of(runner)
    shapes = shapes_of(runner, pool, sessions=8, rows=120)
    tables = [pool.extend(None, 2 * PAGE_ROWS, 0, shared=False) for _ in range(9)]

    def size(*counts: int) -> PassSize | None:
        return shapes.size([chunk(t, 0, count) for t, count in zip(tables, counts, strict=False)])

    # A tile has 32 rows at two query heads for each key head, and each of 8 sessions may add one.
    assert size(2) == size(5, 1, 1, 1) == size(2, *[1] * 7) == PassSize(16, 9, 32, 1)
    assert size(17, 1) == PassSize(32, 9, 32, 1)
    # Nine tiles with nine sessions; the tenth tile needs a larger size.
    assert size(33, *[1] * 7) == PassSize(64, 10, 32, 1)
    assert size(2, 2, 2, 2, 2, 2, 2, 2, 2) == PassSize(32, 9, 32, 1)
    assert size(90, 30) == PassSize(120, 12, 32, 2)
    assert size(90, 31) is None
    # Without kernels, too many pages would be gathered.
    assert shapes.size([chunk(tables[0], 200 * PAGE_ROWS - 2, 2)]) is None


@torch.inference_mode()
def test_padding_changes_no_bit_of_a_sessions_row() -> None:
    """Neither the padding rows of the previous step nor the contents of the scratch page matter."""
    runner = Runner(tiny.model("qwen3"))
    pool = pool_of(runner)
    shapes = shapes_of(runner, pool)
    tables = [pool.extend(None, PAGE_ROWS, 0, shared=False) for _ in range(4)]
    rows = torch.randn(1, 12, WIDTH, generator=torch.Generator().manual_seed(1))
    positions = torch.zeros(1, 12, dtype=torch.long)
    for counts, more in (([1, 1, 1], [1, 1, 1, 1]), ([5, 1, 3], [2, 2, 2, 6])):
        few, many = ([chunk(t, 0, n) for t, n in zip(tables, each, strict=False)] for each in (counts, more))
        size, total = shapes.size(few), sum(counts)
        assert size
        assert size == shapes.size(many)

        def run(chunks: list[StepChunk], rows: torch.Tensor, size: PassSize = size) -> torch.Tensor:
            output, last = shapes.run(size, rows, positions[:, : rows.shape[1]], chunks)
            return output.logits[last].clone()

        before = run(few, rows[:, :total])
        run(many, rows[:, : sum(more)] * 9)
        assert torch.equal(before, run(few, rows[:, :total]))


def test_rows_that_are_not_numbers_harm_no_session_that_gets_their_page() -> None:
    async def main() -> None:
        room = EngineSettings(kv_bytes=3 * PAGE_ROWS * 3 * 2 * 2 * 16 * 4, kv_layout="paged", decode_shapes="bucketed")
        e, reference = LocalEngine(Runner(tiny.model("qwen3")), room), tiny.model("qwen3")
        bad = await e.open(PAGE_ROWS)
        bad.append([1])
        bad.append_embeddings(torch.full((40, WIDTH), float("nan")))
        with pytest.raises(ModelError, match="not a number"):
            _ = [t async for t in bad.generate(Sampling(max_tokens=3))]
        bad.close()
        good = [await e.open(PAGE_ROWS) for _ in range(3)]
        for session in good:
            session.append([5, 6])
            found = [t.id async for t in session.generate(Sampling(max_tokens=4))]
            expected = [5, 6]
            for _ in range(4):
                expected.append(int(tiny.logits(reference, expected)[-1].argmax()))
            assert found == expected[2:]
        e.close()

    asyncio.run(main())


def test_captured_steps_are_refused_without_a_cuda_device() -> None:
    settings = EngineSettings(kv_bytes=4 << 20, kv_layout="paged", decode_shapes="captured")
    with pytest.raises(ModelError, match="CUDA"):
        LocalEngine(Runner(tiny.model("qwen3")), settings)


def test_padded_steps_need_pages() -> None:
    with pytest.raises(ValueError, match="paged"):
        EngineSettings(decode_shapes="bucketed", kv_layout="session")


@pytest.mark.parametrize(
    ("given", "device", "found"),
    [
        ({}, "cpu", ("session", "exact")),
        ({}, "cuda", ("paged", "captured")),
        ({"kv_layout": "session"}, "cuda", ("session", "exact")),
        ({"kv_layout": "paged"}, "cpu", ("paged", "exact")),
        ({"decode_shapes": "bucketed"}, "cpu", ("paged", "bucketed")),
        ({"decode_shapes": "exact"}, "cuda", ("paged", "exact")),
    ],
)
def test_the_layout_follows_the_device(given: dict[str, Any], device: str, found: tuple[str, str]) -> None:
    assert EngineSettings(**given).kv_on(device) == found


def test_log_probabilities_of_tokens_drawn_on_the_device_are_the_models_own() -> None:
    async def said(shapes: Any) -> list[Any]:
        e = LocalEngine(Runner(tiny.model("qwen3")), EngineSettings(kv_bytes=4 << 20, decode_shapes=shapes))
        session = await e.open()
        session.append([5, 6])
        found = [t async for t in session.generate(Sampling(max_tokens=6, temperature=0.8, seed=3, logprobs=True))]
        e.close()
        return found

    exact, padded = (asyncio.run(said(shapes)) for shapes in ("exact", "bucketed"))
    assert [t.id for t in padded] == [t.id for t in exact]
    assert [t.logprob for t in padded] == pytest.approx([t.logprob for t in exact], abs=1e-5)
    assert all(t.logprob < 0 for t in padded)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 31, 32, 33, 47, 200])
def test_tokens_do_not_depend_on_how_prefill_is_split_over_steps(rows: int) -> None:
    """Sessions join while others generate, so that passes have every mixture of one row and of tiles."""
    reference, chance = tiny.model("qwen3"), random.Random(rows)
    prompts = [[chance.randrange(tiny.VOCABULARY) for _ in range(count)] for count in (3, 90, 40, 33, 64, 1)]

    async def main() -> None:
        limits = EngineSettings(
            kv_bytes=4 << 20, decode_shapes="bucketed", decode_rows=4, prefill_rows=rows, prefill_only_rows=rows
        )
        e = LocalEngine(Runner(tiny.model("qwen3")), limits)

        async def say(number: int) -> None:
            session = await e.open()
            for _ in range(3 * number):
                await asyncio.sleep(0)
            session.append(prompts[number])
            found = [t.id async for t in session.generate(Sampling(max_tokens=5))]
            ids = list(prompts[number])
            for token in found:
                assert token == int(tiny.logits(reference, ids)[-1].argmax())
                ids.append(token)

        await asyncio.gather(*(say(number) for number in range(len(prompts))))
        e.close()

    asyncio.run(main())


class Watched(Runner):
    """A runner that calls `after` with the number of each step."""

    after: Callable[[int], None]

    def launch(self, chunks: Sequence[StepChunk]) -> Any:
        launched = super().launch(chunks)
        self.after(self.stats.steps)
        return launched


def test_a_session_may_leave_between_two_tiles_of_its_prompt() -> None:
    reference, ids = tiny.model("qwen3"), [5, 6]

    async def main() -> None:
        runner = Watched(tiny.model("qwen3"))
        e = LocalEngine(
            runner, EngineSettings(kv_bytes=4 << 20, decode_shapes="bucketed", prefill_rows=16, prefill_only_rows=16)
        )
        stays, leaver = await e.open(), await e.open()
        computed: list[int] = []

        def leave(step: int) -> None:
            if step == 4:
                computed.append(leaver.scheduled.rows.computed)
                e.scheduler.close(leaver.scheduled, keep=False)

        runner.after = leave
        leaver.append([n % tiny.VOCABULARY for n in range(200)])
        stays.append(ids)
        async for token in stays.generate(Sampling(max_tokens=8)):
            assert token.id == int(tiny.logits(reference, ids)[-1].argmax())
            ids.append(token.id)
        assert len(ids) == 10
        assert 0 < computed[0] < 199
        await e.thread.call(e.scheduler.check_integrity)
        e.close()

    asyncio.run(main())


@torch.inference_mode()
def test_a_step_has_the_same_operators_for_one_and_for_many_sessions() -> None:
    """The operators that the host launches, outside and inside of the pass, for prefill of token and embedding rows."""
    runner = Runner(tiny.model("qwen3"))
    storage = runner.storage(EngineSettings(kv_bytes=4 << 20, decode_shapes="bucketed", decode_rows=8, prefill_rows=64))
    assert isinstance(storage, PagePool)
    nobody: Any = None

    def operators(count: int) -> list[str]:
        chunks = []
        for _ in range(count):
            embeddings = ((0, torch.randn(2, WIDTH)), (3, torch.randn(1, WIDTH)))
            ids, table = (EMBEDDED, EMBEDDED, 5, EMBEDDED), storage.extend(None, PAGE_ROWS, 0, shared=False)
            chunks.append(StepChunk(nobody, table, 0, ids, None, embeddings, 0))
        # The first step of a size makes its tensors.
        runner.step(chunks)
        with Operators() as recorded:
            assert runner.step(chunks) == [None] * count
        return recorded.names

    assert operators(2) == operators(1) == operators(6)
    assert len(operators(1)) > 50
