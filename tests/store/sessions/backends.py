"""The three backends of sessions as tests see them: opened, looked into, tampered with, and taken away for a while."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import DataError

from antiphon.store.sessions import SessionStore, StoredSession, open_store
from antiphon.store.sessions.sqlite import FILE, SqliteBackend
from antiphon.store.sessions.writer import QueuedStore
from tests.store.servers import PostgresServer, RedisServer

DAY_S = 24 * 3600.0
# The columns of what a row says was received.
COUNTS = {"events": "received_events", "audio_ms": "received_audio_ms"}
# A host's time is over when a test says so.
LONG_S = 1000.0


def row(
    name: str, text: str = "{}", owner: str = "a/1", fence: int = 1, key_hash: str = "who", restores: int = 0
) -> StoredSession:
    """A row of a session."""
    return StoredSession(name, key_hash, b"hash", text.encode(), owner, fence, restores=restores)


class BackendKit(Protocol):
    """A backend, and what tests do to it."""

    name: str

    def open(self, max_age_s: float = DAY_S, host_ttl_s: float = LONG_S, *, skew_s: float = 0.0) -> SessionStore:
        """A store of its own over the backend. `skew_s`: how far its machine's clock is ahead, where it has one."""
        ...

    def text(self) -> bytes:
        """Everything that is in the backend."""
        ...

    def tamper(self, session_id: str, field: str, value: Any) -> bool:
        """Write into a row what no host would write; False where the backend does not take such a value. `field`: of
        StoredSession, and `events` and `audio_ms` of what it received.
        """
        ...

    def tamper_tail(self, session_id: str, at_ms: Any, data: Any) -> bool:
        """Write a chunk into a tail; False where the backend does not take such values."""
        ...

    def tamper_host(self, name: str, field: str, value: Any) -> bool:
        """Write into what is known of a host; False where the backend does not take such a value. `field`: of Host."""
        ...

    def stop(self) -> None:
        """Take the backend away: nothing can be written."""
        ...

    def start(self) -> None:
        """Bring it back, with what it had kept."""
        ...

    def close(self) -> None:
        """Delete it."""
        ...


class SqliteKit:
    """SQLite; it is taken away by another process that holds the file."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._other: sqlite3.Connection | None = None

    def open(self, max_age_s: float = DAY_S, host_ttl_s: float = LONG_S, *, skew_s: float = 0.0) -> SessionStore:
        return QueuedStore(SqliteBackend(self.folder, max_age_s, host_ttl_s, clock=lambda: time.time() + skew_s))

    def text(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.folder.iterdir())

    def tamper(self, session_id: str, field: str, value: Any) -> bool:
        column = {"key_hash": "who", "snapshot": "kept"}.get(field, COUNTS.get(field, field))
        return self._execute(f"update sessions set {column} = ? where id = ?", (value, session_id))

    def tamper_tail(self, session_id: str, at_ms: Any, data: Any) -> bool:
        return self._execute("insert into tails values (?, ?, ?)", (session_id, at_ms, data))

    def tamper_host(self, name: str, field: str, value: Any) -> bool:
        return self._execute(f"update hosts set {field} = ? where name = ?", (value, name))

    def _execute(self, statement: str, values: tuple[Any, ...]) -> bool:
        try:
            with closing(sqlite3.connect(self.folder / FILE)) as db:
                db.execute(statement, values)
                db.commit()
        except (sqlite3.Error, OverflowError, UnicodeError):
            return False
        return True

    def stop(self) -> None:
        self._other = sqlite3.connect(self.folder / FILE, isolation_level=None)
        self._other.execute("begin immediate")

    def start(self) -> None:
        if self._other:
            self._other.close()
            self._other = None

    def close(self) -> None:
        self.start()


class RedisKit:
    """A real Redis server."""

    name = "redis"

    def __init__(self) -> None:
        self.server = RedisServer()
        self.server.start()

    def open(self, max_age_s: float = DAY_S, host_ttl_s: float = LONG_S, *, skew_s: float = 0.0) -> SessionStore:
        return open_store(self.server.url, max_age_s, host_ttl_s)

    def text(self) -> bytes:
        found = b""
        with self.server.client() as client:
            for key in client.scan_iter():
                kind = client.type(key)
                values = {b"hash": client.hgetall, b"set": client.smembers, b"string": client.get}[kind](key)
                found += key + repr(values).encode()
        return found

    def tamper(self, session_id: str, field: str, value: Any) -> bool:
        return self._hset(f"antiphon:session:{session_id}", field, value)

    def tamper_tail(self, session_id: str, at_ms: Any, data: Any) -> bool:
        return self._hset(f"antiphon:tail:{session_id}", at_ms, data)

    def tamper_host(self, name: str, field: str, value: Any) -> bool:
        return self._hset(f"antiphon:host:{name}", field, value)

    def _hset(self, key: str, field: Any, value: Any) -> bool:
        with self.server.client() as client:
            try:
                client.hset(key, field, value)
            except (DataError, UnicodeError):
                return False
        return True

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        if self.server.popen is None:
            self.server.start()

    def close(self) -> None:
        self.server.close()


class PostgresKit:
    """A real Postgres server."""

    name = "postgres"

    def __init__(self) -> None:
        self.server = PostgresServer()
        self.server.start()

    def open(self, max_age_s: float = DAY_S, host_ttl_s: float = LONG_S, *, skew_s: float = 0.0) -> SessionStore:
        return open_store(self.server.url, max_age_s, host_ttl_s)

    def text(self) -> bytes:
        found = b""
        with self.server.client() as client:
            for (table,) in client.execute("select tablename from pg_tables where schemaname = 'public'").fetchall():
                found += repr(client.execute(f"select * from {table}").fetchall()).encode()
        return found

    def tamper(self, session_id: str, field: str, value: Any) -> bool:
        column = COUNTS.get(field, field)
        return self._execute(f"update antiphon_sessions set {column} = %s where id = %s", (value, session_id))

    def tamper_tail(self, session_id: str, at_ms: Any, data: Any) -> bool:
        return self._execute("insert into antiphon_tails values (%s, %s, %s)", (session_id, at_ms, data))

    def tamper_host(self, name: str, field: str, value: Any) -> bool:
        return self._execute(f"update antiphon_hosts set {field} = %s where name = %s", (value, name))

    def _execute(self, statement: str, values: tuple[Any, ...]) -> bool:
        import psycopg

        with self.server.client() as client:
            try:
                client.execute(statement, values)
            except (psycopg.DataError, psycopg.ProgrammingError, UnicodeError):
                return False
        return True

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        if self.server.popen is None:
            self.server.start()

    def close(self) -> None:
        self.server.close()
