"""Places for work of clients, of which every key has its share: those that wait have turns, key by key."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from antiphon.shares.fair_queue import FairQueue

# The API key of a request or session, "" without one: set once, and inherited by its tasks and threads. None: the
# server's own work.
current_owner: ContextVar[Hashable] = ContextVar("owner", default=None)


@dataclass(slots=True, eq=False)
class _Waiting:
    owner: Hashable
    # All are equally urgent: an owner's come in their order.
    deadline_s: float = 0.0
    has_place: bool = False
    granted: Future[None] = field(default_factory=Future)


class Places:
    """`num_places` places, of which one owner holds at most `per_owner` (default: all) at the same time.

    Where some wait, the owner whose last turn is longest ago is next: one that comes waits for one place of each other
    owner, however many of theirs wait. `per_owner` is for work that may last: it leaves places free for others. For
    tasks of any event loops. Waits are bounded by the work that clients may have under way (`--sessions-per-key`).
    """

    def __init__(self, num_places: int, per_owner: int | None = None) -> None:
        self.num_places = num_places
        self.per_owner = per_owner or num_places
        self._held = Counter[Hashable]()
        self._queue = FairQueue[_Waiting]()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """How many wait for a place now."""
        return self._queue.num_waiting

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold a place for `current_owner` while the block runs. Waits for one; a task that is cancelled waits no more.

        A task that holds a place must not ask for another of the same.
        """
        release = await self.take()
        try:
            yield
        finally:
            release()

    async def take(self) -> Callable[[], None]:
        """Wait for a place of `current_owner`, and return what gives it back, once, from any thread."""
        waiting = _Waiting(current_owner.get())
        with self._lock:
            # A place that is free for this owner is for none of those that wait: they would have it.
            if self._is_free_for(waiting.owner):
                self._hold(waiting)
            else:
                self._queue.append(waiting)
        try:
            if not waiting.has_place:
                await asyncio.wrap_future(waiting.granted)
        except BaseException:
            self._leave(waiting)
            raise
        return partial(self._leave, waiting)

    def _leave(self, waiting: _Waiting) -> None:
        """Give back a place, or wait for none any more."""
        with self._lock:
            if waiting.has_place:
                self._held[waiting.owner] -= 1
                if not self._held[waiting.owner]:
                    del self._held[waiting.owner]
            else:
                self._queue.remove(waiting)
            self._grant()

    def _grant(self) -> None:
        """Give free places to those that wait. Needs the lock."""
        if not self._queue.num_waiting:
            return
        for waiting in self._queue.in_turns():
            if self._held.total() >= self.num_places:
                return
            # A task that is cancelled takes itself out.
            if self._is_free_for(waiting.owner) and waiting.granted.set_running_or_notify_cancel():
                self._queue.remove(waiting)
                self._hold(waiting)
                waiting.granted.set_result(None)

    def _is_free_for(self, owner: Hashable) -> bool:
        return self._held.total() < self.num_places and self._held[owner] < self.per_owner

    def _hold(self, waiting: _Waiting) -> None:
        self._queue.take_turn(waiting.owner)
        self._held[waiting.owner] += 1
        waiting.has_place = True
