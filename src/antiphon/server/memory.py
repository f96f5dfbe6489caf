"""Accounts for the memory that the server holds for its clients, by session or request, by API key, and in total.

Code that keeps data for a client reports its size (`MemoryAccount.hold`), and asks before it keeps more
(`MemoryAccount.check`). See docs/design/memory.md for what is counted.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from antiphon.errors import Refused
from antiphon.settings import MemorySettings

MIB = 1 << 20
# Retry-After for clients that are refused because memory is short.
RETRY_AFTER_S = 10.0
# Interval, in seconds, at which the process's memory is measured, and the excess above which garbage is collected and
# free memory is returned to the system. The excess is counted in bytes above the process's least memory plus the memory
# held for clients.
LOOK_EVERY_S, EXCESS_BYTES = 5.0, 64 * MIB


@dataclass(slots=True)
class MemoryAccount:
    """The memory held for one session, request or client secret. `MemoryLedger.open` makes it; its owner closes it."""

    key: str
    _ledger: MemoryLedger
    num_bytes: int = 0

    def check(self, more: int) -> None:
        """Raise Refused if `more` bytes would exceed the limit of a session, of the key or of the server.

        Does not reserve memory. A key is not refused because other keys hold too much, if it holds less than its equal
        share of the server's memory.
        """
        self._ledger.check(self, more)

    def hold(self, num_bytes: int) -> None:
        """Set the number of bytes that the owner holds now. Never refused."""
        self._ledger.add(self.key, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Release everything, at the end of the owner. Must be the last call."""
        self.hold(0)
        self._ledger.closed(self)


@dataclass(slots=True)
class MemoryLedger:
    """The accounts of one server. Used from one event loop."""

    settings: MemorySettings
    num_bytes: int = 0
    # Number of refusals by `check`, by the limit that was reached: "session", "key" or "server".
    num_refused: dict[str, int] = field(default_factory=lambda: {"session": 0, "key": 0, "server": 0})
    _by_key: dict[str, int] = field(default_factory=dict)
    _num_accounts: dict[str, int] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> int:
        """Maximum number of bytes that all keys together may hold."""
        return self.settings.total_memory_mb * MIB

    def open(self, key: str) -> MemoryAccount:
        """Open an empty account that counts for `key`. All clients without a key share the key ""."""
        self._num_accounts[key] = self._num_accounts.get(key, 0) + 1
        return MemoryAccount(key, self)

    @contextmanager
    def opened(self, key: str) -> Iterator[MemoryAccount]:
        """Open an account for the duration of the block."""
        account = self.open(key)
        try:
            yield account
        finally:
            account.close()

    def check(self, account: MemoryAccount, more: int) -> None:
        """Raise Refused if `more` bytes would exceed a limit; see `MemoryAccount.check`."""
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
        """Add to the bytes that a key holds; a negative number subtracts. Called by MemoryAccount."""
        self.num_bytes += num_bytes
        self._by_key[key] = self._by_key.get(key, 0) + num_bytes

    def closed(self, account: MemoryAccount) -> None:
        """Forget a key whose last account is closed. Called by MemoryAccount."""
        self._num_accounts[account.key] -= 1
        if not self._num_accounts[account.key]:
            del self._num_accounts[account.key]
            self._by_key.pop(account.key, None)


def settle_garbage() -> None:
    """Exclude all objects that exist now from garbage collection. Call it after the models are loaded.

    These objects live as long as the process. A collection that skips them takes a few milliseconds. The collector runs
    when garbage is a quarter of the objects that it tracks, so without them it runs often enough to free sessions that
    have ended.
    """
    gc.collect()
    gc.freeze()


async def reclaim_excess(
    ledger: MemoryLedger,
    resident_bytes: Callable[[], int] | None = None,
    give_back: Callable[[], None] | None = None,
) -> None:
    """Return free memory to the system when the process has too much of it, until cancelled.

    This happens if the process has grown, since the last time, by EXCESS_BYTES more than the memory held for clients:
    for example after large sessions have ended or images were decoded. A growing KV also triggers it, once for each
    EXCESS_BYTES. `resident_bytes` defaults to the process's memory, and `give_back`, which runs in a thread, to
    `reclaim`.
    """
    resident_bytes, give_back = resident_bytes or _resident_bytes, give_back or reclaim
    least = resident_bytes()
    while True:
        await anyio.sleep(LOOK_EVERY_S)
        least = min(least, resident_bytes())
        if resident_bytes() > least + ledger.num_bytes + EXCESS_BYTES:
            await anyio.to_thread.run_sync(give_back)
            least = resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of the process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def reclaim() -> None:
    """Collect garbage, and return free memory to the system, which glibc does not do by itself. Call it in a thread.

    Only collects garbage if the C library has no `malloc_trim`.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
