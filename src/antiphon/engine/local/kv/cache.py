"""Bookkeeping of KV memory: which sessions hold it, which were promised it, and which are parked.

An *extent* is one session's KV: contiguous room for a whole number of pages of rows. Sessions can share an extent
(after a fork, or if their prefixes are equal); references to it are counted. A session that writes to a shared extent
gets its own copy first. A *lease* is a promise that a session gets when it opens: room for its reserve is available
whenever it needs it. A parked session holds no room: an exact copy of its rows lies in host memory or in a file.

This module only does the bookkeeping: `Storage` manages the memory, and the scheduler knows what the rows mean.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

# The number of rows in a page, the unit of room.
PAGE_ROWS = 64


class Storage(Protocol):
    """The memory of extents and parked copies. Handles are opaque to the cache; sizes are in rows.

    All methods are called in the model's thread and return when the copy is complete.
    """

    @property
    def row_bytes(self) -> int:
        """The bytes of one row's keys and values over all layers."""
        ...

    def extend(self, source: Any | None, rows: int, valid: int, *, shared: bool) -> Any:
        """Return a handle of memory for `rows` rows that begins with the first `valid` rows of `source`.

        `shared`: other holders use `source` too, and it stays unchanged; otherwise it is given up and not used again.
        `rows` is at least `valid`, and exceeds the size of `source` unless it is shared.
        """
        ...

    def own(self, handle: Any, first: int) -> None:
        """Ensure that no other handle sees writes to this one's rows from `first` on.

        Called before a step writes there. Takes no room beyond the handle's size.
        """
        ...

    def free(self, handle: Any) -> None:
        """Free a handle's memory. The handle is not used again."""
        ...

    def evict(self, handle: Any, first: int, end: int, stop: int) -> bool:
        """Move rows end .. stop down to `first`, as if they had been computed there.

        Returns False, without any change, if this model's keys cannot be moved to other positions.
        """
        ...

    def to_host(self, source: Any, rows: int) -> Any:
        """Return a copy of the first `rows` rows in host memory, outside the budget."""
        ...

    def to_disk(self, parked: Any) -> Any:
        """Move a copy that `to_host` returned to a file, and return its new handle. Raises OSError on a full disk."""
        ...

    def restore(self, parked: Any, target: Any, rows: int) -> None:
        """Copy the first `rows` rows of a parked copy into `target`. The parked copy stays until it is discarded."""
        ...

    def discard(self, parked: Any) -> None:
        """Free a parked copy, in memory or on disk. Its handle is not used again."""
        ...


