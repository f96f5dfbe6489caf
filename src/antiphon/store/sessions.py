"""Conversations that outlive their server, in SQLite: one row for each, with its latest state, written by a thread.

What a snapshot holds is up to its writer. Resume tokens and API keys are stored as hashes.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from antiphon.errors import StoreError

log = logging.getLogger(__name__)
FILE = "sessions.sqlite3"
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
    `max_age_s` are deleted at the start and not found later. Starts a thread, which `close` ends. Raises StoreError
    where the folder cannot be written to.
    """

    def __init__(self, folder: Path, max_age_s: float) -> None:
        self._path = folder / FILE
        self._max_age_s = max_age_s
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            with self._open() as db:
                db.execute("pragma journal_mode=wal")
                db.execute(SCHEMA)
                db.execute("delete from sessions where at < ?", (time.time() - max_age_s,))
            db.close()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path}: {error}") from None
        # The latest state of each session that is not written yet; None: it is to be deleted. Bounded by the number of
        # sessions, because a newer state replaces the one that waits.
        self._pending: dict[str, StoredSession | None] = {}
        self._pending_writes: list[Future[None]] = []
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="sessions", daemon=True)
        self._thread.start()

    def put(self, session: StoredSession) -> Future[None]:
        """Replace the stored state of a session. Does not wait; the future is done when the state is written or could
        not be, which is logged and raises nothing.
        """
        return self._enqueue(session.id, session)

    def forget(self, session_id: str) -> None:
        """Delete a session that is over. Does not wait."""
        self._enqueue(session_id, None)

    def get(self, session_id: str) -> StoredSession | None:
        """The latest state of a session, also one that is not written yet; None where there is none. Reads the disk, so
        callers on an event loop run it in a thread.
        """
        with self._lock:
            if session_id in self._pending:
                return self._pending[session_id]
        try:
            db = self._open()
            row = db.execute(
                "select id, who, token, kept from sessions where id = ? and at >= ?",
                (session_id, time.time() - self._max_age_s),
            ).fetchone()
            db.close()
        except sqlite3.Error as error:
            log.error("a session could not be read: %s", error)
            return None
        return StoredSession(*row) if row else None

    def close(self) -> None:
        """Write what is pending, and stop the thread. Blocks for at most ten seconds."""
        self._wake.put(False)
        self._thread.join(10)

    def _enqueue(self, session_id: str, state: StoredSession | None) -> Future[None]:
        written: Future[None] = Future()
        with self._lock:
            self._pending[session_id] = state
            self._pending_writes.append(written)
        self._wake.put(True)
        return written

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10, isolation_level=None)

    def _write(self) -> None:
        db = self._open()
        # With this, a process that is killed loses nothing; a machine that loses power may lose the last second.
        db.execute("pragma synchronous=normal")
        is_open = True
        while is_open:
            is_open = self._wake.get()
            with self._lock:
                states = dict(self._pending)
                writes, self._pending_writes = self._pending_writes, []
            try:
                for session_id, state in states.items():
                    if state is None:
                        db.execute("delete from sessions where id = ?", (session_id,))
                    else:
                        db.execute(
                            "insert or replace into sessions values (?, ?, ?, ?, ?)",
                            (state.id, state.key_hash, state.token, state.snapshot, time.time()),
                        )
            except sqlite3.Error as error:
                # The live sessions matter more than the stored ones.
                log.error("sessions could not be written: %s", error)
            with self._lock:
                for session_id, state in states.items():
                    if self._pending.get(session_id, ...) is state:
                        del self._pending[session_id]
            for write in writes:
                if write.set_running_or_notify_cancel():
                    write.set_result(None)
        db.close()
