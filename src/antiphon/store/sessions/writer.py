"""The session store on top of any backend. A thread writes, so that no session waits for a disk or a network.

`backend.py` defines what a backend is. This module knows no database.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from antiphon.errors import RowError, StoreError, SupersededError
from antiphon.store.sessions.api import (
    MAX_SNAPSHOT_BYTES,
    MAX_TAIL_BYTES,
    ClaimRefusal,
    Hold,
    Host,
    SessionStore,
    StoredSession,
    TailChunk,
)
from antiphon.store.sessions.backend import BUSY_S, Backend, Write, superseded, too_large

log = logging.getLogger(__name__)
# Interval of retries of a failed write, in seconds.
RETRY_S = 2.0
# Interval at which expired conversations are deleted, in seconds.
PURGE_EVERY_S = 3600.0
# Limit on the writes of several sessions that are sent to the backend at once, in bytes. A single write may be larger.
ROUND_BYTES = 4 << 20
# Timeouts, in seconds: a claim waits FLUSH_S for its session's pending writes, and `close` waits CLOSE_S for the
# thread.
FLUSH_S, CLOSE_S = 3 * BUSY_S, 10.0


@dataclass(slots=True)
class _Waiting:
    """A write that is pending or in progress, and the futures that it will complete."""

    write: Write
    futures: list[Future[None]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        row = self.write.row
        # The snapshot may have an invalid type, which the backend reports.
        snapshot = len(row.snapshot) if row and isinstance(row.snapshot, bytes) else 0
        return snapshot + sum(map(len, self.write.chunks.values()))


class QueuedStore(SessionStore):
    """A SessionStore on top of `backend`. Calls `backend.write` on its own thread; `close` ends thread and backend.

    A failed write makes the store *degraded*: writes stay pending and are retried every RETRY_S until they succeed.
    `clock` returns monotonic seconds, and times the hourly deletion of expired rows.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        # The pending write of each session. Their size is bounded: a newer row replaces the session's pending row, and
        # each tail has at most MAX_TAIL_BYTES.
        self._pending: dict[str, _Waiting] = {}
        # The writes in progress.
        self._in_hand: dict[str, _Waiting] = {}
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="sessions", daemon=True)
        self._thread.start()

    @property
    def degraded(self) -> str | None:
        return self._failure

    # --- writes -------------------------------------------------------------------------------------------------------

    def put(self, session: StoredSession, *, turn_kept: bool = False) -> Future[None]:
        # The snapshot may have an invalid type, which the backend reports later.
        num_bytes = len(session.snapshot) if isinstance(session.snapshot, bytes) else 0
        if num_bytes > MAX_SNAPSHOT_BYTES:
            refused: Future[None] = Future()
            refused.set_exception(too_large(session.id, num_bytes))
            log.error("%s", refused.exception())
            return refused
        return self._enqueue(Write(session.hold, session, clears_tail=turn_kept))

    def append_tail(self, hold: Hold, chunk: TailChunk) -> Future[None]:
        return self._enqueue(Write(hold, chunks={chunk.at_ms: chunk.data}))

    def release(self, hold: Hold) -> Future[None]:
        return self._enqueue(Write(hold, releases=True))

    def forget(self, hold: Hold) -> Future[None]:
        return self._enqueue(Write(hold, forgets=True))

    def _enqueue(self, write: Write) -> Future[None]:
        written: Future[None] = Future()
        with self._lock:
            waiting = self._pending.get(write.hold.session_id)
            refusal, merged = (None, write) if waiting is None else _merged(waiting.write, write)
            if refusal:
                written.set_exception(refusal)
                return written
            if waiting is None or waiting.write.hold != write.hold:
                # The pending write of an earlier owner is invalid.
                _finish(waiting.futures if waiting else (), superseded(write.hold.session_id))
                self._pending[write.hold.session_id] = waiting = _Waiting(merged)
            waiting.write = merged
            if self._failure is None:
                waiting.futures.append(written)
            else:
                written.set_exception(StoreError(self._failure))
        self._wake.put(True)
        return written

    # --- reads and claims ---------------------------------------------------------------------------------------------

    def get(self, session_id: str) -> StoredSession | None:
        with self._lock:
            found = self._pending.get(session_id) or self._in_hand.get(session_id)
            write = replace(found.write) if found else None
        if write and (newer := self._newer(write)):
            return newer
        if write and write.forgets:
            return None
        row = write.row if write and write.row else self._backend.read(session_id)
        if row and write and write.hold == row.hold:
            row = replace(row, owner=write.next_owner, restores=0 if write.releases else row.restores)
        return row

    def _newer(self, write: Write) -> StoredSession | None:
        """Return the stored row if its owner is newer, in which case the pending write will fail. Returns None if the
        owner is not newer, or if the row cannot be read.
        """
        with suppress(StoreError):
            row = self._backend.read(write.hold.session_id)
            return row if row and row.fence > write.hold.fence else None
        return None

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        return self._backend.tail(session_id)

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        self._flush(session_id)
        return self._backend.claim(session_id, new_owner, seen_fence)

    def _flush(self, session_id: str) -> None:
        """Wait until a session has no pending writes. Raises StoreError if that fails."""
        written: Future[None] = Future()
        with self._lock:
            waiting = self._pending.get(session_id) or self._in_hand.get(session_id)
            if waiting is None:
                return
            waiting.futures.append(written)
        self._wake.put(True)
        try:
            # If that write itself is refused, the claim may still succeed.
            with suppress(SupersededError, RowError):
                written.result(FLUSH_S)
        except TimeoutError:
            raise StoreError(f"session {session_id} could not be written in {FLUSH_S:.0f} s") from None

    def renew(self, host: Host) -> None:
        self._backend.renew(host)

    def unregister(self, name: str) -> None:
        self._backend.unregister(name)

    def hosts(self) -> tuple[Host, ...]:
        return tuple(sorted(self._backend.hosts(), key=lambda host: host.name))

    def host(self, name: str) -> Host | None:
        return self._backend.host(name)

    def close(self, host_name: str = "") -> None:
        self._wake.put(False)
        self._thread.join(CLOSE_S)
        if host_name:
            try:
                self._backend.unregister(host_name)
            except StoreError as error:
                log.warning("%s cannot be unregistered; other hosts see it until its key expires: %s", host_name, error)
        self._backend.close()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        purged_s, is_open = self._clock(), True
        while is_open:
            with suppress(queue.Empty):
                is_open = self._wake.get(timeout=RETRY_S if self._failure else PURGE_EVERY_S)
            try:
                self._write_pending()
                if self._clock() - purged_s >= PURGE_EVERY_S:
                    self._backend.purge()
                    purged_s = self._clock()
            except Exception as error:
                # Catch everything: if the thread ended, sessions would wait forever.
                self._degrade(f"conversations cannot be stored: {error}")

    def _write_pending(self) -> None:
        """Write all pending writes. Raises the backend's exception if the backend as a whole fails."""
        takes_oldest = False
        while True:
            with self._lock:
                taken = self._in_hand = self._take_round(takes_oldest=takes_oldest)
            failures = self._backend.write([waiting.write for waiting in taken.values()]) if taken else ()
            for wrong in filter(None, failures):
                log.log(logging.WARNING if isinstance(wrong, SupersededError) else logging.ERROR, "%s", wrong)
            with self._lock:
                self._in_hand = {}
                if self._failure:
                    log.warning("conversations are stored again")
                self._failure = None
            for waiting, failure in zip(taken.values(), failures, strict=True):
                _finish(waiting.futures, failure)
            if not taken:
                return
            takes_oldest = not takes_oldest

    def _take_round(self, *, takes_oldest: bool) -> dict[str, _Waiting]:
        """Take the writes of the next round: the smallest, so that one key's large conversations do not delay those of
        other keys, or the write that has waited longest. The caller has to hold the lock.
        """
        order = list(self._pending)[:1] if takes_oldest else sorted(self._pending, key=self._size_of)
        taken, left = dict[str, _Waiting](), ROUND_BYTES
        for session_id in order:
            left -= self._size_of(session_id)
            if taken and left < 0:
                break
            taken[session_id] = self._pending.pop(session_id)
        return taken

    def _size_of(self, session_id: str) -> int:
        return self._pending[session_id].num_bytes

    def _degrade(self, failure: str) -> None:
        with self._lock:
            if self._failure is None:
                # Only logged: live sessions continue without the store.
                log.error("%s", failure)
            self._failure = failure
            for session_id, earlier in self._in_hand.items():
                # The failed write is pending again, merged before any later one.
                later = self._pending.get(session_id)
                again = _Waiting(earlier.write, earlier.futures)
                if later:
                    refusal, merged = _merged(earlier.write, later.write)
                    again = _Waiting(earlier.write if refusal else merged, [*earlier.futures, *later.futures])
                self._pending[session_id] = again
            self._in_hand = {}
            waiting = list(chain.from_iterable(w.futures for w in self._pending.values()))
            for each in self._pending.values():
                each.futures = []
        _finish(waiting, StoreError(failure))


