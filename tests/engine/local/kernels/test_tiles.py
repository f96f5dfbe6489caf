"""The division of a step's rows into tiles, and the fusion of norms, which requires equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.engine.local.kernels.attention import has_kernels, is_paged_by_kernels, step_tiles
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.local.kv.cache import PAGE_ROWS
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.shape import KvShape
from antiphon.engine.local.step import StepChunk
from tests.engine.local import tiny

CPU = torch.device("cpu")


def chunk(pool: PagePool, start: int, count: int) -> StepChunk:
    nobody: Any = None
    table = pool.extend(None, start + count, 0, shared=False)
    return StepChunk(nobody, table, start, (1,) * count, None, (), 0)


def test_each_row_of_a_step_is_in_one_tile_at_its_place() -> None:
    pool = PagePool(KvShape(1, 2, 16, torch.float32, CPU), 20)
    chunks = [chunk(pool, 0, 70), chunk(pool, PAGE_ROWS + 3, 1), chunk(pool, 10, 17)]
    tiles = step_tiles(chunks, groups=8, device=CPU)
    found = sorted(
        (int(row) + i, int(session), int(position) + i)
        for session, row, count, position in zip(tiles.sessions, tiles.rows, tiles.counts, tiles.positions, strict=True)
        for i in range(int(count))
    )
    places = [(number, place) for number, c in enumerate(chunks) for place in range(c.start, c.stop)]
    assert found == [(row, number, place) for row, (number, place) in enumerate(places)]
    assert int(tiles.counts.max()) <= tiles.tile_rows == 8
    for (number, place), slot in zip(places, tiles.slots.tolist(), strict=True):
        page = int(tiles.table[number, place // PAGE_ROWS])
        assert page == chunks[number].handle.pages[place // PAGE_ROWS]
        assert slot == page * PAGE_ROWS + place % PAGE_ROWS


def test_a_step_of_one_row_each_has_tiles_of_one_row() -> None:
    pool = PagePool(KvShape(1, 2, 16, torch.float32, CPU), 20)
    assert step_tiles([chunk(pool, 5, 1), chunk(pool, 9, 1)], groups=4, device=CPU).tile_rows == 1


def test_a_cpu_has_no_kernels() -> None:
    assert not has_kernels(CPU)
    assert not is_paged_by_kernels(PagePool(KvShape(1, 2, 16, torch.float32, CPU), 2))


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("qwen2", True), ("gemma2", False)])
def test_norms_are_fused_where_the_logits_stay_what_they_were(family: str, fused: bool) -> None:
    model, reference = tiny.model(family), tiny.model(family)
    with torch.no_grad():
        for number, parameter in enumerate(p for n, p in model.named_parameters() if "norm" in n):
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) + 0.5)
        reference.load_state_dict(model.state_dict())
    assert bool(fuse_norms(model)) == fused
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits)
