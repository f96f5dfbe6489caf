"""Passes of a few fixed sizes: the same kernels run in every step, whatever its sessions and rows.

A step's rows are packed side by side and padded to the next size. One call of the attention kernel serves all tiles of
rows, over the pages of their sessions. A pass does not depend on any tensor's values, so the host never waits for the
device within a step, and a CUDA device can replay the pass as one graph. A step in which every session has one row has
sizes of its own, without tiles of several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from antiphon.engine.local.attention import Scoring, StepAttention, weighted_values
from antiphon.engine.local.kernels.attention import FixedPages, is_paged_by_kernels, rows_of_tile
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs, power_of_two, warmed_sizes
from antiphon.engine.local.kv.cache import PAGE_ROWS, pages_of
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.shape import KvRange
from antiphon.engine.local.tiles import FixedTiles, num_tiles

# The smallest number of rows of a pass with prefill.
LEAST_ROWS = 16
# Without kernels, the pages of each tile are gathered side by side. Limit of their number in a pass.
MOST_GATHERED_PAGES = 1024


class PassOutput(NamedTuple):
    """The output of a pass: for the rows whose logits are wanted, in their order, and for all rows."""

    # [n, vocabulary].
    logits: torch.Tensor
    # The last hidden states [n, width]; None if the model does not expose them.
    hidden: torch.Tensor | None
    # The output of the tapped layer for all rows, [rows, width]; None if no layer is tapped.
    tapped: torch.Tensor | None


# One pass of the decoder. Takes input rows [1, n, width], positions [1, n] or [3, 1, n], the rows whose logits are
# wanted, int64 [n], and the step's attention.
DecoderPass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAttention], PassOutput]


class PassSize(NamedTuple):
    """The size of a pass: the maximum numbers of rows, of tiles, of rows in a tile, and of pages of a session.

    `pages` 0: no limit, if kernels read the pages in place.
    """

    rows: int
    tiles: int
    tile_rows: int
    pages: int


class PaddedAttention:
    """The attention of a pass of fixed size by torch's own kernels: the pages of each tile are gathered."""

    def __init__(self, pool: PagePool, size: PassSize) -> None:
        device, layers = pool.rows.device, pool.rows.shape[0]
        self._pool, self._size = pool, size
        self._paged = pool.rows.view(layers, 2, -1, PAGE_ROWS, *pool.rows.shape[3:])
        self.fixed = FixedTiles(*size, device)
        # int64: the packed row for each row of each tile, and the row of a tile for each packed row.
        self._tiled = torch.zeros(size.tiles * size.tile_rows, dtype=torch.int64, device=device)
        self._packed = torch.zeros(size.rows, dtype=torch.int64, device=device)
        self._pages = torch.empty(0)
        self._masks: dict[int, torch.Tensor] = {}

    def fill(self, ranges: Sequence[KvRange]) -> list[int]:
        """Set the tensors for the next pass, and return the number of each session's last tile."""
        made = self.fixed.fill(ranges)
        if self._size.tile_rows > 1:
            first, counts = made.numbers[1].astype(np.int64), made.numbers[2]
            offsets = np.arange(self._size.tile_rows)
            valid = offsets < counts[:, None]
            tiled = np.where(valid, first[:, None] + offsets, 0)
            packed = np.zeros(self._size.rows, np.int64)
            packed[tiled[valid]] = np.flatnonzero(valid)
            self._tiled.copy_(torch.from_numpy(tiled.reshape(-1)), non_blocking=True)
            self._packed.copy_(torch.from_numpy(packed), non_blocking=True)
        return made.last

    def begin(self) -> None:
        """Drop what was computed for the previous pass. Must be called before each pass."""
        self._masks.clear()
        tiles = self.fixed.now
        self._pages = tiles.table.index_select(0, tiles.sessions).view(-1)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and attend each row to its own session's keys, in one call."""
        self._pool.write(layer, self.fixed.now.slots, keys, values)
        tiles, length, kv_heads, heads = self._size.tiles, self._size.tile_rows, keys.shape[1], query.shape[1]
        both = self._paged[layer].index_select(1, self._pages)
        both = both.view(2, tiles, -1, *keys.shape[1:]).transpose(2, 3)
        if length > 1:
            query = query.index_select(0, self._tiled)
        # Query heads that share a key head become rows of one query, so that the keys are read once for the group.
        q = query.to(both.dtype).view(tiles, length, kv_heads, -1, query.shape[2])
        q = q.permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, -1, query.shape[2])
        out = weighted_values(q, both[0], both[1], self._mask(scoring.window, q, heads // kv_heads), scoring)
        out = out.view(tiles, heads, length, -1).transpose(1, 2).reshape(tiles * length, heads, -1)
        if length > 1:
            out = out.index_select(0, self._packed)
        return out.to(query.dtype)

    def _mask(self, window: int, like: torch.Tensor, groups: int) -> torch.Tensor:
        """The additive mask [tiles, 1, groups * tile_rows, keys]: a row sees its session's rows up to its own.

        `window`: it sees only this number of the newest ones; 0: all.
        """
        if window not in self._masks:
            columns = torch.arange(self._size.pages * PAGE_ROWS, device=like.device)
            offsets = torch.arange(self._size.tile_rows, device=like.device)
            own = (self.fixed.now.positions[:, None] + offsets)[:, :, None]
            seen = columns <= own
            if window:
                seen &= columns > own - window
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            mask = mask.masked_fill_(~seen, float("-inf"))
            self._masks[window] = mask.repeat(1, groups, 1)[:, None] if self._size.tile_rows > 1 else mask[:, None]
        return self._masks[window]


class PassShape(CapturedPass[PassOutput]):
    """Passes of one size: their tensors, and the pass over them.

    `inputs`: float [1, rows, width], for their type and device. `axes`: of the positions, 1 or 3. A capture writes to
    the scratch page only.
    """

    def __init__(self, decoder: DecoderPass, pool: PagePool, inputs: torch.Tensor, axes: int, size: PassSize) -> None:
        self._decoder = decoder
        rows, tiles, tile_rows, pages = size
        self.attention: FixedPages | PaddedAttention = (
            PaddedAttention(pool, size) if pages else FixedPages(pool, rows, tiles, tile_rows)
        )
        self.inputs = inputs.new_zeros(1, rows, inputs.shape[-1])
        shape = (1, rows) if axes == 1 else (axes, 1, rows)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=inputs.device)

    def compute(self) -> PassOutput:
        """Run the pass over the current tensors. The logits are of the last row of each tile."""
        self.attention.begin()
        return self._decoder(self.inputs, self.positions, self.attention.fixed.last_rows, self.attention)

    def run(
        self, inputs: torch.Tensor, positions: torch.Tensor, ranges: Sequence[KvRange]
    ) -> tuple[PassOutput, list[int]]:
        """Compute the rows of each session, packed side by side.

        `inputs` [1, n, width], `positions` [1, n] or [3, 1, n]. Returns the output, and for each session the row of the
        logits that belongs to its last row. The output is valid until the next run.
        """
        count = inputs.shape[1]
        self.inputs[:, :count].copy_(inputs)
        self.positions[..., :count].copy_(positions)
        last = self.attention.fill(ranges)
        return self.result(), last


class PassShapes:
    """The PassShape objects of an engine, each created when a step first needs it.

    `axes`: of the positions, 1 or 3. `groups`: query heads for each key head. `sessions`, `rows`: the maximum numbers
    of sessions that decode and of rows in a step. `capture`: capture each shape as a CUDA graph before its first step,
    which takes the time of a few steps. If that fails, it is logged, and steps run without graphs.
    """

    def __init__(
        self, decoder: DecoderPass, pool: PagePool, axes: int, groups: int, sessions: int, rows: int, *, capture: bool
    ) -> None:
        self._decoder, self._pool, self._axes, self._sessions = decoder, pool, axes, sessions
        self._shapes: dict[PassSize, PassShape] = {}
        self._graphs = Graphs("steps", enabled=capture)
        self._by_kernels = is_paged_by_kernels(pool)
        self._tile_rows = rows_of_tile(groups)
        # The numbers of rows of passes with prefill: powers of two, and the largest step.
        self._sizes = [1 << i for i in range(LEAST_ROWS.bit_length() - 1, (rows - 1).bit_length())] + [rows]

    @property
    def sizes(self) -> list[PassSize]:
        """The size of each shape so far."""
        return list(self._shapes)

    def size(self, ranges: Sequence[KvRange]) -> PassSize | None:
        """Return the smallest size that fits a step; None if none does.

        If kernels read the pages, any number of pages fits, and only the rows are padded.
        """
        pages = 0 if self._by_kernels else power_of_two(max(pages_of(r.stop) for r in ranges))
        rows = sum(r.count for r in ranges)
        if rows == len(ranges):
            rows = power_of_two(rows)
            return PassSize(rows, rows, 1, pages)
        tiles = num_tiles(ranges, self._tile_rows)
        fitting = (s for s in map(self._with_prefill, self._sizes) if s.rows >= rows and s.tiles >= tiles)
        size = next(fitting, None)
        if size is None or size.tiles * pages > MOST_GATHERED_PAGES:
            return None
        return size._replace(pages=pages)

    def _with_prefill(self, rows: int) -> PassSize:
        """Return the size for `rows` rows. Sessions that decode need a tile each."""
        return PassSize(rows, min(rows, -(-rows // self._tile_rows) + self._sessions), self._tile_rows, 0)

    def run(
        self, size: PassSize, inputs: torch.Tensor, positions: torch.Tensor, ranges: Sequence[KvRange]
    ) -> tuple[PassOutput, list[int]]:
        """Compute the rows of each session in a pass of this size. See PassShape.run."""
        if size not in self._shapes:
            self._shapes[size] = self._new(inputs, size)
        return self._shapes[size].run(inputs, positions, ranges)

    def warm(self, inputs: torch.Tensor) -> None:
        """Create the shapes that kernels need ahead of their first steps, the largest first, which share its memory.

        `inputs`: the same as in a step.
        """
        if self._by_kernels:
            decode = [PassSize(n, n, 1, 0) for n in warmed_sizes(self._sessions)]
            for size in sorted({*decode, *map(self._with_prefill, self._sizes)}, reverse=True):
                self._shapes[size] = self._new(inputs, size)

    def _new(self, inputs: torch.Tensor, size: PassSize) -> PassShape:
        shape = PassShape(self._decoder, self._pool, inputs, self._axes, size)
        shape.capture(self._graphs, inputs.device)
        return shape
