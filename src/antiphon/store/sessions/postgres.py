"""Stores sessions in Postgres, in one table each for rows, tails and hosts.

The server's setup decides how durable a commit is. Each write is one statement, which checks that the
fence is the newest while it holds the row's lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from antiphon.errors import RowError, SettingsError, StoreError
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
from antiphon.store.sessions.url import StoreUrl

# The format of the tables, stored in `antiphon_format`.
FORMAT = 1
# The advisory lock that is held while the tables are created, so that two hosts do not create them at once.
MAKING = 0x616E7469
# Interval, in seconds, of the check for a server that has not answered for BUSY_S.
WATCH_S = 0.2
# The row of a forgotten session has no snapshot, and stays until it expires.
SCHEMA = """
create table if not exists antiphon_format (format integer not null);
create table if not exists antiphon_sessions (
    id text primary key, version integer not null, key_hash text not null, token bytea not null, snapshot bytea,
    owner text not null, fence bigint not null, received_events bigint not null, received_audio_ms bigint not null,
    restores integer not null, at timestamptz not null
);
create index if not exists antiphon_sessions_at on antiphon_sessions (at);
create table if not exists antiphon_tails (
    id text not null, at_ms bigint not null, chunk bytea not null, primary key (id, at_ms)
);
create table if not exists antiphon_hosts (
    name text primary key, address text not null, load double precision not null, draining boolean not null,
    until timestamptz not null
);
insert into antiphon_format select 1 where not exists (select 1 from antiphon_format);
"""
PUT = """
with written as (
    insert into antiphon_sessions as s values (
        %(id)s, %(version)s, %(key_hash)s, %(token)s, %(snapshot)s, %(next_owner)s, %(fence)s, %(events)s, %(audio_ms)s,
        %(restores)s, clock_timestamp()
    )
    on conflict (id) do update set version = excluded.version, key_hash = excluded.key_hash, token = excluded.token,
        snapshot = excluded.snapshot, owner = excluded.owner, fence = excluded.fence,
        received_events = excluded.received_events, received_audio_ms = excluded.received_audio_ms,
        restores = excluded.restores, at = excluded.at
    where s.fence < excluded.fence
        or (s.fence = excluded.fence and s.owner in (%(owner)s, %(next_owner)s) and s.snapshot is not null)
    returning id
), cleared as (
    delete from antiphon_tails t using written w where t.id = w.id and %(clears)s
)
select count(*) from written
"""
# The parameters of PUT that `Write.values` fills, in its order.
PUT_NAMES = ("version", "key_hash", "token", "snapshot", "next_owner", "fence", "events", "audio_ms", "restores")
# The count is 1 if the session is released, now or by an earlier attempt; 0 if the hold is invalid or no row exists.
RELEASE = """
with written as (
    update antiphon_sessions set owner = '', restores = 0
    where id = %(id)s and snapshot is not null and (fence < %(fence)s
        or (fence = %(fence)s and owner in (%(owner)s, '')))
    returning id
)
select count(*) from written
"""
FORGET = """
with written as (
    update antiphon_sessions set key_hash = '', token = '', snapshot = null, owner = '', fence = %(fence)s,
        at = clock_timestamp()
    where id = %(id)s and (fence < %(fence)s or (fence = %(fence)s and (owner = %(owner)s or snapshot is null)))
    returning id
), cleared as (
    delete from antiphon_tails t using written w where t.id = w.id
)
select count(*) from written
"""
# Locks the row, so that no other host claims it meanwhile.
CHECK = """
select 1 from antiphon_sessions
where id = %(id)s and fence = %(fence)s and owner in (%(owner)s, %(next_owner)s) and snapshot is not null for update
"""
EXISTS = "select count(*) from antiphon_sessions where id = %(id)s"
APPEND = """
insert into antiphon_tails select %(id)s, %(at_ms)s, %(chunk)s
where (select coalesce(sum(length(chunk)), 0) from antiphon_tails where id = %(id)s) + %(size)s <= %(max)s
on conflict do nothing
"""
COLUMNS = "version, key_hash, token, snapshot, owner, fence, received_events, received_audio_ms, restores"
OLD = "at < clock_timestamp() - make_interval(secs => %(max_age_s)s)"
READ = f"select {COLUMNS} from antiphon_sessions where id = %(id)s and snapshot is not null and not {OLD}"
CLAIM = f"""
update antiphon_sessions s set owner = %(new)s, fence = fence + 1, restores = restores + 1
where id = %(id)s and fence = %(fence)s and version = {ROW_VERSION} and snapshot is not null and (owner in ('', %(new)s)
    or not exists (select 1 from antiphon_hosts h where h.name = s.owner and h.until > clock_timestamp()))
returning {COLUMNS}
"""
# An unknown load is stored as -1, since the column is not null.
RENEW = """
insert into antiphon_hosts values (%(name)s, %(address)s, coalesce(%(load)s::float8, -1), %(draining)s,
    clock_timestamp() + make_interval(secs => %(ttl_s)s))
