"""Conversations that outlive their server, in SQLite: one row each, written by a thread of its own, the latest state last.

What a row holds is its writer's: `kept` is JSON. Tokens are stored as hashes.
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


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One conversation. `who`: a hash of its caller's key. `token`: the hash of what resumes it. `kept`: JSON."""

    id: str
    key_hash: str
    token: bytes
    snapshot: bytes


class SessionStore:
    """A folder's conversations. Raises StoreError where the folder cannot be written to."""

    def __init__(self, folder: Path, max_age_s: float) -> None:
        self._path = folder / FILE
        self._max_age_s = max_age_s
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            with self._open() as db:
                db.execute("pragma journal_mode=wal")
                db.execute(
                    "create table if not exists sessions (id text primary key, who text not null, token blob not null, kept blob not null, at real not null)"
                )
                db.execute("delete from sessions where at < ?", (time.time() - max_age_s,))
            db.close()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path}: {error}") from None
        # Bound: one entry a session, the latest; who writes faster than the disk replaces what waits.
        self._waiting: dict[str, StoredSession | None] = {}
        self._waiters: list[Future[None]] = []
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="sessions", daemon=True)
        self._thread.start()

    def put(self, session: StoredSession) -> Future[None]:
        """Keep this state of a session instead of the last. Does not wait: the result is there when it is written, or cannot be."""
        return self._later(session.id, session)

    def forget(self, session_id: str) -> None:
        """The session is over. Does not wait."""
        self._later(session_id, None)

    def get(self, session_id: str) -> StoredSession | None:
        """The latest state of a session. Waits for the disk: call it in a thread."""
        with self._lock:
            if session_id in self._waiting:
                return self._waiting[session_id]
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
        """Write what waits, and stop."""
        self._wake.put(False)
        self._thread.join(10)

    def _later(self, session_id: str, state: StoredSession | None) -> Future[None]:
        written: Future[None] = Future()
        with self._lock:
            self._waiting[session_id] = state
            self._waiters.append(written)
        self._wake.put(True)
        return written

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10, isolation_level=None)

    def _write(self) -> None:
        db = self._open()
        # A process that is killed loses nothing; a machine that loses power may lose the last moment.
        db.execute("pragma synchronous=normal")
        going = True
        while going:
            going = self._wake.get()
            with self._lock:
                states = dict(self._waiting)
                waiters, self._waiters = self._waiters, []
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
                # What is kept is not worth more than what is going on.
                log.error("sessions could not be written: %s", error)
            with self._lock:
                for session_id, state in states.items():
                    if self._waiting.get(session_id, ...) is state:
                        del self._waiting[session_id]
            for waiter in waiters:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(None)
        db.close()
