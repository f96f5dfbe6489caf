"""A cache with a fair share for each owner: one owner's entries cannot evict all entries of another."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class FairCache(Generic[Key, Value]):
    """At most `max_entries` values by owner and key. Thread-safe.

    If the cache is full, the owner with the most entries loses its least recently used entry.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        # Each owner's entries, the least recently used first.
        self._by_owner: dict[Hashable, dict[Key, Value]] = {}
        self._num_entries = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return self._num_entries

    def get(self, owner: Hashable, key: Key) -> Value | None:
        """Return the owner's value for a key, or None if there is none. The value counts as used."""
        with self._lock:
            own = self._by_owner.get(owner, {})
            if key not in own:
                return None
            own[key] = value = own.pop(key)
            return value

    def put(self, owner: Hashable, key: Key, value: Value) -> None:
        """Store a value, replacing the owner's value with the same key. It counts as used."""
        with self._lock:
            own = self._by_owner.setdefault(owner, {})
            self._num_entries += key not in own
            own.pop(key, None)
            own[key] = value
            if self._num_entries > self._max_entries:
                most = max(self._by_owner, key=lambda held: len(self._by_owner[held]))
                del self._by_owner[most][next(iter(self._by_owner[most]))]
                self._num_entries -= 1
                if not self._by_owner[most]:
                    del self._by_owner[most]
