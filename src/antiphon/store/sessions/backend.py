"""The interface of a backend of the session store: a database with blocking reads and writes.

One writer (`writer.py`) serves all backends, and calls this interface.
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

# Timeout, in seconds, for an answer of the backend.
BUSY_S = 1.0
# Exclusive upper bounds of a row's numbers and of `restores`. A claim increments `fence` and `restores`; the integers
# of all backends can hold larger values.
MAX_NUMBER, MAX_RESTORES = 10**15, 10**9


@dataclass(slots=True)
class Write:
    """The pending writes of one session, applied in the order of the fields."""

    # The owner and fence that must be current for the write to succeed.
    hold: Hold
    # The new row; None if the row stays as it is.
    row: StoredSession | None = None
    # Delete the earlier tail.
    clears_tail: bool = False
    # Chunks to add to the tail, by `at_ms`.
    chunks: dict[int, bytes] = field(default_factory=dict)
    # Release the session, which has no owner afterwards.
    releases: bool = False
    # Delete the session. All other fields except `hold` are ignored then.
    forgets: bool = False

    @property
    def next_owner(self) -> str:
        """The row's owner after this write; "" after a release."""
        return "" if self.releases else self.hold.owner

    @property
    def values(self) -> tuple[int | str | bytes, ...]:
        """The values of the row's fields after this write, in the order of `row_of`; () if it writes no row."""
        if (row := self.row) is None:
            return ()
        counts = row.received.events, row.received.audio_ms, 0 if self.releases else row.restores
        return row.version, row.key_hash, row.token, row.snapshot, self.next_owner, row.fence, *counts


class Backend(Ownership, Protocol):
    """A database of rows and hosts. Methods block for about BUSY_S at most. They raise StoreError if it fails.

    One thread calls `write` and `purge`; any thread may call the other methods.
    """

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        """Apply each write atomically and independently. Returns an error for each: SupersededError, RowError or None.

        Idempotent: after a failure with an unknown outcome, the same writes may be repeated.
        """
        ...

    def read(self, session_id: str) -> StoredSession | None:
        """Return the row of a session. Returns None and raises RowError as `SessionStore.get` does."""
        ...

    def purge(self) -> None:
        """Delete expired rows, tails without a row, and dead hosts."""
        ...

    def close(self) -> None:
        """Close all connections to the database. Does not raise."""
        ...


def row_of(session_id: str, values: Sequence[object]) -> StoredSession:
    """Build a row from a backend's values, in this order: version, key_hash, token, snapshot, owner, fence, received
    events, received milliseconds, restores.

    Raises RowError if a value has another type, a number is out of range, or the row has another version.
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
    """Build a host from a backend's values. Invalid values count as unknown: a host that has a key is alive, whatever
    the key contains.
    """
    known = isinstance(load, int | float) and math.isfinite(load)
    return Host(name, address if isinstance(address, str) else "", float(str(load)) if known else None, bool(draining))


def chunk_of(session_id: str, at_ms: object, data: object) -> TailChunk:
    """Build a chunk of a tail from a backend's values. Raises RowError if a value has another type."""
    if not (isinstance(at_ms, int) and isinstance(data, bytes)):
        raise damaged(session_id)
    return TailChunk(at_ms, data)


def damaged(session_id: str) -> RowError:
    """Return the error for a row with invalid content."""
    return RowError(f"the stored session {session_id} is damaged")


def other_version(session_id: str, version: object) -> RowError:
    """Return the error for a row that another version of antiphon wrote."""
    return RowError(
        f"the stored session {session_id} has version {version}, and this version of antiphon reads {ROW_VERSION}"
    )


def too_large(session_id: str, num_bytes: int) -> RowError:
    """Return the error for a session that is too large to store, because its write would delay all other sessions."""
    most = f"at most {MAX_SNAPSHOT_BYTES >> 20} MiB of a conversation are stored"
    return RowError(f"the session {session_id} cannot be stored: it has {num_bytes >> 20} MiB, and {most}")


def superseded(session_id: str) -> SupersededError:
    """Return the error for a write whose hold is no longer valid."""
    return SupersededError(f"the stored session {session_id} belongs to another host by now, or is deleted")
