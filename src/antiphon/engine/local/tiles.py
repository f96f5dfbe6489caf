"""The tiles of a step: groups of rows of one session, which attend together.

A step packs the rows of its sessions side by side. One program of the attention kernel serves one tile: a few rows of
one session and one key head. `Tiles` are tensors on the device; `lay_out` computes their numbers on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.engine.local.kv.cache import PAGE_ROWS, pages_of
from antiphon.engine.local.kv.shape import KvRange

Numbers = npt.NDArray[Any]


@dataclass(slots=True)
class Tiles:
    """The tiles of a step; all tensors are on the device."""

    # int32 [sessions, pages]: each session's pages.
    table: torch.Tensor
    # int32 [tiles]: each tile's session.
    sessions: torch.Tensor
    # int32 [tiles]: each tile's first row among the packed rows.
    rows: torch.Tensor
    # int32 [tiles]: each tile's number of rows; 0 for padding.
    counts: torch.Tensor
    # int32 [tiles]: the position of each tile's first row in its session.
    positions: torch.Tensor
    # int64 [rows]: the pool's row for each packed row.
    slots: torch.Tensor
    # The maximum number of rows in a tile.
    tile_rows: int
    # Whether every packed row is in a tile.
    covers: bool = True


@dataclass(slots=True)
class TileNumbers:
    """The numbers of a step's tiles, on the host."""

    # int32 [sessions, pages], padded with 0.
    table: Numbers
    # int32 [4, tiles]: sessions, rows, counts and positions, as in Tiles.
    numbers: Numbers
    # int64 [rows]: the pool's row for each packed row.
    slots: Numbers
    # The number of the last tile of each session.
    last: list[int]


def lay_out(ranges: Sequence[KvRange], tile_rows: int) -> TileNumbers:
    """Divide the rows of `ranges`, packed in this order, into tiles of up to `tile_rows` rows."""
    starts = np.fromiter((r.start for r in ranges), np.int64, len(ranges))
    counts = np.fromiter((r.count for r in ranges), np.int64, len(ranges))
    used = pages_of(int((starts + counts).max()))
    table = np.zeros((len(ranges), used), np.int32)
    for row, place in zip(table, ranges, strict=True):
        pages = place.handle.pages[:used]
        row[: len(pages)] = pages
    # The tiles of each session, and its first packed row.
    tiles, first = -(-counts // tile_rows), np.cumsum(counts) - counts
    last = np.cumsum(tiles) - 1
    sessions = np.repeat(np.arange(len(ranges)), tiles)
    offsets = (np.arange(len(sessions)) - (last - tiles + 1)[sessions]) * tile_rows
    numbers = np.stack(
        [
            sessions,
            first[sessions] + offsets,
            np.minimum(tile_rows, counts[sessions] - offsets),
            starts[sessions] + offsets,
        ]
    )
    owners = np.repeat(np.arange(len(ranges)), counts)
    places = np.arange(len(owners)) - (first - starts)[owners]
    slots = table[owners, places // PAGE_ROWS].astype(np.int64) * PAGE_ROWS + places % PAGE_ROWS
    return TileNumbers(table, numbers.astype(np.int32), slots, last.tolist())


def num_tiles(ranges: Sequence[KvRange], tile_rows: int) -> int:
    """Return the number of tiles that `lay_out` makes."""
    return sum(-(-r.count // tile_rows) for r in ranges)


def on_device(numbers: TileNumbers, tile_rows: int, device: torch.device) -> Tiles:
    """Return the tiles as new tensors, for one step."""
    # All numbers of the tiles are copied at once, because each copy costs the host time, whatever its size.
    sessions, rows, counts, positions = _copied(numbers.numbers, device)
    table, slots = _copied(numbers.table, device), _copied(numbers.slots, device)
    return Tiles(table, sessions, rows, counts, positions, slots, tile_rows)


class FixedTiles:
    """The tiles of a pass of fixed size, in tensors with fixed addresses. Must be filled before each pass.

    `rows`, `tiles`, `tile_rows`: the maximum numbers of rows, of tiles, and of rows in a tile. `columns`: the maximum
    number of pages of a session. Padding rows are written to the scratch page. `now`: the tensors. `last_rows`, int64
    [tiles]: the last row of each tile; row 0 for padding.
    """

    def __init__(self, rows: int, tiles: int, tile_rows: int, columns: int, device: torch.device) -> None:
        self._numbers = torch.zeros(4, tiles, dtype=torch.int32, device=device)
        self._places = torch.zeros(rows + tiles, dtype=torch.int64, device=device)
        table = torch.zeros(tiles, columns, dtype=torch.int32, device=device)
        # If each tile has one row, padding tiles have the padding rows. Otherwise a row may be in no tile.
        sessions, first_rows, counts, positions = self._numbers.unbind()
        self.now = Tiles(
            table, sessions, first_rows, counts, positions, self._places[:rows], tile_rows, covers=tile_rows == 1
        )
        self.last_rows = self._places[rows:]
        self._scratch = np.arange(rows) % PAGE_ROWS
        first = np.minimum(np.arange(tiles) * tile_rows, rows)
        used = np.clip(rows - first, 0, tile_rows)
        # The numbers of padding: each tile has its own rows, which are at position 0 of the scratch page.
        self._padding = np.stack([np.arange(tiles), np.minimum(first, rows - 1), used, first * 0])
        self._set(self._padding, self._scratch)

    def fill(self, ranges: Sequence[KvRange]) -> TileNumbers:
        """Set the tensors for the next pass, and return their numbers, with padding tiles but without padding rows."""
        made = lay_out(ranges, self.now.tile_rows)
        used = made.numbers.shape[1]
        numbers = self._padding.copy() if self.now.covers else np.zeros_like(self._padding)
        numbers[:, :used] = made.numbers
        slots = self._scratch.copy()
        slots[: len(made.slots)] = made.slots
        sessions, columns = made.table.shape
        self.now.table[:sessions, :columns].copy_(torch.from_numpy(made.table), non_blocking=True)
        self._set(numbers, slots)
        return replace(made, numbers=numbers)

    def _set(self, numbers: Numbers, slots: Numbers) -> None:
        last = numbers[1] + np.maximum(numbers[2] - 1, 0)
        self._numbers.copy_(torch.from_numpy(numbers), non_blocking=True)
        self._places.copy_(torch.from_numpy(np.concatenate([slots, last])), non_blocking=True)


def _copied(numbers: Numbers, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True)
