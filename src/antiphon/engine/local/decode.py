"""Decode steps of a few fixed sizes: each session has one row, and the same kernels run in every step.

A step of n sessions is padded to the next size. One call of the attention kernel serves all of them, over pages that
are gathered side by side. The pass does not depend on any tensor's values, so the host never waits for the device
within a step, and a CUDA device can replay the step as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from antiphon.engine.local.attention import Scoring, StepAttention, weighted_values
from antiphon.engine.local.kernels.attention import DecodePages, is_paged_by_kernels
from antiphon.engine.local.kernels.graphs import Graphs, power_of_two
from antiphon.engine.local.kv.cache import PAGE_ROWS, pages_of
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.shape import KvRange

# One pass of the decoder. Takes input rows [1, n, width], positions [1, n] or [3, 1, n], the rows whose logits are
# wanted, int64 [n], and the step's attention. Returns logits [n, vocabulary] and last hidden states [n, width] of these
# rows.
DecoderPass = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, StepAttention], tuple[torch.Tensor, torch.Tensor | None]
]


class PaddedAttention:
    """The attention of a decode step of `rows` sessions, each with at most `pages` pages.

    `table` int64 [rows, pages]: each session's pages, padded with the scratch page. `lengths` int64 [rows]: the number
    of rows of each session, including the new one. `slots` int64 [rows]: the pool's row for each new row.
    """

    def __init__(self, pool: PagePool, rows: int, pages: int) -> None:
        device, layers = pool.rows.device, pool.rows.shape[0]
        self._pool = pool
        self._paged = pool.rows.view(layers, 2, -1, PAGE_ROWS, *pool.rows.shape[3:])
        self.table = torch.zeros(rows, pages, dtype=torch.int64, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self.slots = torch.arange(rows, device=device) % PAGE_ROWS
        self._masks: dict[int, torch.Tensor] = {}

    def fill(self, ranges: Sequence[KvRange]) -> None:
        """Fill the tensors for the next step: these sessions, then padding."""
        rows, pages = self.table.shape
        table, lengths = np.zeros((rows, pages), np.int64), np.ones(rows, np.int64)
        slots = np.arange(rows) % PAGE_ROWS
        for i, place in enumerate(ranges):
            count = pages_of(place.stop)
            table[i, :count] = place.handle.pages[:count]
            lengths[i], slots[i] = place.stop, place.handle.rows(place.start, place.stop)[0]
        for tensor, numbers in ((self.table, table), (self.lengths, lengths), (self.slots, slots)):
            tensor.copy_(torch.from_numpy(numbers), non_blocking=True)

    def begin(self) -> None:
        """Drop the masks of the previous step. Must be called before each pass."""
        self._masks.clear()

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and attend each session's row to the session's own keys, in one call."""
        self._pool.write(layer, self.slots, keys, values)
        rows, heads, width = query.shape
        both = self._paged[layer].index_select(1, self.table.view(-1))
        both = both.view(2, rows, -1, *keys.shape[1:]).transpose(2, 3)
        # Query heads that share a key head become rows of one query, so that the keys are read once for the group.
        q = query.to(both.dtype).view(rows, keys.shape[1], -1, width)
        out = weighted_values(q, both[0], both[1], self._mask(scoring.window, q), scoring)
        return out.reshape(rows, heads, -1).to(query.dtype)

    def _mask(self, window: int, like: torch.Tensor) -> torch.Tensor:
        """The additive mask [rows, 1, 1, pages * PAGE_ROWS]: a row sees its session's rows, or the last `window`."""
        if window not in self._masks:
            columns = torch.arange(self.table.shape[1] * PAGE_ROWS, device=like.device)[None]
            seen = columns < self.lengths[:, None]
            if window:
                seen &= columns >= self.lengths[:, None] - window
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            self._masks[window] = mask.masked_fill_(~seen, float("-inf"))[:, None, None]
        return self._masks[window]


