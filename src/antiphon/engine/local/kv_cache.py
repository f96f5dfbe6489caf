"""Who holds which KV memory, and whether there is room for more: extents, leases, parking. No torch.

An *extent* is one session's KV: contiguous room for a whole number of pages of rows. Extents are shared by counting
(`fork`, equal prefixes) and copied by whoever first writes to a shared one. A *lease* is what a session was promised when it
was let in: room for its reserve is there whenever it needs it. A parked session holds no room: its rows lie in host memory
or in a file, exactly as they were.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

PAGE_ROWS = 64


class Storage(Protocol):
    """The memory itself. Handles are opaque; sizes in rows."""

    @property
    def row_bytes(self) -> int: ...

    def allocate(self, rows: int) -> Any: ...

    def copy(self, source: Any, target: Any, rows: int) -> None:
        """The first `rows` rows of `source` into `target`."""
        ...

    def evict(self, handle: Any, first: int, end: int, stop: int) -> bool:
        """Move rows end..stop to `first`, as if they had been computed there. False where this model's keys cannot be moved."""
        ...

    def to_host(self, source: Any, rows: int) -> Any:
        """The first `rows` rows, outside the budgeted memory."""
        ...

    def to_disk(self, parked: Any) -> Any:
        """What `to_host` gave, moved to a file. Raises OSError when the disk is full."""
        ...

    def restore(self, parked: Any, target: Any, rows: int) -> None:
        """The first `rows` rows of what `to_host` or `to_disk` gave, into `target`. The parked copy stays."""
        ...

    def discard(self, parked: Any) -> None:
        """Forget a parked copy."""
        ...


@dataclass(slots=True, eq=False)
class Extent:
    """Room for `pages` pages, held by `holders` leases or kept prefixes."""

    handle: Any
    pages: int
    holders: int = 1


@dataclass(slots=True, eq=False)
class Parked:
    """`rows` rows that lie outside the budget."""

    handle: Any
    rows: int
    on_disk: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """One session's claim. At most one of `extent` and `parked` is set; neither while it has no rows."""

    reserve_pages: int
    extent: Extent | None = None
    parked: Parked | None = None
    asleep: bool = False
    closed: bool = False

    @property
    def claim_pages(self) -> int:
        """Pages it holds or was promised. One that sleeps holds nothing and is promised nothing."""
        if self.closed or self.asleep:
            return 0
        return max(self.reserve_pages, self.extent.pages if self.extent else 0)


