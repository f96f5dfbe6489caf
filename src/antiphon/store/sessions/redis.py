"""Stores sessions in Redis or Valkey: a hash for each row, a hash for its tail, a key for each host.

Each script is atomic. The scripts build key names themselves, which Redis Cluster does not allow. The server's own
setting `appendfsync` decides how much it loses when it is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from antiphon.errors import RowError, SettingsError, StoreError
from antiphon.store.sessions.api import (
    HOST_TTL_S,
    MAX_TAIL_BYTES,
    ClaimRefusal,
    Host,
    StoredSession,
    TailChunk,
)
from antiphon.store.sessions.backend import (
    BUSY_S,
    Backend,
    Write,
    chunk_of,
    damaged,
    host_of,
    row_of,
    superseded,
)
from antiphon.store.sessions.url import StoreUrl

# The format of the keys, stored in `antiphon:format`.
FORMAT = 1
PREFIX = "antiphon:"
FIELDS = ("version", "key_hash", "token", "snapshot", "owner", "fence", "events", "audio_ms", "restores")
# KEYS: row, tail. ARGV: owner and fence of the hold; whether the write forgets, has a row, clears the tail, releases;
# the row's lifetime in milliseconds; the limit on the tail in bytes; the number of the row's values, and these values;
# then at_ms and data of each chunk. A forgotten row has only a fence, so its owner equals no host.
WRITE = """
local kind, tail = redis.call('TYPE', KEYS[1])['ok'], redis.call('TYPE', KEYS[2])['ok']
if (kind ~= 'none' and kind ~= 'hash') or (tail ~= 'none' and tail ~= 'hash') then return 'damaged' end
local owner, fence, max_ms = ARGV[1], tonumber(ARGV[2]), ARGV[7]
local forgets, has_row, clears, releases = ARGV[3] == '1', ARGV[4] == '1', ARGV[5] == '1', ARGV[6] == '1'
local found = kind == 'hash'
if found then
    local held = redis.call('HMGET', KEYS[1], 'owner', 'fence')
    if not string.match(held[2] or '', '^%d+$') then return 'damaged' end
    local held_fence = tonumber(held[2])
    local gone = redis.call('HEXISTS', KEYS[1], 'snapshot') == 0
    if held_fence == fence and gone and forgets then return 'written' end
    local holds = not gone and (held[1] == owner or (releases and held[1] == ''))
    if held_fence > fence or (held_fence == fence and not holds) then return 'superseded' end
end
if forgets then
    if found then
        redis.call('DEL', KEYS[1], KEYS[2])
        redis.call('HSET', KEYS[1], 'fence', ARGV[2])
        redis.call('PEXPIRE', KEYS[1], max_ms)
    end
    return 'written'
end
local at = 10 + tonumber(ARGV[9])
if has_row then
    redis.call('HSET', KEYS[1], unpack(ARGV, 10, at - 1))
    redis.call('PEXPIRE', KEYS[1], max_ms)
    redis.call('PEXPIRE', KEYS[2], max_ms)
elseif releases and found then
    redis.call('HSET', KEYS[1], 'owner', '', 'restores', '0')
end
if clears then
    redis.call('DEL', KEYS[2])
end
if at <= #ARGV and (found or has_row) then
    local size = tonumber(redis.call('HGET', KEYS[2], 'size') or '0')
    if not size then return 'damaged' end
    while at < #ARGV do
        local data = ARGV[at + 1]
        if size + #data <= tonumber(ARGV[8]) and redis.call('HSETNX', KEYS[2], ARGV[at], data) == 1 then
            size = size + #data
        end
        at = at + 2
    end
    redis.call('HSET', KEYS[2], 'size', size)
    redis.call('PEXPIRE', KEYS[2], max_ms)
