"""What a backend of sessions has to be, for the writer that all backends share: a database that reads and writes at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.errors import RowError, StoreError, SupersededError
from antiphon.store.sessions.api import (
    MAX_SNAPSHOT_BYTES,
    ROW_VERSION,
    Hold,
    Host,
    Ownership,
    ReceivedCounts,
    StoredSession,
    TailChunk,
)

# How long a backend may take to answer, in seconds.
BUSY_S = 1.0
# What a row's numbers are below: 15 digits, and 9 of `restores`. A claim raises two of them, and each backend counts in
# numbers that hold more than that.
MAX_NUMBER, MAX_RESTORES = 10**15, 10**9


@dataclass(slots=True)
class Write:
    """What is to be written of one session, in this order: its row, the end of the earlier tail, chunks, and a release.

    A session that is forgotten is only that. `chunks`: of the tail, by `at_ms`.
    """

    hold: Hold
    row: StoredSession | None = None
    clears_tail: bool = False
    chunks: dict[int, bytes] = field(default_factory=dict)
    releases: bool = False
    forgets: bool = False

    @property
    def next_owner(self) -> str:
        """The owner that the row has after it."""
        return "" if self.releases else self.hold.owner

    @property
    def values(self) -> tuple[int | str | bytes, ...]:
        """The values of its row's fields as they are after it, in the order of `row_of`; none if it writes no row."""
        if (row := self.row) is None:
            return ()
        counts = row.received.events, row.received.audio_ms, 0 if self.releases else row.restores
        return row.version, row.key_hash, row.token, row.snapshot, self.next_owner, row.fence, *counts


class Backend(Ownership, Protocol):
    """Where rows and hosts are. All methods block, for BUSY_S or little more, and raise StoreError for a failing
    backend.

    `write` and `purge` are called by one thread, the others by any.
    """

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        """Write each, by itself and as a whole, and return what was wrong with each: SupersededError, RowError or None.

        Doing it again, after a failure that left open whether it was done, changes nothing.
        """
        ...

    def read(self, session_id: str) -> StoredSession | None:
        """The row of a session. None, and RowError, as `SessionStore.get`."""
        ...

    def purge(self) -> None:
        """Delete what is too old."""
        ...

    def close(self) -> None:
        """Close connections. Does not raise."""
        ...


def row_of(session_id: str, values: Sequence[object]) -> StoredSession:
    """Make a row of the values of its fields as a backend has them, in the order of Redis's and the tables' columns:
    version, key_hash, token, snapshot, owner, fence, received events and milliseconds, restores.

    Raises RowError for values of another type, numbers that no host writes, and a row of another version.
    """
    version, key_hash, token, snapshot, owner, fence, events, audio_ms, restores = values
    numbers = [version, fence, events, audio_ms, restores]
    if not (
        all(isinstance(n, int) and 0 <= n < MAX_NUMBER for n in numbers)
        and int(str(restores)) < MAX_RESTORES
        and isinstance(key_hash, str)
        and isinstance(owner, str)
        and isinstance(token, bytes)
        and isinstance(snapshot, bytes)
    ):
        raise damaged(session_id)
    if version != ROW_VERSION:
        raise other_version(session_id, version)
    counts = [int(str(n)) for n in numbers]
    received = ReceivedCounts(counts[2], counts[3])
    return StoredSession(session_id, key_hash, token, snapshot, owner, counts[1], received, counts[4], counts[0])


def host_of(name: str, address: object, load: object, draining: object) -> Host:
    """Make a host of the values of its fields as a backend has them. What no host writes counts as not known: a host
    lives by its key, whatever is in it.
    """
    known = isinstance(load, int | float) and math.isfinite(load)
    return Host(name, address if isinstance(address, str) else "", float(str(load)) if known else None, bool(draining))


def chunk_of(session_id: str, at_ms: object, data: object) -> TailChunk:
    """Make a chunk of a tail. Raises RowError for values of another type."""
    if not (isinstance(at_ms, int) and isinstance(data, bytes)):
        raise damaged(session_id)
    return TailChunk(at_ms, data)


def damaged(session_id: str) -> RowError:
    """The error of a row that is no row."""
    return RowError(f"the stored session {session_id} is damaged")


def other_version(session_id: str, version: object) -> RowError:
    """The error of a row of another version of antiphon."""
    return RowError(
        f"the stored session {session_id} has version {version}, and this version of antiphon reads {ROW_VERSION}"
    )


def too_large(session_id: str, num_bytes: int) -> RowError:
    """The error of a session that is not stored, since all others would wait for it."""
    most = f"at most {MAX_SNAPSHOT_BYTES >> 20} MiB of a conversation are stored"
    return RowError(f"the session {session_id} cannot be stored: it has {num_bytes >> 20} MiB, and {most}")


def superseded(session_id: str) -> SupersededError:
    """The error of a write whose hold is void."""
    return SupersededError(f"the stored session {session_id} belongs to another host by now, or is deleted")
