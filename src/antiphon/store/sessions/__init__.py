"""The session store: conversations that outlive their host, and the owner of each.

`api.py` has the contract; `open_store` opens a store. The backend is SQLite in a folder, Redis or Valkey, or Postgres.
One thread writes to it (`writer.py`).
"""

from pathlib import Path

from antiphon.store.sessions.api import (
    HOST_TTL_S,
    MAX_TAIL_BYTES,
    RENEWED_AFTER,
    ROW_VERSION,
    ClaimRefusal,
    Hold,
    Host,
    ReceivedCounts,
    SessionStore,
    StoredSession,
    TailChunk,
)
from antiphon.store.sessions.postgres import PostgresBackend
from antiphon.store.sessions.redis import RedisBackend
from antiphon.store.sessions.sqlite import SqliteBackend
from antiphon.store.sessions.url import StoreUrl, is_store_url
from antiphon.store.sessions.writer import QueuedStore

__all__ = [
    "HOST_TTL_S",
    "MAX_TAIL_BYTES",
    "RENEWED_AFTER",
    "ROW_VERSION",
    "ClaimRefusal",
    "Hold",
    "Host",
    "ReceivedCounts",
    "SessionStore",
    "StoredSession",
    "TailChunk",
    "is_store_url",
    "open_store",
]


def open_store(state: str, max_age_s: float, host_ttl_s: float = HOST_TTL_S) -> SessionStore:
    """Open the store of the setting `--state`: a folder, or the URL of a Redis, Valkey or Postgres server. Blocks.

    Rows expire `max_age_s` after they were written. A host is dead `host_ttl_s` after it last renewed its key. Raises
    StoreError if the store is unavailable or of a newer format, and SettingsError if the URL is invalid or needs a
    package that is not installed. The messages of both do not show the password.
    """
    if not is_store_url(state):
        return QueuedStore(SqliteBackend(Path(state).expanduser(), max_age_s, host_ttl_s))
    url = StoreUrl(state)
    return QueuedStore(
        RedisBackend(url, max_age_s, host_ttl_s) if url.is_redis else PostgresBackend(url, max_age_s, host_ttl_s)
    )