end
return 'written'
"""
# KEYS: row, whose values are known to be valid. ARGV: new owner, seen fence, prefix of the hosts' keys.
CLAIM = """
local row = redis.call('HMGET', KEYS[1], 'owner', 'fence', 'snapshot')
if not row[3] then return 'unknown' end
if row[2] ~= ARGV[2] then return 'superseded' end
if row[1] ~= '' and row[1] ~= ARGV[1] and redis.call('EXISTS', ARGV[3] .. row[1]) == 1 then return 'owner alive' end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HINCRBY', KEYS[1], 'restores', 1)
return redis.call('HMGET', KEYS[1], 'version', 'key_hash', 'token', 'snapshot', 'owner', 'fence', 'events', 'audio_ms',
    'restores')
"""


class RedisBackend(Backend):
    """Sessions in Redis or Valkey. The constructor connects.

    The server itself deletes rows `max_age_s` after they were written. Raises StoreError if connecting fails or the
    keys have another format, and SettingsError if the extra `[redis]` is not installed.
    """

    def __init__(self, url: StoreUrl, max_age_s: float, host_ttl_s: float = HOST_TTL_S) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise SettingsError(f"--state {url.shown} needs the package redis: pip install '.[redis]'") from None
        self._url = url
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        # Redis deletes a key with a lifetime of 0 ms at once.
        self._max_age_ms, self._host_ttl_ms = max(1, round(max_age_s * 1000)), round(host_ttl_s * 1000)
        retry = Retry(NoBackoff(), 0)
        try:
            self._redis: Any = redis.Redis.from_url(
                url.of_client, retry=retry, socket_timeout=BUSY_S, socket_connect_timeout=BUSY_S
            )
            self._write: Any = self._redis.register_script(WRITE)
            self._claim: Any = self._redis.register_script(CLAIM)
            self._ask(lambda: self._redis.setnx(f"{PREFIX}format", FORMAT))
        except (ValueError, TypeError) as error:
            # The client library passes unknown options of the URL to a constructor, which then raises TypeError.
            raise SettingsError(f"--state {url.shown}: {url.hidden(str(error))}") from None
        found = self._ask(lambda: self._redis.get(f"{PREFIX}format"))
        if found != b"%d" % FORMAT:
            raise StoreError(f"{url.shown} has keys of format {found!r}, and this version of antiphon reads {FORMAT}")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        failures: list[StoreError | None] = self._ask(lambda: self._write_all(writes))
        return failures

    def _write_all(self, writes: Sequence[Write]) -> list[StoreError | None]:
        pipe = self._redis.pipeline(transaction=False)
        failures: dict[int, StoreError | None] = {}
        asked: list[int] = []
        for number, write in enumerate(writes):
            try:
                values = self._values(write)
            except (TypeError, ValueError) as error:
                failures[number] = RowError(f"the session {write.hold.session_id} cannot be stored: {error}")
                continue
            self._write(_keys(write.hold.session_id), values, client=pipe)
            asked.append(number)
        for number, answer in zip(asked, pipe.execute(), strict=True):
            session_id = writes[number].hold.session_id
            outcomes = {b"written": None, b"superseded": superseded(session_id)}
            failures[number] = outcomes.get(answer, damaged(session_id))
        return [failures[number] for number in range(len(writes))]

    def _values(self, write: Write) -> list[str | int | float | bytes]:
        row, hold = write.row, write.hold
        flags = [int(flag) for flag in (write.forgets, row is not None, write.clears_tail, write.releases)]
        fields: list[str | int | float | bytes] = []
        if row:
            for name, value in zip(FIELDS, write.values, strict=True):
                if not isinstance(value, str | int | bytes):
                    raise TypeError(f"{name} is a {type(value).__name__}")
                fields += [name, value]
        chunks: list[int | bytes] = []
        for chunk in write.chunks.items():
            chunks += chunk
        bounds = [self._max_age_ms, MAX_TAIL_BYTES]
        return [hold.owner, hold.fence, *flags, *bounds, len(fields), *fields, *chunks]

    def read(self, session_id: str) -> StoredSession | None:
        kind = self._ask(lambda: self._redis.type(_keys(session_id)[0]))
        if kind not in (b"none", b"hash"):
            raise damaged(session_id)
        values = self._ask(lambda: self._redis.hmget(_keys(session_id)[0], FIELDS))
        # A forgotten row has only a fence.
        return _row(session_id, values) if any(values[:4]) else None

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        found = self._ask(lambda: self._redis.hgetall(_keys(session_id)[1]))
        try:
            chunks = [chunk_of(session_id, int(at_ms), data) for at_ms, data in found.items() if at_ms != b"size"]
        except ValueError:
            raise damaged(session_id) from None
        return tuple(sorted(chunks, key=lambda chunk: chunk.at_ms))

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        # A script that fails midway is not rolled back, so check that the row is valid first.
        if self.read(session_id) is None:
            return ClaimRefusal.UNKNOWN
        keys, values = [_keys(session_id)[0]], [new_owner, seen_fence, f"{PREFIX}host:"]
        answer = self._ask(lambda: self._claim(keys, values))
        return _row(session_id, answer) if isinstance(answer, list) else ClaimRefusal(answer.decode())

    def purge(self) -> None:
        """Do nothing: Redis deletes expired keys itself."""

    # --- hosts --------------------------------------------------------------------------------------------------------

    def renew(self, host: Host) -> None:
        def ask() -> None:
            pipe = self._redis.pipeline()
            values: dict[str, str | float] = {"address": host.address, "draining": int(host.draining)}
            if host.load is not None:
                values["load"] = host.load
            pipe.hset(_host_key(host.name), mapping=values)
            pipe.pexpire(_host_key(host.name), self._host_ttl_ms)
            pipe.sadd(f"{PREFIX}hosts", host.name)
            pipe.execute()

        self._ask(ask)

    def unregister(self, name: str) -> None:
        for known in self._names():
            if known == name or known.startswith(f"{name}/"):
                self._ask(partial(self._redis.delete, _host_key(known)))
                self._ask(partial(self._redis.srem, f"{PREFIX}hosts", known))

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are alive, and remove the names of dead ones from the set of names."""
        living = {name: self.host(name) for name in self._names()}
        dead = [name for name, host in living.items() if host is None]
        if dead:
            self._ask(lambda: self._redis.srem(f"{PREFIX}hosts", *dead))
        return tuple(host for host in living.values() if host)

    def host(self, name: str) -> Host | None:
        found = self._ask(lambda: self._redis.hgetall(_host_key(name)))
        if not found:
            return None
        load: float | None = None
        with suppress(KeyError, ValueError):
            load = float(found[b"load"])
        address = found.get(b"address", b"").decode(errors="replace")
        return host_of(name, address, load, found.get(b"draining") == b"1")

    def _names(self) -> list[str]:
        return [name.decode(errors="replace") for name in self._ask(lambda: self._redis.smembers(f"{PREFIX}hosts"))]

    # --- the server ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._redis.close()

    def _ask(self, ask: Callable[[], Any]) -> Any:
        """Run a query. Its errors become StoreError, without the URL's password."""
        try:
            return ask()
        except self._errors as error:
            raise StoreError(f"{self._url.shown}: {self._url.hidden(str(error))}") from None


def _keys(session_id: str) -> tuple[str, str]:
    return f"{PREFIX}session:{session_id}", f"{PREFIX}tail:{session_id}"


def _host_key(name: str) -> str:
    return f"{PREFIX}host:{name}"


def _row(session_id: str, values: Sequence[bytes | None]) -> StoredSession:
    version, key_hash, token, snapshot, owner, *counts = values
    try:
        numbers = [int(n or b"") for n in (version, *counts)]
        texts = [(text or b"").decode() for text in (key_hash, owner)]
    except ValueError:
        raise damaged(session_id) from None
    if [b"%d" % n for n in numbers] != [version, *counts]:
        raise damaged(session_id)
    return row_of(session_id, (numbers[0], texts[0], token, snapshot, texts[1], *numbers[1:]))
