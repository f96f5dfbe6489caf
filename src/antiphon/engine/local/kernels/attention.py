"""The attention of a step over a PagePool on a CUDA device: one call for each layer, for any sessions and rows."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType

import torch

from antiphon.engine.local.attention import Scoring
from antiphon.engine.local.kv.cache import PAGE_ROWS
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.shape import KvRange
from antiphon.engine.local.tiles import FixedTiles, Tiles, lay_out, on_device

log = logging.getLogger(__name__)

# The number of rows in one program's matrix product: a tile's query rows times the query heads of a key head. Triton's
# matrix products need at least LEAST_ROWS rows.
TILE_ROWS, LEAST_ROWS = 64, 16
# The number of programs that keeps a multiprocessor busy, and the maximum number of shares of a tile's keys.
PROGRAMS_A_PROCESSOR, MOST_SHARES = 4, 32


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("antiphon.engine.local.kernels.paged")


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device. This is tried once; if they do not run, the log says why."""
    if device.type != "cuda":
        return False
    try:
        row, one = torch.ones(1, 1, 16, device=device), torch.ones(1, dtype=torch.int32, device=device)
        rows = torch.zeros(2, PAGE_ROWS, 1, 16, device=device)
        tiles = Tiles(one[:, None] - 1, one - 1, one - 1, one, one - 1, one.long() - 1, 1)
        store_rows(rows, tiles.slots, row, row)
        # A row that only sees itself gets its own values.
        return all(bool((attend_pages(rows, tiles, row, Scoring(), shares) == row).all()) for shares in (1, 2))
    except Exception as error:
        # Triton compiles for the current device with the machine's compiler. Either may be missing.
        log.warning("no attention kernels, steps gather their pages: %s: %s", type(error).__name__, error)
        return False


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 for a CPU, where kernels are only interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def is_paged_by_kernels(pool: object) -> bool:
    """Return whether a storage is a PagePool on a device that runs the kernels in this module."""
    return isinstance(pool, PagePool) and has_kernels(pool.rows.device)


class PagedAttention:
    """Attends all rows of a step to the pages of their own sessions. A StepAttention.

    `longest`: the number of pages of the longest session. It limits the number of programs that divide its keys.
    `expected`: the number of tiles with many keys to expect; None: all.
    """

    def __init__(self, pool: PagePool, tiles: Tiles, longest: int, expected: int | None = None) -> None:
        self._pool, self._tiles, self._longest = pool, tiles, longest
        self._expected = expected or len(tiles.rows)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and return each row's attention output; shapes as in StepAttention."""
        tiles, rows = self._tiles, self._pool.rows[layer]
        store_rows(rows, tiles.slots, keys, values)
        return attend_pages(rows, tiles, query, scoring, self._shares(keys.shape[1]))

    def _shares(self, kv_heads: int) -> int:
        """The number of programs that divide the keys of a tile: a power of two, enough to keep the device busy."""
        device = self._pool.rows.device
        wanted = PROGRAMS_A_PROCESSOR * processors(device) // (self._expected * kv_heads)
        most = max(1, min(wanted, self._longest, MOST_SHARES))
        return 1 << (most.bit_length() - 1)


class FixedPages(PagedAttention):
    """PagedAttention for a pass of fixed size: see FixedTiles. A session of any length fits."""

    def __init__(self, pool: PagePool, rows: int, tiles: int, tile_rows: int) -> None:
        self.fixed = FixedTiles(rows, tiles, tile_rows, pool.num_pages, pool.rows.device)
        # Most tiles of a pass with prefill have one row, or are padding.
        super().__init__(pool, self.fixed.now, pool.num_pages, max(1, rows // tile_rows))

    def fill(self, ranges: Sequence[KvRange]) -> list[int]:
        """Set the tensors for the next pass, and return the number of each session's last tile."""
        return self.fixed.fill(ranges).last

    def begin(self) -> None:
        """A no-op: no state is kept from the previous pass."""


def rows_of_tile(groups: int) -> int:
    """Return the maximum number of rows of a tile. `groups`: query heads for each key head."""
    return max(1, TILE_ROWS // groups)


def step_tiles(ranges: Sequence[KvRange], groups: int, device: torch.device) -> Tiles:
    """Return the tiles of a step with rows packed in the order of `ranges`. `groups`: query heads for each key head."""
    tile_rows = rows_of_tile(groups) if max(r.count for r in ranges) > 1 else 1
    return on_device(lay_out(ranges, tile_rows), tile_rows, device)


def store_rows(rows: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store keys and values [n, kv_heads, head_dim] of a layer in `rows` at `slots`, as PagePool.write does."""
    keys, values = (each if each[0].is_contiguous() else each.contiguous() for each in (keys, values))
    width = keys.shape[1] * keys.shape[2]
    with _current(rows.device):
        _kernels().store_rows[(len(keys),)](
            keys, values, slots, rows, keys.stride(0), values.stride(0), rows.stride(1), rows.stride(0), width,
            _power_of_two(width),
        )  # fmt: skip


def attend_pages(rows: torch.Tensor, tiles: Tiles, query: torch.Tensor, scoring: Scoring, shares: int) -> torch.Tensor:
    """Return the attention output of each row of `query` [n, heads, head_dim] over its own session's rows.

    `rows` [2, pages * PAGE_ROWS, kv_heads, head_dim]: a layer's keys and values. `shares`: the number of programs that
    divide a tile's keys, a power of two. The result has the shape and type of `query`.
    """
    kernels = _kernels()
    count, heads, width = query.shape
    kv_heads = rows.shape[2]
    groups = heads // kv_heads
    given = query.to(rows.dtype)
    given = given if given[0].is_contiguous() else given.contiguous()
    out = query.new_empty(query.shape) if tiles.covers else query.new_zeros(query.shape)
    part = query.new_empty((shares, count, heads, width) if shares > 1 else (1,), dtype=torch.float32)
    top, total = query.new_empty((2, shares, count, heads), dtype=torch.float32)
    scale = scoring.scaling if scoring.scaling is not None else width**-0.5
    with _current(rows.device):
        kernels.attend_pages[(len(tiles.rows), kv_heads, shares)](
            given, rows, tiles.table, tiles.sessions, tiles.rows, tiles.counts, tiles.positions, out, part, top, total,
            scale, scoring.softcap or 1.0, scoring.window, given.stride(0), rows.stride(1), rows.stride(0),
            tiles.table.stride(0), count, heads, shares,
            GROUPS=groups, HEAD_DIM=width, BLOCK_D=max(16, _power_of_two(width)),
            BLOCK_M=max(LEAST_ROWS, _power_of_two(tiles.tile_rows * groups)), PAGE=PAGE_ROWS, SHARED=shares > 1,
            SOFTCAP=scoring.softcap is not None, WINDOW=scoring.window > 0, WHOLE=scoring.whole,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        if shares > 1:
            kernels.add_shares[(count, heads)](
                part, top, total, out, count, heads, shares,
                HEAD_DIM=width, BLOCK_D=max(16, _power_of_two(width)), MOST=MOST_SHARES,
            )  # fmt: skip
    return out


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current, because Triton launches on the current device rather than on the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