class DecodeShape:
    """Decode steps of at most `rows` sessions with at most `pages` pages each: their tensors, and the pass over them.

    `pages` 0: no limit, if kernels read the pages in place.

    `inputs` [1, rows, width], `positions` [1, rows] or [3, 1, rows]: filled before each step. `graph`: the captured
    pass, which is replayed; None: the pass is run.
    """

    def __init__(
        self, decoder: DecoderPass, pool: PagePool, inputs: torch.Tensor, axes: int, rows: int, pages: int
    ) -> None:
        self._decoder = decoder
        self.attention = DecodePages(pool, rows) if pages == 0 else PaddedAttention(pool, rows, pages)
        self.inputs = inputs.new_zeros(1, rows, inputs.shape[-1])
        shape = (1, rows) if axes == 1 else (axes, 1, rows)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=inputs.device)
        self._keep = torch.arange(rows, device=inputs.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def compute(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the pass over the current tensors, and return logits [rows, vocabulary] and last hidden states."""
        self.attention.begin()
        return self._decoder(self.inputs, self.positions, self._keep, self.attention)

    def capture(self, graphs: Graphs) -> None:
        """Capture the pass as a CUDA graph if `graphs` can. Takes the time of a few passes, and writes to the scratch
        page only.
        """
        if captured := graphs.capture(self.compute, self.inputs.device):
            self.graph, self._out = captured

    def run(
        self, inputs: torch.Tensor, positions: torch.Tensor, ranges: Sequence[KvRange]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one row of each session, and return logits [n, vocabulary] and last hidden states [n, width].

        `inputs` [1, n, width], `positions` [1, n] or [3, 1, n]. The returned tensors are valid until the next run.
        """
        count = len(ranges)
        self.inputs[:, :count].copy_(inputs)
        self.positions[..., :count].copy_(positions)
        self.attention.fill(ranges)
        if self.graph:
            self.graph.replay()
            assert self._out is not None
            logits, hidden = self._out
        else:
            logits, hidden = self.compute()
        return logits[:count], None if hidden is None else hidden[:count]


class DecodeShapes:
    """The DecodeShape objects of an engine, each created when a step first needs it.

    `axes`: of the positions, 1 or 3. `capture`: capture each shape as a CUDA graph before its first step, which takes
    the time of a few steps. If that fails, it is logged, and steps run without graphs.
    """

    def __init__(self, decoder: DecoderPass, pool: PagePool, axes: int, *, capture: bool) -> None:
        self._decoder, self._pool, self._axes = decoder, pool, axes
        self._shapes: dict[tuple[int, int], DecodeShape] = {}
        self._graphs = Graphs("decode steps", enabled=capture)
        self._by_kernels = is_paged_by_kernels(pool)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows and pages of each shape so far."""
        return list(self._shapes)

    def run(
        self, inputs: torch.Tensor, positions: torch.Tensor, ranges: Sequence[KvRange]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one row of each session, padded to a power of two of rows and of pages. See DecodeShape.run.

        If kernels read the pages, any number of pages fits, and only the rows are padded.
        """
        pages = 0 if self._by_kernels else power_of_two(max(pages_of(r.stop) for r in ranges))
        size = (power_of_two(len(ranges)), pages)
        if size not in self._shapes:
            self._shapes[size] = self._new(inputs, *size)
        return self._shapes[size].run(inputs, positions, ranges)

    def warm(self, inputs: torch.Tensor, sizes: Sequence[int]) -> None:
        """Create the shapes for `sizes` sessions ahead of their first steps. `inputs`: the same as in a step."""
        if self._by_kernels:
            for rows in sizes:
                self._shapes[rows, 0] = self._new(inputs, rows, 0)

    def _new(self, inputs: torch.Tensor, rows: int, pages: int) -> DecodeShape:
        shape = DecodeShape(self._decoder, self._pool, inputs, self._axes, rows, pages)
        shape.capture(self._graphs)
        return shape
