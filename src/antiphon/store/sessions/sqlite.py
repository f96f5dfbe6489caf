"""Sessions in SQLite, in a folder of one machine: for one host, or a few processes that share its disk.

A host lives while its process holds a lock on a file, which ends with the process, however it ends: a server that was
killed is dead at once, and the next one restores its sessions without waiting. A host that hangs is dead after the TTL.
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
# The format of the file (`pragma user_version`). Files of before there were formats have 0. Those of format 1 have the
# first table without the columns that MIGRATION adds.
FORMAT = 2
# What is wrong with one row, and not with the file.
ROW_ERRORS = (sqlite3.DataError, sqlite3.ProgrammingError)
# `who` and `kept` are StoredSession's `key_hash` and `snapshot`; `at` is when it was written, in seconds since 1970.
# A session that was forgotten has an empty `kept`, until its row is too old.
SCHEMA = """
create table if not exists sessions (
    id text primary key, who text not null, token blob not null, kept blob not null, at real not null
)
"""
# Rows of before there were owners are free to be claimed.
MIGRATION = (
    "alter table sessions add column version integer not null default 1",
    "alter table sessions add column owner text not null default ''",
    "alter table sessions add column fence integer not null default 0",
    "alter table sessions add column received_events integer not null default 0",
    "alter table sessions add column received_audio_ms integer not null default 0",
    "alter table sessions add column restores integer not null default 0",
    "create table tails (id text, at_ms integer, chunk blob not null, primary key (id, at_ms)) without rowid",
    # `until`: in seconds of the machine's clock since it was started, which all its processes share.
    "create table hosts (name text primary key, address text, load real, draining integer, until real not null)",
)
COLUMNS = "version, who, token, kept, owner, fence, received_events, received_audio_ms, restores"


class SqliteBackend(Backend):
    """Sessions in a folder, which is created with access for its owner only. Deleted rows are overwritten in the files.

    `max_age_s`: rows older than that are not found. `host_ttl_s`: how long a host that hangs is alive. `clock`: seconds
    since 1970, by which rows age. `uptime`: seconds that all processes of the machine count alike, by which hosts do.
    Raises StoreError where the folder cannot be written to, and for a file of a newer format.
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
        # The connection of the thread that writes.
        self._db: sqlite3.Connection | None = None
        # Descriptors of the lock files of this process's hosts, by their names.
        self._locks: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}; a folder is needed that can be written to") from None
        with self._one_process(), self._reading() as db:
            self._prepare(db)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        """A write that waits for another process's does so for BUSY_S."""
        try:
            if self._db is None:
                self._db = self._open()
                # With this, a process that is killed loses nothing; a machine that loses power may lose the last
                # second.
                self._db.execute("pragma synchronous=normal")
            failures = [self._write(self._db, write) for write in writes]
            if any(write.forgets for write in writes):
                # The log of writes holds what was deleted.
                self._db.execute("pragma wal_checkpoint(truncate)")
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from None
        return failures

    def _write(self, db: sqlite3.Connection, write: Write) -> StoreError | None:
        """Write one session; what is wrong with it alone, or None. Raises sqlite3.DatabaseError for the file."""
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
        """The files of hosts that are dead are deleted too."""
        with self._reading() as db:
            self._purge(db)

    def _purge(self, db: sqlite3.Connection) -> None:
        db.execute("delete from sessions where at < ?", (self._clock() - self._max_age_s,))
        db.execute("delete from tails where id not in (select id from sessions)")
        for (name,) in db.execute("select name from hosts").fetchall():
            # A host that hangs may live on.
            if not self._is_locked(name):
                db.execute("delete from hosts where name = ?", (name,))
                self._lock_file(name).unlink(missing_ok=True)
        # The log of writes holds what was deleted, too.
        db.execute("pragma wal_checkpoint(truncate)")

    # --- hosts --------------------------------------------------------------------------------------------------------

    def renew(self, host: Host) -> None:
        """The first call takes the host's lock, until `unregister` or `close`."""
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
        """Hold the lock of a host; its descriptor. Programs that this process starts do not inherit it."""
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
        """Whether a process holds the lock of this host."""
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
        """The locks of this process's hosts end."""
        if self._db:
            self._db.close()
        with self._lock:
            for descriptor in self._locks.values():
                os.close(descriptor)
            self._locks.clear()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # What is deleted or replaced is overwritten with zeros.
        db.execute("pragma secure_delete=on")
        return db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for this call. Raises StoreError for what fails in it."""
        try:
            with closing(self._open()) as db:
                yield db
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self._path}: {error}") from None

    @contextmanager
    def _one_process(self) -> Iterator[None]:
        """Of the processes of this folder, one at a time runs the block: SQLite does not wait where two turn a file's
        log on at once.
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
                "it was written by a newer one"
            )
        db.execute("pragma journal_mode=wal")
        with _transaction(db):
            # Another process may have migrated it meanwhile.
            (found,) = db.execute("pragma user_version").fetchone()
            if found < FORMAT:
                db.execute(SCHEMA)
                for statement in MIGRATION:
                    db.execute(statement)
                db.execute(f"pragma user_version={FORMAT}")
        self._purge(db)
        if found < 1:
            # Files of the first format hold the text of conversations that were deleted.
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
            # Its id and fence stay.
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
    """A transaction that may write from its beginning; it is taken back if its block raises."""
    db.execute("begin immediate")
    try:
        yield
    except BaseException:
        # A full disk has taken it back already.
        if db.in_transaction:
            db.execute("rollback")
        raise
    db.execute("commit")


assert ROW_VERSION == 1, "MIGRATION gives rows of before there were versions the first one"
