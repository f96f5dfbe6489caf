"""KV memory as one pool of pages: each session holds a list of pages, and equal heads share them.

A session grows by pages, without copying its rows. A fork, or a session that begins with another's rows, shares whole
pages and copies a page before writing to it. All sessions' rows lie in one tensor with a fixed address. So one kernel
can attend for all of them, and a step can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from antiphon.engine.local.kv.cache import PAGE_ROWS, pages_of
from antiphon.engine.local.kv.parked import ParkedFile, discard_parked, read_parked, write_parked
from antiphon.engine.local.kv.shape import KvRange, KvShape
from antiphon.errors import EngineError

# The page that no session holds. The padding rows of a step are written to it.
SCRATCH_PAGE = 0


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one handle, in the order of its rows, int64 [pages]: row i lies in `pages[i // PAGE_ROWS]`.

    `num_shared`: other tables may hold pages before this one; no other table holds the pages from it on.
    """

    pages: np.ndarray[tuple[int], np.dtype[np.int64]]
    num_shared: int = 0

    def rows(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the pool's row numbers of the handle's rows start .. stop, int64 [stop - start]."""
        rows = np.arange(start, stop)
        return self.pages[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS


class PagePool:
    """A Storage whose handles are PageTables of one pool, which is allocated at once.

    `pages`: the number of pages for sessions, not counting the scratch page. `folder`: the folder for files of parked
    copies; None: the system's temporary folder. `rows`: [layers, 2, pages * PAGE_ROWS, kv_heads, head_dim]. Raises
    torch.OutOfMemoryError if the device is too small.
    """

    def __init__(self, shape: KvShape, pages: int, folder: Path | None = None) -> None:
        self.shape, self._folder = shape, folder
        # Padded steps read rows that were never written, with weight 0. A NaN there would spread.
        self.rows = shape.zeros((pages + 1) * PAGE_ROWS)
        self._holders = np.zeros(pages + 1, np.int64)
        self._free = list(range(pages, SCRATCH_PAGE, -1))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's keys and values over all layers."""
        return self.shape.row_bytes

    @property
    def num_pages(self) -> int:
        """The number of pages, including the scratch page."""
        return len(self._holders)

    @property
    def free_pages(self) -> int:
        """The number of pages that no table holds."""
        return len(self._free)

    def extend(self, source: PageTable | None, rows: int, valid: int, *, shared: bool) -> PageTable:
        """Return a table for `rows` rows that begins with the first `valid` rows of `source`.

        Without `shared` it is `source` itself with more pages. With `shared`, the two share the whole pages among the
        valid rows, and only the rows of the last page are copied.
        """
        if source is not None and not shared:
            self._grow(source, pages_of(rows))
            self.own(source, valid)
            return source
        whole = valid // PAGE_ROWS
        table = PageTable(source.pages[:whole].copy() if source else np.zeros(0, np.int64), whole)
        if source is not None:
            source.num_shared = max(source.num_shared, whole)
        self._holders[table.pages] += 1
        self._grow(table, pages_of(rows))
        if source is not None and valid % PAGE_ROWS:
            self._copy_page(source.pages[whole], table.pages[whole])
        return table

    def own(self, handle: PageTable, first: int) -> None:
        """Replace the pages from row `first` on that other tables hold too. The rows before `first` stay."""
        at = first // PAGE_ROWS
        if at >= handle.num_shared:
            return
        handle.num_shared = at
        for number in np.flatnonzero(self._holders[handle.pages[at:]] > 1) + at:
            old = handle.pages[number]
            handle.pages[number] = self._take(1)[0]
            if number == at and first % PAGE_ROWS:
                self._copy_page(old, handle.pages[number])
            self._holders[old] -= 1

    def free(self, handle: PageTable) -> None:
        """Give back the pages of the table that no other table holds."""
        self._holders[handle.pages] -= 1
        self._free += [int(page) for page in handle.pages if not self._holders[page]]
        handle.pages, handle.num_shared = handle.pages[:0], 0

    def evict(self, handle: PageTable, first: int, end: int, stop: int) -> bool:
        """Move rows end .. stop down to `first`, layer by layer, and rotate their keys by the same number of positions.

        Values carry no position and are copied. Returns False if this model's keys cannot be moved.
        """
        if self.shape.frequencies is None:
            return False
        # Rows in shared pages are read from the originals, which the other holders keep.
        source = self._where(handle, end, stop)
        self.own(handle, first)
        target = self._where(handle, first, first + stop - end)
        for layer in self.rows:
            layer[0, target] = self.shape.moved_keys(layer[0, source], first - end)
            layer[1, target] = layer[1, source]
        return True

    def to_host(self, source: PageTable, rows: int) -> torch.Tensor:
        """Return a contiguous copy of the first `rows` rows in host memory. Waits for the device."""
        return self.rows[:, :, self._where(source, 0, rows)].to("cpu", copy=True).contiguous()

    def to_disk(self, parked: torch.Tensor) -> ParkedFile:
        """Write a parked copy to an unnamed file, which disappears with the process. Raises OSError on a full disk."""
        return write_parked(parked, self._folder)

    def restore(self, parked: torch.Tensor | ParkedFile, target: PageTable, rows: int) -> None:
        """Copy the first `rows` rows of a parked copy into `target`. Raises OSError if its file cannot be read."""
        copy = read_parked(parked)[:, :, :rows].to(self.rows.device)
        self.rows[:, :, self._where(target, 0, rows)] = copy

    def discard(self, parked: torch.Tensor | ParkedFile) -> None:
        """Free a parked copy, in host memory or in a file."""
        discard_parked(parked)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [rows, kv_heads, head_dim] of a layer at the pool's rows `slots`, int64 [rows].

        Infinities and NaN become 0. The session that produced them fails by its logits; later holders of its pages are
        not harmed.
        """
        for rows, new in zip(self.rows[layer], (keys, values), strict=True):
            rows.index_copy_(0, slots, new.to(rows.dtype).nan_to_num(0.0, 0.0, 0.0))

    def step(self, ranges: Sequence[KvRange]) -> PagedRows:
        """Return access to the keys and values of a step, whose rows are packed in the order of `ranges`."""
        return PagedRows(self, ranges)

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """Raise AssertionError if the holder counts contradict the tables in use; for tests."""
        held = np.bincount(
            np.concatenate([t.pages for t in tables] or [np.zeros(0, np.int64)]), minlength=len(self._holders)
        )
        assert (held == self._holders).all()
        assert all((held[t.pages[t.num_shared :]] == 1).all() for t in tables)
        assert held[SCRATCH_PAGE] == 0
        assert sorted(self._free) == [p for p in range(1, len(held)) if not held[p]]

    def _where(self, table: PageTable, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(table.rows(start, stop)).to(self.rows.device)

    def _grow(self, table: PageTable, pages: int) -> None:
        if pages > len(table.pages):
            table.pages = np.concatenate([table.pages, self._take(pages - len(table.pages))])

    def _take(self, pages: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        # Room is promised page by page, so this is a bookkeeping error, not a lack of memory.
        if pages > len(self._free):
            raise EngineError(f"{pages} pages of KV are needed, but {len(self._free)} are free")
        taken = np.array([self._free.pop() for _ in range(pages)], np.int64)
        self._holders[taken] = 1
        return taken

    def _copy_page(self, source: int, target: int) -> None:
        into, of = int(target) * PAGE_ROWS, int(source) * PAGE_ROWS
        self.rows[:, :, into : into + PAGE_ROWS] = self.rows[:, :, of : of + PAGE_ROWS]


class PagedRows:
    """The KV of one step's sessions in a pool, gathered for each session and layer on reading."""

    def __init__(self, pool: PagePool, ranges: Sequence[KvRange]) -> None:
        self._pool, device = pool, pool.rows.device
        self.dtype: torch.dtype = pool.rows.dtype
        fresh = np.concatenate([r.handle.rows(r.start, r.stop) for r in ranges])
        self._slots = torch.from_numpy(fresh).to(device)
        self._whole = [torch.from_numpy(r.handle.rows(0, r.stop)).to(device) for r in ranges]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's new keys and values, each [rows, kv_heads, head_dim], packed in the order of the ranges."""
        self._pool.write(layer, self._slots, keys, values)

    def read(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a range's keys and values from its session's first row on, each [1, kv_heads, rows, head_dim]."""
        rows = self._pool.rows[layer].index_select(1, self._whole[number])
        return rows[0].transpose(0, 1)[None], rows[1].transpose(0, 1)[None]