@dataclass(slots=True, eq=False)
class Extent:
    """Memory for `pages` pages, shared by `holders` leases and kept prefixes. Read-only if it has several holders."""

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

    `reserve_pages`: the promised pages. `asleep`: the session is parked; it holds nothing and is promised nothing until
    it wakes. The lease has no `parked` copy if it had no rows or gave them up. `closed`: the lease is not used again.
    """

    reserve_pages: int
    extent: Extent | None = None
    parked: Parked | None = None
    asleep: bool = False
    closed: bool = False

    @property
    def claim_pages(self) -> int:
        """The pages that the lease holds or was promised, whichever are more; 0 if it is parked or closed."""
        if self.closed or self.asleep:
            return 0
        return max(self.reserve_pages, self.extent.pages if self.extent else 0)


class KvCache:
    """All extents, leases and kept prefixes of one engine, within `budget_bytes`. Used by one thread at a time.

    `host_bytes` and `disk_bytes` limit the parked sessions' memory and disk space; beyond both, parking is refused. The
    budget covers the memory that sessions hold and were promised. Kept prefixes use the rest of the budget and are
    dropped first.

    The counts are kept as leases change, so that a step does not look at all of them. `held_pages`: the pages that are
    allocated now, including kept prefixes; a shared extent counts once. `claimed_pages`: the pages that sessions hold
    or were promised, not counting parked sessions; a shared extent counts once for each session, because each may come
    to need its own copy. `num_asleep`: the parked leases. `parked_rows`: the rows outside the budget, in host memory
    and on disk together.
    """

    def __init__(self, storage: Storage, *, budget_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> None:
        self.storage = storage
        self.page_bytes = storage.row_bytes * PAGE_ROWS
        self.total_pages = budget_bytes // self.page_bytes
        self._host_pages = host_bytes // self.page_bytes
        self._disk_pages = disk_bytes // self.page_bytes
        self.leases: set[Lease] = set()
        # Extents without a lease that a later session may share, the most recently used last. Dropped when room is
        # needed.
        self.kept: list[Extent] = []
        # Parked copies, in the order in which they were parked.
        self._parked: list[Parked] = []
        self.held_pages = self.claimed_pages = self.num_asleep = self.parked_rows = 0

    def open(self, reserve_rows: int) -> Lease | None:
        """Return a lease with room promised for `reserve_rows`, or None if not enough room is unclaimed now.

        Nothing is allocated before the lease has rows.
        """
        pages = pages_of(reserve_rows)
        if self.claimed_pages + pages > self.total_pages:
            return None
        lease = Lease(pages)
        self.leases.add(lease)
        self.claimed_pages += pages
        return lease

    def room(self, reserve_rows: int) -> int:
        """Return how many leases with `reserve_rows` could be opened now. Any thread may call it."""
        return max(0, (self.total_pages - self.claimed_pages) // pages_of(reserve_rows))

    def close(self, lease: Lease) -> None:
        """Give back everything that the lease holds, including its parked copy. Closing it again is a no-op."""
        self._release(lease)
        if lease.parked:
            self._discard(lease.parked)
            lease.parked = None
        self._set_asleep(lease, False)
        self.claimed_pages -= lease.claim_pages
        lease.closed = True
        self.leases.discard(lease)

    def ensure(self, lease: Lease, rows: int, valid: int) -> bool:
        """Make the lease's extent its own, with room for `rows` rows; the first `valid` rows in it stay.

        Must be called before rows from `valid` on are written. The lease must not be parked. The storage may have to
        copy the rows if the extent is shared or too small, so a growing extent gets an eighth more room than it needs.
        Returns False, without any change, if there is no room.
        """
        assert not lease.asleep
        pages = pages_of(rows)
        old = lease.extent
        if old and old.holders == 1 and old.pages >= pages:
            self.storage.own(old.handle, valid)
            return True
        # Room to grow, so that a conversation is not copied for every page it gains.
        wish = max(lease.reserve_pages, pages + pages // 8 if old else pages)
        size = wish if self._fits(lease, wish) else pages
        if not self._fits(lease, size):
            return False
        # Kept prefixes are dropped first: _fits has counted only the pages that leases hold and were promised.
        while self.kept and self.held_pages + size > self.total_pages:
            self.drop_kept(self.kept[0])
        shared = old is not None and old.holders > 1
        handle = self.storage.extend(old.handle if old else None, size * PAGE_ROWS, valid, shared=shared)
        self.held_pages += size
        self.claimed_pages += max(lease.reserve_pages, size) - lease.claim_pages
        if old:
            old.holders -= 1
            self.held_pages -= 0 if old.holders else old.pages
        lease.extent = Extent(handle, size)
        return True

    def evict(self, lease: Lease, first: int, end: int, stop: int) -> bool:
        """Drop rows first .. end of the lease's extent and move the rows up to `stop` down.

        The extent must be the lease's own. Returns False if this model's keys cannot be moved.
        """
        assert lease.extent
        assert lease.extent.holders == 1
        return self.storage.evict(lease.extent.handle, first, end, stop)

    def share(self, source: Extent, lease: Lease) -> None:
        """Make `lease`, which must hold nothing yet, a holder of `source`. Nothing is copied before a write."""
        assert lease.extent is None
        if source in self.kept:
            # The most recently used extent is dropped last.
            self.kept.remove(source)
            self.kept.append(source)
        source.holders += 1
        self.claimed_pages += max(lease.reserve_pages, source.pages) - lease.claim_pages
        lease.extent = source

    def fits_another(self, extent: Extent) -> bool:
        """Return whether there is unclaimed room for another lease that comes to need its own copy of the extent."""
        return self.claimed_pages + extent.pages <= self.total_pages

    def keep(self, lease: Lease) -> Extent | None:
        """Keep the lease's extent for others to share after the lease is closed, and return it; None without an extent.

        It stays until `drop_kept`, or until the room is needed.
        """
        extent = lease.extent
        if extent:
            extent.holders += 1
            self.kept.append(extent)
        return extent

    def drop_kept(self, extent: Extent) -> None:
        """Stop keeping an extent. Its last holder frees its memory. Raises ValueError if it is not kept."""
        self.kept.remove(extent)
        self._drop_holder(extent)

    def park(self, lease: Lease, rows: int) -> bool:
        """Move the lease's first `rows` rows out of the budget and give up its claim.

        Copies to host memory. If that is full, moves the copies that were parked first to disk. Returns False, without
        any change, if neither has room; True if the lease is already parked.
        """
        if lease.asleep:
            return True
        if lease.extent and rows:
            if not self._has_parking_room(pages_of(rows)):
                return False
            lease.parked = Parked(self.storage.to_host(lease.extent.handle, rows), rows)
            self._parked.append(lease.parked)
            self.parked_rows += rows
            self._spill()
        self._release(lease)
        self._set_asleep(lease, True)
        return True

    def wake(self, lease: Lease, rows: int) -> bool:
        """Bring a parked lease back, with its reserve promised again and room for `rows` rows.

        Copies its rows back and discards the parked copy. Returns False, without any change, if there is no room now;
        True if the lease is not parked.
        """
        if not lease.asleep:
            return True
        pages = max(lease.reserve_pages, pages_of(rows), pages_of(lease.parked.rows) if lease.parked else 0)
        if self.claimed_pages + pages > self.total_pages:
            return False
        self._set_asleep(lease, False)
        parked = lease.parked
        if parked is None:
            return True
        if not self.ensure(lease, max(rows, parked.rows), 0):
            self._set_asleep(lease, True)
            return False
        assert lease.extent
        self.storage.restore(parked.handle, lease.extent.handle, parked.rows)
        self._discard(parked)
        lease.parked = None
        return True

    def truncate_parked(self, lease: Lease, rows: int) -> None:
        """Limit a parked copy to its first `rows` rows, because the others were rolled back.

        A no-op for a lease without a parked copy.
        """
        if lease.parked and rows < lease.parked.rows:
            self.parked_rows -= lease.parked.rows - rows
            lease.parked.rows = rows

    def _fits(self, lease: Lease, pages: int) -> bool:
        others = self.claimed_pages - lease.claim_pages
        return others + max(pages, lease.reserve_pages) <= self.total_pages

    def _set_asleep(self, lease: Lease, asleep: bool) -> None:
        claimed = lease.claim_pages
        self.num_asleep += asleep - lease.asleep
        lease.asleep = asleep
        self.claimed_pages += lease.claim_pages - claimed

    def _release(self, lease: Lease) -> None:
        if lease.extent:
            self.claimed_pages -= max(0, lease.extent.pages - lease.reserve_pages)
            self._drop_holder(lease.extent)
            lease.extent = None

    def _drop_holder(self, extent: Extent) -> None:
        extent.holders -= 1
        if not extent.holders:
            self.held_pages -= extent.pages
            self.storage.free(extent.handle)

    def _has_parking_room(self, pages: int) -> bool:
        used = sum(pages_of(p.rows) for p in self._parked)
        return used + pages <= self._host_pages + self._disk_pages

    def _spill(self) -> None:
        """Move the copies that were parked first to disk until host memory is within its limit."""
        in_host = [p for p in self._parked if not p.on_disk]
        used = sum(pages_of(p.rows) for p in in_host)
        for parked in in_host:
            if used <= self._host_pages:
                return
            try:
                parked.handle = self.storage.to_disk(parked.handle)
            except OSError as error:
                # Exceeding the host limit is better than losing a session.
                log.warning("parked sessions stay in host memory: %s", error.strerror)
                self._disk_pages = 0
                return
            parked.on_disk = True
            used -= pages_of(parked.rows)

    def _discard(self, parked: Parked) -> None:
        self.storage.discard(parked.handle)
        self._parked.remove(parked)
        self.parked_rows -= parked.rows

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts, claims and copies contradict each other; for tests."""
        count: dict[int, int] = {}
        extents: dict[int, Extent] = {}
        for extent in [*self.kept, *(x.extent for x in self.leases if x.extent)]:
            count[id(extent)] = count.get(id(extent), 0) + 1
            extents[id(extent)] = extent
        assert all(extents[i].holders == n for i, n in count.items())
        assert self.held_pages == sum(extent.pages for extent in extents.values())
        assert self.claimed_pages == sum(lease.claim_pages for lease in self.leases)
        assert self.num_asleep == sum(lease.asleep for lease in self.leases)
        assert self.parked_rows == sum(parked.rows for parked in self._parked)
        assert self.claimed_pages <= self.total_pages
        assert self.held_pages <= self.total_pages
        for lease in self.leases:
            assert not lease.closed
            assert not (lease.extent and lease.parked)
            assert lease.extent is None or not lease.asleep
        assert {id(p) for p in self._parked} == {id(x.parked) for x in self.leases if x.parked}


def pages_of(rows: int) -> int:
    """Return the number of whole pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)