on conflict (name) do update set address = excluded.address, load = excluded.load, draining = excluded.draining,
    until = excluded.until
"""
UNREGISTER = "delete from antiphon_hosts where name = %(name)s or starts_with(name, %(name)s || '/')"
HOSTS = "select name, address, nullif(load, -1), draining from antiphon_hosts where until > clock_timestamp()"


class PostgresBackend(Backend):
    """Sessions in Postgres. The constructor connects and creates the tables.

    Has two connections: one for the thread that writes, one for everything else. Raises StoreError if connecting fails
    or the tables have a newer format, and SettingsError if the extra `[postgres]` is not installed.
    """

    def __init__(self, url: StoreUrl, max_age_s: float, host_ttl_s: float = HOST_TTL_S) -> None:
        try:
            import psycopg
        except ImportError:
            package = "pip install '.[postgres]'"
            raise SettingsError(f"--state {url.shown} needs the package psycopg: {package}") from None
        self._url = url
        self._max_age_s, self._host_ttl_s = max_age_s, host_ttl_s
        self._errors: tuple[type[Exception], ...] = (psycopg.Error, OSError)
        self._writing, self._asking = _Connection(url), _Connection(url)
        with self._use(self._asking) as asking:
            asking.run(_make_tables)
            (found,) = asking.run(lambda db: db.execute("select format from antiphon_format").fetchone())
        if found > FORMAT:
            raise StoreError(f"{url.shown} has tables of format {found}, and this version of antiphon reads {FORMAT}")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        """Apply all writes in one transaction, or each in its own transaction if the database rejects one of them."""
        # Sorted by id, so that two hosts that write the same rows do not deadlock.
        order = sorted(range(len(writes)), key=lambda number: writes[number].hold.session_id)
        ordered = [writes[number] for number in order]
        with self._use(self._writing) as writing:
            try:
                outcomes = writing.run(lambda db: _write_all(db, ordered))
            except _Unwritable:
                outcomes = [writing.run(partial(_write_alone, write)) for write in ordered]
        return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=lambda pair: pair[0])]

    def read(self, session_id: str) -> StoredSession | None:
        row = self._fetch(READ, id=session_id, max_age_s=self._max_age_s)
        return row_of(session_id, row[0]) if row else None

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        rows = self._fetch("select at_ms, chunk from antiphon_tails where id = %(id)s order by at_ms", id=session_id)
        return tuple(chunk_of(session_id, *row) for row in rows)

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        row = self.read(session_id)
        if row is None:
            return ClaimRefusal.UNKNOWN
        if row.fence != seen_fence:
            return ClaimRefusal.SUPERSEDED
        claimed = self._fetch(CLAIM, once=True, id=session_id, new=new_owner, fence=seen_fence)
        if claimed:
            return row_of(session_id, claimed[0])
        row = self.read(session_id)
        if row is None:
            return ClaimRefusal.UNKNOWN
        return ClaimRefusal.OWNER_ALIVE if row.fence == seen_fence else ClaimRefusal.SUPERSEDED

    def purge(self) -> None:
        self._fetch(f"delete from antiphon_sessions where {OLD}", max_age_s=self._max_age_s)
        self._fetch("delete from antiphon_tails where id not in (select id from antiphon_sessions)")
        self._fetch("delete from antiphon_hosts where until < clock_timestamp()")

    # --- hosts --------------------------------------------------------------------------------------------------------

    def renew(self, host: Host) -> None:
        self._fetch(
            RENEW,
            name=host.name,
            address=host.address,
            load=host.load,
            draining=host.draining,
            ttl_s=self._host_ttl_s,
        )

    def unregister(self, name: str) -> None:
        self._fetch(UNREGISTER, name=name)

    def hosts(self) -> tuple[Host, ...]:
        return tuple(host_of(*row) for row in self._fetch(HOSTS))

    def host(self, name: str) -> Host | None:
        found = self._fetch(f"{HOSTS} and name = %(name)s", name=name)
        return host_of(*found[0]) if found else None

    # --- the server ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._writing.close()
        self._asking.close()

    def _fetch(self, query: str, *, once: bool = False, **values: object) -> list[tuple[Any, ...]]:
        """Return the rows of one statement. Retries on a new connection if the old one is dead, unless `once`."""
        with self._use(self._asking) as asking:

            def fetch(db: Any) -> list[tuple[Any, ...]]:
                # The binary format is half the size of the text format, measured with a row of 60 MB.
                cursor = db.execute(query, values, binary=True)
                return list(cursor.fetchall()) if cursor.description else []

            found: list[tuple[Any, ...]] = asking.run(fetch, once=once)
            return found

    @contextmanager
    def _use(self, connection: _Connection) -> Iterator[_Connection]:
        """Lock a connection for the block. Errors in it become StoreError, without the URL's password."""
        try:
            with connection.lock:
                yield connection
        except self._errors as error:
            shown = self._url.hidden(" ".join(str(error).split()))
            raise StoreError(f"{self._url.shown}: {shown}") from None


