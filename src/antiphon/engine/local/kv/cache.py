"""Which session holds which KV memory, and whether there is room for more: extents, leases, parking.

An *extent* is one session's KV: contiguous room for a whole number of pages of rows. Extents are shared by reference
count (a fork, an equal prefix), and a session that writes to a shared one gets its own copy first. A *lease* is what a
session was promised when it was opened: room for its reserve is there whenever the session needs it. A parked session
holds no room: its rows lie in host memory or in a file, bit for bit as they were.

Pure bookkeeping: the memory itself is behind `Storage`, and what the rows mean is known to the scheduler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

# Rows of a page, the unit in which room is counted.
PAGE_ROWS = 64


class Storage(Protocol):
    """The memory that extents and parked copies lie in. Handles are opaque to the cache; sizes are in rows.

    All methods are called in the model's thread and return when the copy is made.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes over all layers, keys and values together."""
        ...

    def extend(self, source: Any | None, rows: int, valid: int, *, shared: bool) -> Any:
        """Return a handle of memory for `rows` rows that begins with the first `valid` rows of `source`.

        `shared`: others hold `source` too, and it stays as it is; else it is given up, and not used again. `rows` are
        at least `valid`, and more than `source` has unless it is shared.
        """
        ...

    def own(self, handle: Any, first: int) -> None:
        """Make sure that no other handle sees what is written to this one's rows from `first` on.

        Called before a step writes there. It takes no room beyond what the handle counts for.
        """
        ...

    def free(self, handle: Any) -> None:
        """Take a handle's memory back; it is not used again."""
        ...

    def evict(self, handle: Any, first: int, end: int, stop: int) -> bool:
        """Move rows end .. stop down to `first`, as if they had been computed there.

        Returns False, with nothing changed, where the keys of this model cannot be moved to other positions.
        """
        ...

    def to_host(self, source: Any, rows: int) -> Any:
        """Return a copy of the first `rows` rows that lies in host memory, outside the budget."""
        ...

    def to_disk(self, parked: Any) -> Any:
        """Move a copy that `to_host` returned to a file, and return its new handle. Raises OSError for a full disk."""
        ...

    def restore(self, parked: Any, target: Any, rows: int) -> None:
        """Copy the first `rows` rows of a parked copy into `target`. The parked copy stays until it is discarded."""
        ...

    def discard(self, parked: Any) -> None:
        """Free a parked copy, wherever it lies; its handle is not used again."""
        ...


@dataclass(slots=True, eq=False)
class Extent:
    """Memory for `pages` pages, shared by `holders` leases and kept prefixes. One with several is not written to."""

    handle: Any
    pages: int
    holders: int = 1


@dataclass(slots=True, eq=False)
class Parked:
    """The first `rows` rows of a parked session, outside the budget: in host memory, or in a file (`on_disk`)."""

    handle: Any
    rows: int
    on_disk: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """One session's claim to memory. At most one of `extent` and `parked` is set; neither while it has no rows.

    `reserve_pages`: what it was promised. `asleep`: the session is parked, and holds and is promised nothing until it
    wakes; it is so without a `parked` copy where it had no rows or gave them up. `closed`: it is not used again.
    """

    reserve_pages: int
    extent: Extent | None = None
    parked: Parked | None = None
    asleep: bool = False
    closed: bool = False

    @property
    def claim_pages(self) -> int:
        """Pages that the lease holds or was promised, whichever is more; 0 for one that is parked or closed."""
        if self.closed or self.asleep:
            return 0
        return max(self.reserve_pages, self.extent.pages if self.extent else 0)


