"""The three backends of the session store, with what tests need to open, inspect, damage and interrupt them."""

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
# The columns of a row that have its received counts.
COUNTS = {"events": "received_events", "audio_ms": "received_audio_ms"}
# Long enough that a host's key never expires unless a test wants it to.
LONG_S = 1000.0


def row(
    name: str, text: str = "{}", owner: str = "a/1", fence: int = 1, key_hash: str = "who", restores: int = 0
) -> StoredSession:
    """Return the row of a session, for tests to store."""
    return StoredSession(name, key_hash, b"hash", text.encode(), owner, fence, restores=restores)


class BackendKit(Protocol):
    """A backend, with the operations that tests need on it."""

    name: str

    def open(self, max_age_s: float = DAY_S, host_ttl_s: float = LONG_S, *, skew_s: float = 0.0) -> SessionStore:
        """Open a new store over the backend.

        `skew_s` is the lead of its machine's clock, if the backend uses that clock.
        """
        ...

    def text(self) -> bytes:
        """Return the whole content of the backend."""
        ...

    def tamper(self, session_id: str, field: str, value: Any) -> bool:
        """Write an invalid value into a row. Returns False if the backend refuses it.

        `field` is a field of StoredSession, or `events` or `audio_ms` of its received counts.
        """
        ...

    def tamper_tail(self, session_id: str, at_ms: Any, data: Any) -> bool:
        """Write an invalid chunk into a tail. Returns False if the backend refuses it."""
        ...

    def tamper_host(self, name: str, field: str, value: Any) -> bool:
        """Write an invalid value into a field of a host. Returns False if the backend refuses it."""
        ...

    def stop(self) -> None:
        """Make the backend unavailable, so that writes fail."""
        ...

    def start(self) -> None:
        """Make the backend available again, with the same data."""
        ...

    def close(self) -> None:
        """Delete the backend."""
        ...


class SqliteKit:
    """SQLite. It becomes unavailable because another process locks the file."""

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
