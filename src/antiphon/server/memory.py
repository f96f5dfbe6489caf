"""How many bytes clients make the server hold: an account for each session and request, within those of its API key.

Whoever keeps something for a client says how much it is (`MemoryAccount.hold`), and asks before it keeps more
(`check`). What is counted: docs/design/memory.md.
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
# Of clients that have to wait until a key or the server holds less.
RETRY_AFTER_S = 10.0
# How often the process's memory is looked at, and by how much it may exceed what it was, and what clients hold, before
# garbage is collected and free memory is given back to the system.
LOOK_EVERY_S, EXCESS_BYTES = 5.0, 64 * MIB


@dataclass(slots=True)
class MemoryAccount:
    """What one session, request or client secret holds. From `MemoryLedger.open`; the owner closes it, once."""

    key: str
    _ledger: MemoryLedger
    num_bytes: int = 0

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

    def close(self) -> None:
        """Say that the owner is gone and holds nothing. The last call."""
        self.hold(0)
        self._ledger.closed(self)


@dataclass(slots=True)
class MemoryLedger:
    """The accounts of one server. Used from one event loop."""

    settings: MemorySettings
    num_bytes: int = 0
    # How often `check` has refused, by what was full: "session", "key" or "server".
    num_refused: dict[str, int] = field(default_factory=lambda: {"session": 0, "key": 0, "server": 0})
    _by_key: dict[str, int] = field(default_factory=dict)
    _num_accounts: dict[str, int] = field(default_factory=dict)

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
        """Forget a key whose last account is closed. For MemoryAccount."""
        self._num_accounts[account.key] -= 1
        if not self._num_accounts[account.key]:
            del self._num_accounts[account.key]
            self._by_key.pop(account.key, None)


def settle_garbage() -> None:
    """Take all objects that live now out of the garbage collector's sight: call it when the models are loaded.

    They live as long as the process. Collections are a few milliseconds after that, and the collector, which waits for
    garbage to be a quarter of everything, runs often enough to free sessions that have ended.
    """
    gc.collect()
    gc.freeze()


async def reclaim_excess(
    ledger: MemoryLedger,
    resident_bytes: Callable[[], int] | None = None,
    give_back: Callable[[], None] | None = None,
) -> None:
    """Give free memory back to the system whenever there is much of it, until cancelled.

    There is, where the process has grown by EXCESS_BYTES more than clients hold since it was last done: large sessions
    have ended, or images were decoded. A KV that grows makes it look once for each EXCESS_BYTES. `resident_bytes` and
    `give_back` (in a thread) default to the process's memory and `reclaim`.
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
    """The memory of the process, in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def reclaim() -> None:
    """Collect garbage, and give free memory back to the system, which glibc does not by itself. Call it in a thread.

    Where the C library has no `malloc_trim`, only garbage is collected.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
