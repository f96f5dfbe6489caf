"""Stores sessions in Redis or Valkey: a hash for each row, a hash for its tail, a key for each host.

Each script is atomic. The scripts build key names themselves, which Redis Cluster does not allow. The server's own
setting `appendfsync` decides how much it loses when it is killed.

A row that differs little from the session's last whole row is written as a patch (`patches.py`) beside it, since each
write crosses a network. A released row is whole, so that hosts of an earlier version can continue the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
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
from antiphon.store.sessions.patches import Bases, Patch, base_id, patched
from antiphon.store.sessions.url import StoreUrl

# The format of the keys, stored in `antiphon:format`.
FORMAT = 1
PREFIX = "antiphon:"
FIELDS = ("version", "key_hash", "token", "snapshot", "owner", "fence", "events", "audio_ms", "restores")
# Answers of WRITE: the write was applied, and the base of a patch is missing, so that nothing was changed.
WRITTEN, NO_BASE = b"written", b"no base"
# The version of a row whose snapshot is the base of its patch. Earlier versions of the server refuse such a row.
PATCHED_VERSION = 100 + ROW_VERSION
# KEYS: row. ARGV: owner and fence of the hold; four flags, "1" or "0": whether the write forgets, has a row, clears the
# tail, releases; the row's lifetime in milliseconds; the limit on the tail in bytes; the id of the base, "" without a
# patch; the number of the row's values, and these values; then at_ms and data of each chunk. The values are names and
# values of fields or, with a patch, the patch, events, audio_ms and restores. A forgotten row has only a fence, so its
# owner equals no host.
WRITE = """
local tail_key = string.gsub(KEYS[1], ':session:', ':tail:', 1)
local kind, tail = redis.call('TYPE', KEYS[1])['ok'], redis.call('TYPE', tail_key)['ok']
if (kind ~= 'none' and kind ~= 'hash') or (tail ~= 'none' and tail ~= 'hash') then return 'damaged' end
local owner, fence, max_ms, base = ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[6]
local function flag(n) return string.sub(ARGV[3], n, n) == '1' end
local forgets, has_row, clears, releases = flag(1), flag(2), flag(3), flag(4)
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
        redis.call('DEL', KEYS[1], tail_key)
        redis.call('HSET', KEYS[1], 'fence', ARGV[2])
        redis.call('PEXPIRE', KEYS[1], max_ms)
    end
    return 'written'
end
local at = 8 + tonumber(ARGV[7])
if has_row then
    if base == '' then
        redis.call('HSET', KEYS[1], unpack(ARGV, 8, at - 1))
    else
        local held = redis.call('HMGET', KEYS[1], 'base', 'fence')
        if held[1] ~= base or held[2] ~= ARGV[2] then return 'no base' end
        redis.call('HSET', KEYS[1], 'version', PATCHED, 'patch', ARGV[8], 'events', ARGV[9], 'audio_ms', ARGV[10],
            'restores', ARGV[11])
    end
    redis.call('PEXPIRE', KEYS[1], max_ms)
    redis.call('PEXPIRE', tail_key, max_ms)
elseif releases and found then
    redis.call('HSET', KEYS[1], 'owner', '', 'restores', '0')
end
if clears then
    redis.call('DEL', tail_key)
end
if at <= #ARGV and (found or has_row) then
    local size = tonumber(redis.call('HGET', tail_key, 'size') or '0')
    if not size then return 'damaged' end
    while at < #ARGV do
        local data = ARGV[at + 1]
        if size + #data <= tonumber(ARGV[5]) and redis.call('HSETNX', tail_key, ARGV[at], data) == 1 then
            size = size + #data
        end
        at = at + 2
    end
    redis.call('HSET', tail_key, 'size', size)
    redis.call('PEXPIRE', tail_key, max_ms)
