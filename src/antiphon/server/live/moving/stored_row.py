"""The row of one live session in the session store, written by the host that owns it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial

import anyio

from antiphon.errors import StoreError, SupersededError
from antiphon.server.state import ServerState
from antiphon.store.sessions import ReceivedCounts, StoredSession, TailChunk

# Maximum time, in seconds, for which a session's frames wait for a write to the store: normally, and after a failed
# write was reported to the client.
STORE_S, STORE_DEGRADED_S = 3.0, 0.1
# After a host has served a session for this time, in seconds, the session is not suspected of crashing hosts.
HARMLESS_S = 60.0


class Kept(Enum):
    """The outcome of a session's last write to the store.

    - STORED: the session is stored, or there was nothing to store.
    - DEGRADED: the write failed, or took too long.
    - SUPERSEDED: another host owns the session. This is final.
    """

    STORED = "stored"
    DEGRADED = "degraded"
    SUPERSEDED = "superseded"


class StoredRow:
    """The row of one live session. Nothing is stored if the server has no store.

    `row` is the row that the session was restored from, as this host has claimed it; None for a new session.
    """

    def __init__(self, state: ServerState, row: StoredSession | None) -> None:
        self._state = state
        self._hold = row.hold if row else None
        self._before = row.received if row else ReceivedCounts()
        self._restores = row.restores if row else 0
        self._since_s = time.monotonic()
        self._is_stored = row is not None
        # Number of the client's messages that the last written snapshot covers.
        self._stored_events = row.received.events if row else 0
        # The store's state as it was last reported to the client, or as it will be reported next.
        self.kept = Kept.STORED

    def put_row(
        self, row: StoredSession, num_events: int, audio_ms: int, *, turn_kept: bool = False, clears_tail: bool = False
    ) -> Future[None] | None:
        """Write the row, with its owner and counts. Does not wait. Returns None if the session is not stored.

        `num_events` is the number of the client's messages that the row covers, and `audio_ms` the duration of the
        client's audio that this host has received. With `turn_kept`, the session is not suspected of crashing hosts.
        The tail is deleted if `clears_tail` is true.
        """
        store = self._state.sessions.store
        if store is None or self.kept is Kept.SUPERSEDED:
            return None
        if turn_kept or time.monotonic() - self._since_s >= HARMLESS_S:
            self._restores = 0
        counts = ReceivedCounts(num_events, self._before.audio_ms + audio_ms)
        owner, fence = (self._hold.owner, self._hold.fence) if self._hold else (self._state.sessions.host_name, 1)
        row = replace(row, owner=owner, fence=fence, received=counts, restores=self._restores)
        self._hold, self._is_stored = row.hold, True
        written = store.put(row, turn_kept=clears_tail)
        written.add_done_callback(partial(self._note_written, counts.events))
        return written

    def append(self, chunk: TailChunk) -> None:
        """Add a chunk to the session's tail. Does not wait."""
        store = self._state.sessions.store
        if store and self._hold and self.is_stored:
            store.append_tail(self._hold, chunk)

    def _note_written(self, num_events: int, written: Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._stored_events = max(self._stored_events, num_events)

    @property
    def stored_events(self) -> int | None:
        """Number of messages that the client need not send again, even if this host dies; None if the session is not
        stored.
        """
        return self._stored_events if self._hold else None

    async def wait(self, written: Future[None] | None) -> bool:
        """Wait for a write of `put`, for at most STORE_S, and return whether `kept` has changed.

        Waits for at most STORE_DEGRADED_S while the store is degraded.
        """
        if written is None:
            return False
        before = self.kept
        now = Kept.DEGRADED
        try:
            with anyio.move_on_after(STORE_DEGRADED_S if before is Kept.DEGRADED else STORE_S):
                await asyncio.wrap_future(written)
                now = Kept.STORED
        except SupersededError:
            now = Kept.SUPERSEDED
        except StoreError:
            pass
        if self.kept is not Kept.SUPERSEDED:
            self.kept = now
        return self.kept is not before

    @property
    def is_on(self) -> bool:
        """True if the server has a store."""
        return self._state.sessions.store is not None

    @property
    def is_stored(self) -> bool:
        """True if this host owns the session in the store, or will own it after the store recovers."""
        return self._hold is not None and self._is_stored and self.kept is not Kept.SUPERSEDED

    @property
    def can_move(self) -> bool:
        """True if another host can continue the session, because the last write was successful."""
        return self.is_stored and self.kept is Kept.STORED

    async def release(self) -> bool:
        """Release the session, and wait until any host may claim it. Returns False if that was not written in time."""
        store = self._state.sessions.store
        if store is None or self._hold is None or not self.can_move:
            return False
        released = store.release(self._hold)
        self._is_stored = False
        with anyio.move_on_after(STORE_S), suppress(StoreError):
            await asyncio.wrap_future(released)
            return True
        return False

    def end(self) -> None:
        """Delete the stored session, because it is over; while the server drains, release it instead. Does not wait."""
        store = self._state.sessions.store
        if store and self._hold and self.is_stored:
            if self._state.admission.draining:
                store.release(self._hold)
            else:
                store.forget(self._hold)