class KvCache:
    """All extents, leases and kept prefixes of one engine, within `budget_bytes`. One thread at a time.

    `host_bytes` and `disk_bytes` bound what parked sessions may take of either; past them, parking is refused.
    """

    def __init__(self, storage: Storage, *, budget_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> None:
        self.storage = storage
        self.page_bytes = storage.row_bytes * PAGE_ROWS
        self.total_pages = budget_bytes // self.page_bytes
        self._host_pages = host_bytes // self.page_bytes
        self._disk_pages = disk_bytes // self.page_bytes
        self.leases: set[Lease] = set()
        # Extents that no lease holds but somebody may yet share; given back when there is need.
        self.kept: list[Extent] = []
        # In the order they were parked.
        self._parked: list[Parked] = []

    @property
    def held_pages(self) -> int:
        """Pages in memory now, kept prefixes too."""
        extents = {id(e): e.pages for e in (*self.kept, *(x.extent for x in self.leases)) if e}
        return sum(extents.values())

    @property
    def claimed_pages(self) -> int:
        """Pages held by or promised to sessions that are awake."""
        # A shared extent counts once a holder: each may come to need its own copy.
        return sum(lease.claim_pages for lease in self.leases)

    @property
    def parked_rows(self) -> int:
        """Rows that lie outside the budget."""
        return sum(p.rows for p in self._parked)

    def open(self, reserve_rows: int) -> Lease | None:
        """A lease with room for `reserve_rows`, or None where that much is not unclaimed now."""
        pages = pages_of(reserve_rows)
        if self.claimed_pages + pages > self.total_pages:
            return None
        lease = Lease(pages)
        self.leases.add(lease)
        return lease

    def close(self, lease: Lease) -> None:
        """Give back all it holds. Again is a no-op."""
        self._let_go(lease)
        if lease.parked:
            self._discard(lease.parked)
            lease.parked = None
        lease.closed = True
        self.leases.discard(lease)

    def ensure(self, lease: Lease, rows: int, valid: int) -> bool:
        """Make the lease's extent its own, with room for `rows`; its first `valid` rows stay. False where there is no room."""
        assert not lease.asleep
        pages = pages_of(rows)
        old = lease.extent
        if old and old.holders == 1 and old.pages >= pages:
            return True
        # Room to grow into, so that a conversation is not copied for every page it gains.
        wish = max(lease.reserve_pages, pages + pages // 8 if old else pages)
        size = wish if self._fits(lease, wish) else pages
        if not self._fits(lease, size):
            return False
        # Kept prefixes go first; the promise to other leases is what _fits counted.
        while self.kept and self.held_pages + size > self.total_pages:
            self.drop_kept(self.kept[0])
        extent = Extent(self.storage.allocate(size * PAGE_ROWS), size)
        if old and valid:
            self.storage.copy(old.handle, extent.handle, valid)
        self._let_go(lease)
        lease.extent = extent
        return True

    def evict(self, lease: Lease, first: int, end: int, stop: int) -> bool:
        """Rows first..end of the lease's own extent go, those up to `stop` move down. False where they cannot be moved."""
        assert lease.extent
        assert lease.extent.holders == 1
        return self.storage.evict(lease.extent.handle, first, end, stop)

    def share(self, source: Extent, lease: Lease) -> None:
        """`lease`, which holds nothing yet, holds `source` too."""
        assert lease.extent is None
        if source in self.kept:
            # The one used last goes last.
            self.kept.remove(source)
            self.kept.append(source)
        source.holders += 1
        lease.extent = source

    def keep(self, lease: Lease) -> Extent | None:
        """Keep the lease's extent for others to share, after the lease closes."""
        extent = lease.extent
        if extent:
            extent.holders += 1
            self.kept.append(extent)
        return extent

    def drop_kept(self, extent: Extent) -> None:
        """Keep it no longer."""
        self.kept.remove(extent)
        extent.holders -= 1

    def park(self, lease: Lease, rows: int) -> bool:
        """Move the lease's first `rows` rows out of the budget. False where neither host memory nor disk has room."""
        if lease.asleep:
            return True
        if lease.extent and rows:
            if not self._make_parking(pages_of(rows)):
                return False
            lease.parked = Parked(self.storage.to_host(lease.extent.handle, rows), rows)
            self._parked.append(lease.parked)
            self._spill()
        self._let_go(lease)
        lease.asleep = True
        return True

    def wake(self, lease: Lease, rows: int) -> bool:
        """Bring a parked lease back with room for `rows`. False, and nothing changed, where there is none now."""
        if not lease.asleep:
            return True
        pages = max(lease.reserve_pages, pages_of(rows), pages_of(lease.parked.rows) if lease.parked else 0)
        if self.claimed_pages + pages > self.total_pages:
            return False
        lease.asleep = False
        parked = lease.parked
        if parked is None:
            return True
        if not self.ensure(lease, max(rows, parked.rows), 0):
            lease.asleep = True
            return False
        assert lease.extent
        self.storage.restore(parked.handle, lease.extent.handle, parked.rows)
        self._discard(parked)
        lease.parked = None
        return True

    def forget(self, lease: Lease, rows: int) -> None:
        """Only the first `rows` of a parked copy count from now on: the others were rolled back."""
        if lease.parked:
            lease.parked.rows = min(lease.parked.rows, rows)

    def _fits(self, lease: Lease, pages: int) -> bool:
        others = self.claimed_pages - lease.claim_pages
        return others + max(pages, lease.reserve_pages) <= self.total_pages

    def _let_go(self, lease: Lease) -> None:
        if lease.extent:
            lease.extent.holders -= 1
            lease.extent = None

    def _make_parking(self, pages: int) -> bool:
        used = sum(pages_of(p.rows) for p in self._parked)
        return used + pages <= self._host_pages + self._disk_pages

    def _spill(self) -> None:
        """Move the longest parked to disk until host memory holds what it may."""
        in_host = [p for p in self._parked if not p.on_disk]
        used = sum(pages_of(p.rows) for p in in_host)
        for parked in in_host:
            if used <= self._host_pages:
                return
            try:
                parked.handle = self.storage.to_disk(parked.handle)
            except OSError as error:
                # Better over the host bound than lost.
                log.warning("parked sessions stay in host memory: %s", error.strerror)
                self._disk_pages = 0
                return
            parked.on_disk = True
            used -= pages_of(parked.rows)

    def _discard(self, parked: Parked) -> None:
        self.storage.discard(parked.handle)
        self._parked.remove(parked)

    def check_integrity(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        count: dict[int, int] = {}
        extents: dict[int, Extent] = {}
        for extent in [*self.kept, *(x.extent for x in self.leases if x.extent)]:
            count[id(extent)] = count.get(id(extent), 0) + 1
            extents[id(extent)] = extent
        assert all(extents[i].holders == n for i, n in count.items())
        assert self.claimed_pages <= self.total_pages
        assert self.held_pages <= self.total_pages
        for lease in self.leases:
            assert not lease.closed
            assert not (lease.extent and lease.parked)
            assert lease.extent is None or not lease.asleep
        assert {id(p) for p in self._parked} == {id(x.parked) for x in self.leases if x.parked}


def pages_of(rows: int) -> int:
    """Whole pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)
