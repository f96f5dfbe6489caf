"""Stores sessions in SQLite, in a folder of one machine, for one host or a few processes that share the machine's disk.

A host is alive while its process holds a lock on a file. The operating system releases the lock when the process ends
in any way, so a killed server is dead at once, and the next one restores its sessions without waiting. A host that
hangs counts as dead after the TTL.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from antiphon.errors import RowError, StoreError
from antiphon.store.sessions.api import (
    HOST_TTL_S,
    MAX_TAIL_BYTES,
    ROW_VERSION,
    ClaimRefusal,
    Host,
    StoredSession,
    TailChunk,
)
from antiphon.store.sessions.backend import BUSY_S, Backend, Write, chunk_of, host_of, row_of, superseded

FILE = "sessions.sqlite3"
# The format of the file (`pragma user_version`). The oldest files have format 0. Files of format 1 have only the first
# table, without the columns that MIGRATION adds.
FORMAT = 2
# Errors of a single row, not of the file.
ROW_ERRORS = (sqlite3.DataError, sqlite3.ProgrammingError)
# `who` and `kept` are StoredSession's `key_hash` and `snapshot`; `at` is the time of writing, in seconds since 1970.
# The row of a forgotten session has an empty `kept`, and stays until it expires.
SCHEMA = """
create table if not exists sessions (
    id text primary key, who text not null, token blob not null, kept blob not null, at real not null
)
"""
# Rows written before rows had owners may be claimed by any host.
MIGRATION = (
    "alter table sessions add column version integer not null default 1",
    "alter table sessions add column owner text not null default ''",
    "alter table sessions add column fence integer not null default 0",
    "alter table sessions add column received_events integer not null default 0",
    "alter table sessions add column received_audio_ms integer not null default 0",
    "alter table sessions add column restores integer not null default 0",
    "create table tails (id text, at_ms integer, chunk blob not null, primary key (id, at_ms)) without rowid",
    # `until`: in seconds since the machine started, because all processes of the machine share this clock.
    "create table hosts (name text primary key, address text, load real, draining integer, until real not null)",
)
COLUMNS = "version, who, token, kept, owner, fence, received_events, received_audio_ms, restores"


class SqliteBackend(Backend):
    """Sessions in a folder, which is created with access for its owner only. Deleted rows are overwritten in the files.

    `max_age_s`: the lifetime of rows. `host_ttl_s`: the time after which a hanging host is dead. `clock`: seconds since
    1970, for the age of rows. `uptime`: seconds of a clock that all processes of the machine share, for hosts. Raises
    StoreError if the folder is not writable, or the file has a newer format.
    """

    def __init__(
        self,
        folder: Path,
        max_age_s: float,
        host_ttl_s: float = HOST_TTL_S,
        *,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._max_age_s = max_age_s
        self._host_ttl_s = host_ttl_s
        self._clock = clock
        self._uptime = uptime
        # The connection of the writing thread.
        self._db: sqlite3.Connection | None = None
        # Descriptors of the lock files of this process's hosts, by the hosts' names.
        self._locks: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}; the folder must be writable") from None
        with self._one_process(), self._reading() as db:
            self._prepare(db)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        """Apply the writes. Waits at most BUSY_S for another process's write."""
        try:
            if self._db is None:
                self._db = self._open()
                # With this setting, nothing is lost if the process is killed. If the machine loses power, the last
                # second may be lost.
                self._db.execute("pragma synchronous=normal")
            failures = [self._write(self._db, write) for write in writes]
            if any(write.forgets for write in writes):
                # The write-ahead log still holds the deleted data.
                self._db.execute("pragma wal_checkpoint(truncate)")
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from None
        return failures

    def _write(self, db: sqlite3.Connection, write: Write) -> StoreError | None:
        """Apply one session's write. Returns its error, or None. Raises sqlite3.DatabaseError if the file fails."""
        try:
            with _transaction(db):
                _apply(db, write, self._clock())
        except StoreError as error:
            return error
        except Exception as error:
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, ROW_ERRORS):
                raise
            return RowError(f"the session {write.hold.session_id} cannot be stored: {error}")
        return None

    def read(self, session_id: str) -> StoredSession | None:
        with self._reading() as db:
            return self._read(db, session_id)

    def _read(self, db: sqlite3.Connection, session_id: str) -> StoredSession | None:
        oldest_s = self._clock() - self._max_age_s
        query = f"select {COLUMNS} from sessions where id = ? and at >= ? and kept <> x''"
        row = db.execute(query, (session_id, oldest_s)).fetchone()
        return row_of(session_id, row) if row else None

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        with self._reading() as db:
            rows = db.execute("select at_ms, chunk from tails where id = ? order by at_ms", (session_id,)).fetchall()
        return tuple(chunk_of(session_id, *row) for row in rows)

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        with self._reading() as db, _transaction(db):
            row = self._read(db, session_id)
            if row is None:
                return ClaimRefusal.UNKNOWN
            if row.fence != seen_fence:
                return ClaimRefusal.SUPERSEDED
            if row.owner not in ("", new_owner) and self._host(db, row.owner):
                return ClaimRefusal.OWNER_ALIVE
            db.execute(
                "update sessions set owner = ?, fence = fence + 1, restores = restores + 1 where id = ?",
                (new_owner, session_id),
            )
            return self._read(db, session_id) or ClaimRefusal.UNKNOWN

    def purge(self) -> None:
        """Delete expired rows, tails without a row, and dead hosts with their lock files."""
        with self._reading() as db:
            self._purge(db)

    def _purge(self, db: sqlite3.Connection) -> None:
        db.execute("delete from sessions where at < ?", (self._clock() - self._max_age_s,))
        db.execute("delete from tails where id not in (select id from sessions)")
        for (name,) in db.execute("select name from hosts").fetchall():
            # Keep a hanging host: it may recover.
            if not self._is_locked(name):
                db.execute("delete from hosts where name = ?", (name,))
                self._lock_file(name).unlink(missing_ok=True)
        # The write-ahead log holds the deleted data too.
        db.execute("pragma wal_checkpoint(truncate)")

    # --- hosts --------------------------------------------------------------------------------------------------------

    def renew(self, host: Host) -> None:
        """Renew a host. The first call takes its lock, which is held until `unregister` or `close`."""
        with self._lock:
            if host.name not in self._locks:
                self._locks[host.name] = self._take_lock(host.name)
        values = (host.name, host.address, host.load, host.draining, self._uptime() + self._host_ttl_s)
        with self._reading() as db:
            db.execute("insert or replace into hosts values (?, ?, ?, ?, ?)", values)

    def unregister(self, name: str) -> None:
        with self._reading() as db:
            db.execute("delete from hosts where name = ? or substr(name, 1, ?) = ?", (name, len(name) + 1, f"{name}/"))
        with self._lock:
            for own in [own for own in self._locks if own == name or own.startswith(f"{name}/")]:
                self._lock_file(own).unlink(missing_ok=True)
                os.close(self._locks.pop(own))

    def hosts(self) -> tuple[Host, ...]:
        with self._reading() as db:
            names = [name for (name,) in db.execute("select name from hosts")]
            return tuple(host for name in names if (host := self._host(db, name)))

    def host(self, name: str) -> Host | None:
        with self._reading() as db:
            return self._host(db, name)

    def _host(self, db: sqlite3.Connection, name: str) -> Host | None:
        query = "select name, address, load, draining from hosts where name = ? and until > ?"
        row = db.execute(query, (name, self._uptime())).fetchone()
        return host_of(*row) if row and self._is_locked(name) else None

    def _lock_file(self, name: str) -> Path:
        return self._folder / f"host-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"

    def _take_lock(self, name: str) -> int:
        """Take the lock of a host, and return its descriptor, which child processes do not inherit."""
        try:
            descriptor = os.open(self._lock_file(name), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise StoreError(f"{self._lock_file(name)}: {error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StoreError(f"{self._lock_file(name)}: another process holds the lock of the host {name}") from None
        return descriptor

    def _is_locked(self, name: str) -> bool:
        """Return whether a process holds the lock of this host."""
        with suppress(FileNotFoundError):
            descriptor = os.open(self._lock_file(name), os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False

    # --- the file -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection and release the locks of this process's hosts."""
        if self._db:
            self._db.close()
        with self._lock:
            for descriptor in self._locks.values():
                os.close(descriptor)
            self._locks.clear()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # Overwrites deleted and replaced data with zeros.
        db.execute("pragma secure_delete=on")
        return db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for the block. Its errors become StoreError."""
        try:
            with closing(self._open()) as db:
                yield db
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self._path}: {error}") from None

    @contextmanager
    def _one_process(self) -> Iterator[None]:
        """Let only one process of this folder run the block at a time, because SQLite does not wait when two processes
        enable the write-ahead log at once.
        """
        descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _prepare(self, db: sqlite3.Connection) -> None:
        (found,) = db.execute("pragma user_version").fetchone()
        if found > FORMAT:
            raise StoreError(
                f"{self._path} has format {found}, and this version of antiphon reads formats up to {FORMAT}: "
                "a newer version wrote it"
            )
        db.execute("pragma journal_mode=wal")
        with _transaction(db):
            # Another process may have migrated the file meanwhile.
            (found,) = db.execute("pragma user_version").fetchone()
            if found < FORMAT:
                db.execute(SCHEMA)
                for statement in MIGRATION:
                    db.execute(statement)
                db.execute(f"pragma user_version={FORMAT}")
        self._purge(db)
        if found < 1:
            # Files of format 0 still contain the text of deleted conversations.
            db.execute("vacuum")
        db.execute("pragma wal_checkpoint(truncate)")


def _apply(db: sqlite3.Connection, write: Write, now_s: float) -> None:
    """Apply a write in a transaction. Raises SupersededError."""
    hold, row = write.hold, write.row
    query = "select owner, fence, kept = x'' from sessions where id = ?"
    found = db.execute(query, (hold.session_id,)).fetchone()
    if found:
        owner, fence, gone = found
        if write.forgets and gone and fence == hold.fence:
            return
        holds = not gone and owner in (hold.owner, write.next_owner)
        if fence > hold.fence or (fence == hold.fence and not holds):
            raise superseded(hold.session_id)
    if write.forgets:
        if found:
            # Keep the id and the fence.
            gone = "update sessions set who = '', token = x'', kept = x'', owner = '', fence = ?, at = ? where id = ?"
            db.execute(gone, (hold.fence, now_s, hold.session_id))
            db.execute("delete from tails where id = ?", (hold.session_id,))
        return
    if row:
        query = f"insert or replace into sessions (id, at, {COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        db.execute(query, (row.id, now_s, *write.values))
    elif write.releases:
        db.execute("update sessions set owner = '', restores = 0 where id = ?", (hold.session_id,))
    if write.clears_tail:
        db.execute("delete from tails where id = ?", (hold.session_id,))
    if write.chunks and (found or row):
        query = "select coalesce(sum(length(chunk)), 0) from tails where id = ?"
        (size,) = db.execute(query, (hold.session_id,)).fetchone()
        for at_ms, data in write.chunks.items():
            if size + len(data) <= MAX_TAIL_BYTES:
                size += len(data)
                db.execute("insert or ignore into tails values (?, ?, ?)", (hold.session_id, at_ms, data))


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction that takes the write lock at its start. Rolls back if the block raises."""
    db.execute("begin immediate")
    try:
        yield
    except BaseException:
        # If the disk is full, SQLite has rolled back already.
        if db.in_transaction:
            db.execute("rollback")
        raise
    db.execute("commit")


assert ROW_VERSION == 1, "MIGRATION gives older rows version 1"