class KvCache:
    """All extents, leases and kept prefixes of one engine, within `budget_bytes`. Used by one thread at a time.

    `host_bytes` and `disk_bytes` bound what parked sessions may take of either; past both, parking is refused. The
    budget is what sessions hold and were promised: kept prefixes lie in what is left of it and go first.
    """

    def __init__(self, storage: Storage, *, budget_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> None:
        self.storage = storage
        self.page_bytes = storage.row_bytes * PAGE_ROWS
        self.total_pages = budget_bytes // self.page_bytes
        self._host_pages = host_bytes // self.page_bytes
        self._disk_pages = disk_bytes // self.page_bytes
        self.leases: set[Lease] = set()
        # Extents without a lease that a later session may share, the one used last at the end; dropped when room is
        # needed.
        self.kept: list[Extent] = []
        # In the order they were parked.
        self._parked: list[Parked] = []

    @property
    def held_pages(self) -> int:
        """Pages that are allocated now, kept prefixes included; an extent that several share counts once."""
        extents = {id(e): e.pages for e in (*self.kept, *(x.extent for x in self.leases)) if e}
        return sum(extents.values())

    @property
    def claimed_pages(self) -> int:
        """Pages that sessions which are not parked hold or were promised.

        A shared extent counts once for each of them, since each may come to need its own copy.
        """
        return sum(lease.claim_pages for lease in self.leases)

    @property
    def parked_rows(self) -> int:
        """Rows that lie outside the budget, in host memory and on disk together."""
        return sum(p.rows for p in self._parked)

    def open(self, reserve_rows: int) -> Lease | None:
        """Return a lease that is promised room for `reserve_rows`, or None where that much is not unclaimed now.

        Nothing is allocated before the lease has rows.
        """
        pages = pages_of(reserve_rows)
        if self.claimed_pages + pages > self.total_pages:
            return None
        lease = Lease(pages)
        self.leases.add(lease)
        return lease

    def close(self, lease: Lease) -> None:
        """Give back what the lease holds, its parked copy included. Closing it again changes nothing."""
        self._release(lease)
        if lease.parked:
            self._discard(lease.parked)
            lease.parked = None
        lease.closed = True
        self.leases.discard(lease)

    def ensure(self, lease: Lease, rows: int, valid: int) -> bool:
        """Make the lease's extent its own, with room for `rows` rows; the first `valid` rows in it stay.

        The storage may have to copy these rows where the extent is shared or too small, so a growing one gets an eighth
        more than it needs. To be called before rows from `valid` on are written.
        Returns False, with nothing changed, where there is no room. The lease must not be parked.
        """
        assert not lease.asleep
        pages = pages_of(rows)
        old = lease.extent
        if old and old.holders == 1 and old.pages >= pages:
            self.storage.own(old.handle, valid)
            return True
        # Room to grow into, so that a conversation is not copied for every page it gains.
        wish = max(lease.reserve_pages, pages + pages // 8 if old else pages)
        size = wish if self._fits(lease, wish) else pages
        if not self._fits(lease, size):
            return False
        # Kept prefixes go first: _fits has counted only what leases hold and were promised.
        while self.kept and self.held_pages + size > self.total_pages:
            self.drop_kept(self.kept[0])
        shared = old is not None and old.holders > 1
        handle = self.storage.extend(old.handle if old else None, size * PAGE_ROWS, valid, shared=shared)
        if old:
            old.holders -= 1
        lease.extent = Extent(handle, size)
        return True

    def evict(self, lease: Lease, first: int, end: int, stop: int) -> bool:
        """Drop rows first .. end of the lease's extent and move the rows up to `stop` down.

        The extent must be the lease's own. Returns False where this model's keys cannot be moved.
        """
        assert lease.extent
        assert lease.extent.holders == 1
        return self.storage.evict(lease.extent.handle, first, end, stop)

    def share(self, source: Extent, lease: Lease) -> None:
        """Have `lease`, which must hold nothing yet, hold `source` too. Nothing is copied until one of them writes."""
        assert lease.extent is None
        if source in self.kept:
            # The extent that was used last is dropped last.
            self.kept.remove(source)
            self.kept.append(source)
        source.holders += 1
        lease.extent = source

    def keep(self, lease: Lease) -> Extent | None:
        """Keep the lease's extent for others to share after the lease is closed, and return it; None where it has none.

        It stays until `drop_kept`, or until the room is needed.
        """
        extent = lease.extent
        if extent:
            extent.holders += 1
            self.kept.append(extent)
        return extent

    def drop_kept(self, extent: Extent) -> None:
        """Stop keeping an extent. Its memory is freed with the last lease that shares it; ValueError if not kept."""
        self.kept.remove(extent)
        self._drop_holder(extent)

    def park(self, lease: Lease, rows: int) -> bool:
        """Move the lease's first `rows` rows out of the budget and give up its claim.

        Copies to host memory, and moves what has been parked longest on to disk where host memory is full. Returns
        False, with nothing changed, where neither has room; True for a lease that is parked already.
        """
        if lease.asleep:
            return True
        if lease.extent and rows:
            if not self._has_parking_room(pages_of(rows)):
                return False
            lease.parked = Parked(self.storage.to_host(lease.extent.handle, rows), rows)
            self._parked.append(lease.parked)
            self._spill()
        self._release(lease)
        lease.asleep = True
        return True

    def wake(self, lease: Lease, rows: int) -> bool:
        """Bring a parked lease back, with its reserve promised again and room for `rows` rows.

        Copies its rows back and discards the parked copy. Returns False, with nothing changed, where there is no room
        now; True for a lease that is not parked.
        """
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

    def truncate_parked(self, lease: Lease, rows: int) -> None:
        """Count only the first `rows` rows of a parked copy from now on, since the others were rolled back.

        Does nothing for a lease without a parked copy.
        """
        if lease.parked:
            lease.parked.rows = min(lease.parked.rows, rows)

    def _fits(self, lease: Lease, pages: int) -> bool:
        others = self.claimed_pages - lease.claim_pages
        return others + max(pages, lease.reserve_pages) <= self.total_pages

    def _release(self, lease: Lease) -> None:
        if lease.extent:
            self._drop_holder(lease.extent)
            lease.extent = None

    def _drop_holder(self, extent: Extent) -> None:
        extent.holders -= 1
        if not extent.holders:
            self.storage.free(extent.handle)

    def _has_parking_room(self, pages: int) -> bool:
        used = sum(pages_of(p.rows) for p in self._parked)
        return used + pages <= self._host_pages + self._disk_pages

    def _spill(self) -> None:
        """Move what has been parked longest to disk until host memory holds no more than its bound."""
        in_host = [p for p in self._parked if not p.on_disk]
        used = sum(pages_of(p.rows) for p in in_host)
        for parked in in_host:
            if used <= self._host_pages:
                return
            try:
                parked.handle = self.storage.to_disk(parked.handle)
            except OSError as error:
                # A session over the host bound is better than a session that is lost.
                log.warning("parked sessions stay in host memory: %s", error.strerror)
                self._disk_pages = 0
                return
            parked.on_disk = True
            used -= pages_of(parked.rows)

    def _discard(self, parked: Parked) -> None:
        self.storage.discard(parked.handle)
        self._parked.remove(parked)

    def check_integrity(self) -> None:
        """Raise AssertionError where the counts, claims and copies contradict each other; for tests."""
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
    """Return how many whole pages hold `rows` rows."""
    return -(-rows // PAGE_ROWS)
