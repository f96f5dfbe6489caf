"""How many bytes clients make the server hold: an account for each session and request, within those of its API key.

Whoever keeps something for a client says how much it is (`MemoryAccount.hold`), and asks before it keeps more
(`check`). What is counted: docs/design/memory.md.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from antiphon.errors import Refused
from antiphon.settings import MemorySettings

MIB = 1 << 20
# Of clients that have to wait until a key or the server holds less.
RETRY_AFTER_S = 10.0
# After a session that held this much has ended, its memory is given back to the system; at most so often.
LARGE_BYTES, RECLAIM_EVERY_S = 16 * MIB, 10.0


@dataclass(slots=True)
class MemoryAccount:
    """What one session, request or client secret holds. From `MemoryLedger.open`; the owner closes it, once."""

    key: str
    _ledger: MemoryLedger
    num_bytes: int = 0
    # The most that it has held so far.
    peak_bytes: int = 0

    def check(self, more: int) -> None:
        """Raise Refused where `more` bytes would exceed what a session, the key or the server may hold.

        Nothing is kept by this call. A key that holds less than its equal part of the server's memory is not refused
        because others hold theirs.
        """
        self._ledger.check(self, more)

    def hold(self, num_bytes: int) -> None:
        """Say that the owner holds this much now, whatever it was before. Never refused: what is there counts."""
        self._ledger.add(self.key, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
        self.peak_bytes = max(self.peak_bytes, num_bytes)

    def close(self) -> None:
        """Say that the owner is gone and holds nothing. The last call."""
        self.hold(0)
        self._ledger.closed(self)


@dataclass(slots=True)
class MemoryLedger:
    """The accounts of one server. `reclaim` is called after something large was given back, at most every
    RECLAIM_EVERY_S; `now_s` returns monotonic seconds. Used from one event loop.
    """

    settings: MemorySettings
    reclaim: Callable[[], None] = lambda: None
    now_s: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    # How often `check` has refused, by what was full: "session", "key" or "server".
    num_refused: dict[str, int] = field(default_factory=lambda: {"session": 0, "key": 0, "server": 0})
    _by_key: dict[str, int] = field(default_factory=dict)
    _num_accounts: dict[str, int] = field(default_factory=dict)
    _reclaimed_s: float = -RECLAIM_EVERY_S

    @property
    def limit_bytes(self) -> int:
        """What all keys together may hold."""
        return self.settings.total_memory_mb * MIB

    def open(self, key: str) -> MemoryAccount:
        """Open an account that counts for `key` ("": all keyless clients). It holds nothing yet."""
        self._num_accounts[key] = self._num_accounts.get(key, 0) + 1
        return MemoryAccount(key, self)

    @contextmanager
    def opened(self, key: str) -> Iterator[MemoryAccount]:
        """Open an account for the block, and close it at its end."""
        account = self.open(key)
        try:
            yield account
        finally:
            account.close()

    def check(self, account: MemoryAccount, more: int) -> None:
        """Raise Refused as `MemoryAccount.check` does."""
        settings, of_key = self.settings, self._by_key.get(account.key, 0)
        if account.num_bytes + more > settings.session_memory_mb * MIB:
            self._refuse("session", f"a session may hold {settings.session_memory_mb} MiB", by_own_limit=True)
        if of_key + more > settings.key_memory_mb * MIB:
            self._refuse("key", f"the sessions of one key may hold {settings.key_memory_mb} MiB", by_own_limit=True)
        share = self.limit_bytes // max(1, len(self._num_accounts))
        if self.num_bytes + more > self.limit_bytes and of_key + more > share:
            self._refuse("server", f"all sessions may hold {settings.total_memory_mb} MiB", by_own_limit=False)

    def _refuse(self, scope: str, reason: str, *, by_own_limit: bool) -> None:
        self.num_refused[scope] += 1
        raise Refused(reason, RETRY_AFTER_S, by_own_limit=by_own_limit)

    def add(self, key: str, num_bytes: int) -> None:
        """Count more, or less, for a key. For MemoryAccount."""
        self.num_bytes += num_bytes
        self._by_key[key] = self._by_key.get(key, 0) + num_bytes

    def closed(self, account: MemoryAccount) -> None:
        """Forget a key whose last account is closed, and give memory back after a large one. For MemoryAccount."""
        self._num_accounts[account.key] -= 1
        if not self._num_accounts[account.key]:
            del self._num_accounts[account.key]
            self._by_key.pop(account.key, None)
        if account.peak_bytes >= LARGE_BYTES and self.now_s() >= self._reclaimed_s + RECLAIM_EVERY_S:
            self._reclaimed_s = self.now_s()
            self.reclaim()


def settle_garbage() -> None:
    """Take all objects that live now out of the garbage collector's sight: call it when the models are loaded.

    They live as long as the process. Collections are a few milliseconds after that, and the collector, which waits for
    garbage to be a quarter of everything, runs often enough to free sessions that have ended.
    """
    gc.collect()
    gc.freeze()


async def reclaim_soon() -> None:
    """Call `reclaim` in a thread, a moment from now: a session that has just closed is still in use."""
    await anyio.sleep(1.0)
    await anyio.to_thread.run_sync(reclaim)


def reclaim() -> None:
    """Collect garbage, and give free memory back to the system, which glibc does not by itself. Call it in a thread.

    Where the C library has no `malloc_trim`, only garbage is collected.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