def _merged(earlier: Write, later: Write) -> tuple[StoreError | None, Write]:
    """Merge two writes of the same session. Returns the error that refuses `later`, or None; and the write to keep."""
    session_id = later.hold.session_id
    if later.hold != earlier.hold:
        # Of two owners, the one with the newer fence wins; the backend decides the rest.
        is_older = later.hold.fence < earlier.hold.fence
        return (superseded(session_id) if is_older else None), later
    if later.forgets or earlier.forgets:
        # A forgotten session is not created again.
        refused = None if later.forgets else superseded(session_id)
        return refused, Write(later.hold, forgets=True)
    if earlier.releases and not later.releases:
        return superseded(session_id), earlier
    chunks = {} if later.clears_tail else dict(earlier.chunks)
    for at_ms, data in later.chunks.items():
        if sum(map(len, chunks.values())) + len(data) <= MAX_TAIL_BYTES:
            chunks.setdefault(at_ms, data)
    clears_tail, releases = earlier.clears_tail or later.clears_tail, earlier.releases or later.releases
    return None, Write(later.hold, later.row or earlier.row, clears_tail, chunks, releases)


def _finish(writes: Sequence[Future[None]], failure: StoreError | None) -> None:
    for write in writes:
        if write.set_running_or_notify_cancel():
            if failure is None:
                write.set_result(None)
            else:
                write.set_exception(failure)