end
return 'written'
""".replace("PATCHED", str(PATCHED_VERSION))
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
    'restores', 'patch')
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
        self._no_script = redis.exceptions.NoScriptError
        # Redis deletes a key with a lifetime of 0 ms at once.
        self._bases = Bases()
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
        answers = self._answers(writes)
        if again := [number for number, answer in enumerate(answers) if answer == NO_BASE]:
            # The server has lost the base, or its answer to the write of a base was lost.
            for number in again:
                self._bases.drop(writes[number].hold.session_id)
            for number, answer in zip(again, self._answers([writes[n] for n in again]), strict=True):
                answers[number] = answer
        return [self._failure(write, answer) for write, answer in zip(writes, answers, strict=True)]

    def _answers(self, writes: Sequence[Write]) -> list[bytes | StoreError]:
        """Apply the writes, and return the script's answer for each, or the error of an invalid row."""
        answers: list[bytes | StoreError] = [b""] * len(writes)
        asked: dict[int, tuple[Write, Patch | None]] = {}
        pipe = self._redis.pipeline(transaction=False)
        for number, write in enumerate(writes):
            if write.releases and write.row is None:
                write = replace(write, row=self._bases.newest(write.hold.session_id))
            try:
                patch = None if write.row is None or write.releases else self._bases.patch(write.row)
                pipe.evalsha(self._write.sha, 1, _keys(write.hold.session_id)[0], *self._values(write, patch))
                asked[number] = write, patch
            except (TypeError, ValueError) as error:
                answers[number] = RowError(f"the session {write.hold.session_id} cannot be stored: {error}")
        found = self._ask(partial(self._executed, pipe)) if asked else ()
        for (number, (write, patch)), answer in zip(asked.items(), found, strict=True):
            answers[number] = answer
            if answer != WRITTEN or write.releases or write.forgets:
                self._bases.drop(write.hold.session_id)
            elif write.row:
                self._bases.wrote(write.row, whole=patch is None)
        return answers

    def _executed(self, pipe: Any) -> list[bytes]:
        """Execute a pipeline of scripts, and return their answers. Loads the script if the server has forgotten it."""
        queued = list(pipe.command_stack)
        found = pipe.execute(raise_on_error=False)
        if any(isinstance(answer, self._no_script) for answer in found):
            self._redis.script_load(WRITE)
            pipe.command_stack = queued
            found = pipe.execute(raise_on_error=False)
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return list(found)

    def _failure(self, write: Write, answer: bytes | StoreError) -> StoreError | None:
        if isinstance(answer, StoreError):
            return answer
        session_id = write.hold.session_id
        return {WRITTEN: None, b"superseded": superseded(session_id)}.get(answer, damaged(session_id))

    def _values(self, write: Write, patch: Patch | None) -> list[str | int | float | bytes]:
        row, hold = write.row, write.hold
        flags = "".join(str(int(f)) for f in (write.forgets, row is not None, write.clears_tail, write.releases))
        fields: list[str | int | float | bytes] = []
        for name, value in zip(FIELDS, write.values, strict=True) if row else ():
            if not isinstance(value, str | int | bytes):
                raise TypeError(f"{name} is a {type(value).__name__}")
            fields += [] if patch else [name, value]
        if row and patch:
            counts = row.received
            fields += [patch.data, counts.events, counts.audio_ms, row.restores]
        elif row:
            fields += ["base", base_id(row.snapshot)]
        chunks: list[int | bytes] = []
        for chunk in write.chunks.items():
            chunks += chunk
        bounds = [self._max_age_ms, MAX_TAIL_BYTES, patch.base if patch else ""]
        return [hold.owner, hold.fence, flags, *bounds, len(fields), *fields, *chunks]

    def read(self, session_id: str) -> StoredSession | None:
        kind = self._ask(lambda: self._redis.type(_keys(session_id)[0]))
        if kind not in (b"none", b"hash"):
            raise damaged(session_id)
        values = self._ask(lambda: self._redis.hmget(_keys(session_id)[0], (*FIELDS, "patch")))
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
    version, key_hash, token, snapshot, owner, *counts, patch = values
    try:
        numbers = [int(n or b"") for n in (version, *counts)]
        texts = [(text or b"").decode() for text in (key_hash, owner)]
    except ValueError:
        raise damaged(session_id) from None
    if [b"%d" % n for n in numbers] != [version, *counts]:
        raise damaged(session_id)
    if numbers[0] == PATCHED_VERSION:
        try:
            numbers[0], snapshot = ROW_VERSION, patched(snapshot or b"", patch or b"")
        except ValueError:
            raise damaged(session_id) from None
    return row_of(session_id, (numbers[0], texts[0], token, snapshot, texts[1], *numbers[1:]))
