"""Conversations that outlive their server, in SQLite: one row for each, with its latest state, written by a thread.

What a snapshot holds is up to its writer. Resume tokens and API keys are stored as hashes.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from antiphon.errors import StoreError

log = logging.getLogger(__name__)
FILE = "sessions.sqlite3"
# The format of the file (`pragma user_version`). Files of before there were formats have 0, and the same table.
FORMAT = 1
# How long a write waits for another process that holds the file, and how soon one that failed is tried again.
BUSY_S, RETRY_S = 1.0, 2.0
# What is wrong with one row, and not with the file.
ROW_ERRORS = (sqlite3.DataError, sqlite3.ProgrammingError)
# How often conversations that are too old are deleted.
PURGE_EVERY_S = 3600.0
# `who` and `kept` are StoredSession's `key_hash` and `snapshot`; `at` is when it was written, in seconds since 1970.
SCHEMA = """
create table if not exists sessions (
    id text primary key, who text not null, token blob not null, kept blob not null, at real not null
)
"""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One conversation. `key_hash`: the hash of the API key that opened it. `token`: the hash of the token that resumes
    it. `snapshot`: its state, as JSON.
    """

    id: str
    key_hash: str
    token: bytes
    snapshot: bytes


class SessionStore:
    """The stored conversations in a folder, which is created with access for its owner only. Conversations older than
    `max_age_s` are not found, and are deleted at the start and each hour. Deleted ones are overwritten in the files.

    Starts a thread, which `close` ends. A write that fails makes the store *degraded*: what is to be written waits, and
    is tried again every RETRY_S until it is written. `clock`: seconds since 1970. Raises StoreError where the folder
    cannot be written to, and for a file of a newer format.
    """

    def __init__(self, folder: Path, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE
        self._max_age_s = max_age_s
        self._clock = clock
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            with closing(self._open()) as db:
                self._prepare(db)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path}: {error}") from None
        # The latest state of each session that is not written yet; None: it is to be deleted. Bounded by the number of
        # sessions, because a newer state replaces the one that waits.
        self._pending: dict[str, StoredSession | None] = {}
        # Who waits for them, and for those that are being written.
        self._pending_writes: dict[str, list[Future[None]]] = {}
        self._in_hand: dict[str, list[Future[None]]] = {}
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="sessions", daemon=True)
        self._thread.start()

    @property
    def degraded(self) -> str | None:
        """Why what was put last could not be written; None while all is written. From any thread."""
        return self._failure

    def put(self, session: StoredSession) -> Future[None]:
        """Replace the stored state of a session. Does not wait; the future is done when the state is written.

        It fails with StoreError where that is not possible now: after BUSY_S at the latest, and at once while the store
        is degraded. The state is written when the store recovers, unless it is replaced before.
        """
        return self._enqueue(session.id, session)

    def forget(self, session_id: str) -> None:
        """Delete a session that is over. Does not wait; it is tried again until it is done, as `put` is."""
        self._enqueue(session_id, None)

    def get(self, session_id: str) -> StoredSession | None:
        """The latest state of a session, also one that is not written yet; None where there is none.

        Reads the disk, so callers on an event loop run it in a thread. Raises StoreError where it cannot be read.
        """
        with self._lock:
            if session_id in self._pending:
                return self._pending[session_id]
        try:
            with closing(self._open()) as db:
                row = db.execute(
                    "select id, who, token, kept from sessions where id = ? and at >= ?",
                    (session_id, self._clock() - self._max_age_s),
                ).fetchone()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from None
        return StoredSession(*row) if row else None

    def close(self) -> None:
        """Write what is pending, once, and stop the thread. Blocks for at most ten seconds."""
        self._wake.put(False)
        self._thread.join(10)

    def _enqueue(self, session_id: str, state: StoredSession | None) -> Future[None]:
        written: Future[None] = Future()
        with self._lock:
            self._pending[session_id] = state
            if self._failure is None:
                self._pending_writes.setdefault(session_id, []).append(written)
            else:
                written.set_exception(StoreError(self._failure))
        self._wake.put(True)
        return written

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        # What is deleted or replaced is overwritten with zeros.
        db.execute("pragma secure_delete=on")
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        (found,) = db.execute("pragma user_version").fetchone()
        if found > FORMAT:
            raise StoreError(
                f"{self._path} has format {found}, and this version of antiphon reads formats up to {FORMAT}: "
                "it was written by a newer one"
            )
        db.execute("pragma journal_mode=wal")
        db.execute(SCHEMA)
        self._purge(db)
        if found < FORMAT:
            # Files of the first format hold the text of conversations that were deleted.
            db.execute("vacuum")
            db.execute(f"pragma user_version={FORMAT}")
        db.execute("pragma wal_checkpoint(truncate)")

    def _purge(self, db: sqlite3.Connection) -> None:
        db.execute("delete from sessions where at < ?", (self._clock() - self._max_age_s,))
        # The log of writes holds what was deleted, too.
        db.execute("pragma wal_checkpoint(truncate)")

    def _write_all(self) -> None:
        db: sqlite3.Connection | None = None
        purged_s, is_open = self._clock(), True
        while is_open:
            with suppress(queue.Empty):
                is_open = self._wake.get(timeout=RETRY_S if self._failure else PURGE_EVERY_S)
            try:
                if db is None:
                    db = self._open()
                    # With this, a process that is killed loses nothing; a machine that loses power may lose the last
                    # second.
                    db.execute("pragma synchronous=normal")
                self._write_pending(db)
                if self._clock() - purged_s >= PURGE_EVERY_S:
                    self._purge(db)
                    purged_s = self._clock()
            except Exception as error:
                # Whatever it is, sessions must not wait for a thread that ended.
                self._degrade(f"conversations cannot be stored: {error}")
        if db:
            db.close()

    def _write_pending(self, db: sqlite3.Connection) -> None:
        """Write what waits, each session by itself: one that cannot be written takes no other with it.

        Raises what makes the file as a whole impossible to write to: it is full, locked, read-only or damaged.
        """
        with self._lock:
            states, self._in_hand = dict(self._pending), self._pending_writes
            self._pending_writes = {}
        failures = {name: _write(db, name, state, self._clock()) for name, state in states.items()}
        if None in states.values():
            # The log of writes holds what was deleted.
            db.execute("pragma wal_checkpoint(truncate)")
        for session_id, failure in failures.items():
            if failure:
                log.error("session %s: %s", session_id, failure)
            with self._lock:
                if self._pending.get(session_id, ...) is states[session_id]:
                    del self._pending[session_id]
            for write in self._in_hand.pop(session_id, ()):
                _finish(write, failure)
        with self._lock:
            if self._failure:
                log.warning("conversations are stored again")
            self._failure = None

    def _degrade(self, failure: str) -> None:
        with self._lock:
            if self._failure is None:
                # The live sessions matter more than the stored ones.
                log.error("%s", failure)
            self._failure = failure
            waiting = (*self._in_hand.values(), *self._pending_writes.values())
            self._in_hand, self._pending_writes = {}, {}
        for write in chain.from_iterable(waiting):
            _finish(write, failure)


def _write(db: sqlite3.Connection, session_id: str, state: StoredSession | None, now_s: float) -> str | None:
    """Write or delete one row; why that cannot be done for this row alone, or None. Raises sqlite3.DatabaseError."""
    try:
        if state is None:
            db.execute("delete from sessions where id = ?", (session_id,))
        else:
            row = (state.id, state.key_hash, state.token, state.snapshot, now_s)
            db.execute("insert or replace into sessions values (?, ?, ?, ?, ?)", row)
    except Exception as error:
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, ROW_ERRORS):
            raise
        return f"a conversation cannot be stored: {error}"
    return None


def _finish(write: Future[None], failure: str | None) -> None:
    if write.set_running_or_notify_cancel():
        if failure is None:
            write.set_result(None)
        else:
            write.set_exception(StoreError(failure))