class _Unwritable(Exception):
    """The database rejects the values of one of several writes."""


class _Connection:
    """A connection that is opened on first use and reopened after it breaks. Hold `lock` to use it.

    If the server does not answer for BUSY_S, a watchdog thread shuts the connection down. Without it, the client
    library would wait for as long as the server's machine keeps the connection alive. `close` ends the thread.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.lock = threading.Lock()
        self._url = url
        self._db: Any = None
        # For a running query: a duplicate of the connection's descriptor, and the query's deadline in monotonic
        # seconds.
        self._asked: tuple[socket.socket, float] | None = None
        self._asked_lock = threading.Lock()
        self._is_cut = False
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_answers, name="postgres", daemon=True)
        self._watch.start()

    def run(self, work: Callable[[Any], Any], *, once: bool = False) -> Any:
        """Run `work` with the connection. If the server had closed the connection, reconnect and run `work` again,
        unless `once`.
        """
        import psycopg

        was_open, self._is_cut = self._db is not None and not self._db.closed, False
        try:
            return self._run(work)
        except (psycopg.OperationalError, psycopg.InterfaceError):
            if not was_open or once or self._is_cut or self._db is not None:
                raise
            return self._run(work)

    def _run(self, work: Callable[[Any], Any]) -> Any:
        if self._db is None or self._db.closed:
            import psycopg

            self._db = psycopg.connect(
                self._url.text,
                autocommit=True,
                connect_timeout=2,
                keepalives_idle=10,
            )
            self._db.execute(f"set statement_timeout = {BUSY_S * 1000:.0f}")
        with socket.socket(fileno=os.dup(self._db.fileno())) as descriptor:
            with self._asked_lock:
                self._asked = (descriptor, time.monotonic() + BUSY_S)
            try:
                return work(self._db)
            finally:
                with self._asked_lock:
                    self._asked = None
                if self._db.broken:
                    self._db.close()
                    self._db = None

    def _watch_answers(self) -> None:
        while not self._closed.wait(WATCH_S):
            with self._asked_lock, suppress(OSError):
                if self._asked and time.monotonic() > self._asked[1]:
                    self._is_cut = True
                    self._asked[0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and end the watchdog thread."""
        self._closed.set()
        self._watch.join()
        with self.lock:
            if self._db is not None:
                self._db.close()


def _make_tables(db: Any) -> None:
    with db.transaction():
        db.execute("select pg_advisory_xact_lock(%s)", (MAKING,))
        db.execute(SCHEMA)


def _write_all(db: Any, writes: Sequence[Write]) -> list[StoreError | None]:
    """Apply all writes in one transaction. Raises _Unwritable, and writes nothing, if the database rejects one of
    several.
    """
    import psycopg

    if len(writes) == 1:
        return [_write_alone(writes[0], db)]
    try:
        with db.transaction():
            return [_write(db, write) for write in writes]
    except (psycopg.DataError, psycopg.ProgrammingError, TypeError, ValueError):
        raise _Unwritable from None


def _write_alone(write: Write, db: Any) -> StoreError | None:
    import psycopg

    try:
        if not write.chunks:
            # A single statement is a transaction by itself.
            return _write(db, write)
        with db.transaction():
            return _write(db, write)
    except (psycopg.DataError, psycopg.ProgrammingError, TypeError, ValueError) as error:
        return RowError(f"the session {write.hold.session_id} cannot be stored: {type(error).__name__}")


def _write(db: Any, write: Write) -> StoreError | None:
    """Apply the write of one session. Returns SupersededError if its hold is invalid."""
    hold, row = write.hold, write.row
    base: dict[str, object] = {
        "id": hold.session_id,
        "owner": hold.owner,
        "fence": hold.fence,
        "next_owner": write.next_owner,
    }
    if write.forgets:
        return _on_row(db, FORGET, base)
    if row:
        values = dict(zip(PUT_NAMES, write.values, strict=True)) | {"clears": write.clears_tail}
        if not _count(db, PUT, base | values):
            return superseded(hold.session_id)
    if write.chunks:
        if not db.execute(CHECK, base).fetchone():
            return superseded(hold.session_id) if _count(db, EXISTS, base) else None
        for at_ms, data in write.chunks.items():
            chunk = {"at_ms": at_ms, "chunk": data, "size": len(data), "max": MAX_TAIL_BYTES}
            db.execute(APPEND, base | chunk)
    return _on_row(db, RELEASE, base) if write.releases and row is None else None


def _on_row(db: Any, query: str, base: dict[str, object]) -> StoreError | None:
    """Run an update of the row. Returns SupersededError if the row exists but was not updated."""
    done = _count(db, query, base) or not _count(db, EXISTS, base)
    return None if done else superseded(str(base["id"]))


def _count(db: Any, query: str, values: dict[str, object]) -> int:
    return int(db.execute(query, values).fetchone()[0])
