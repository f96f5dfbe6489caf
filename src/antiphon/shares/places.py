"""A limit of concurrent work with a fair share for each API key: keys that wait for a place take turns."""

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

# The API key of the current request or session; "" if it has no key, None for the server's own work. Set once, and
# inherited by tasks and threads.
current_owner: ContextVar[Hashable] = ContextVar("owner", default=None)


@dataclass(slots=True, eq=False)
class _Waiting:
    owner: Hashable
    # All are equally urgent, so an owner's requests keep their order.
    deadline_s: float = 0.0
    has_place: bool = False
    granted: Future[None] = field(default_factory=Future)


class Places:
    """A fair semaphore of `num_places`, of which one owner holds at most `per_owner` (default: all) at the same time.

    The owner whose last turn is longest ago is next. So a new owner waits for at most one place of each other owner,
    however many requests they have waiting. For work that may take long, `per_owner` leaves places free for other
    owners. Tasks of any event loop may use it. The number of waiting requests is bounded by the clients' permitted work
    (`--sessions-per-key`).
    """

    def __init__(self, num_places: int, per_owner: int | None = None) -> None:
        self.num_places = num_places
        self.per_owner = per_owner or num_places
        self._held = Counter[Hashable]()
        self._queue = FairQueue[_Waiting]()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a place now."""
        return self._queue.num_waiting

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold a place for `current_owner` while the block runs. Waits for one; cancelling the task ends the wait.

        A task that holds a place must not ask for another one.
        """
        release = await self.take()
        try:
            yield
        finally:
            release()

    async def take(self) -> Callable[[], None]:
        """Wait for a place of `current_owner`. Returns a function that gives it back once, from any thread."""
        waiting = _Waiting(current_owner.get())
        with self._lock:
            # If a place is free for this owner, no waiting request can use it, because that request would already hold
            # it.
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
        """Give back the place, or stop waiting for one."""
        with self._lock:
            if waiting.has_place:
                self._held[waiting.owner] -= 1
                if not self._held[waiting.owner]:
                    del self._held[waiting.owner]
            else:
                self._queue.remove(waiting)
            self._grant()

    def _grant(self) -> None:
        """Give free places to waiting requests. Must be called with the lock held."""
        if not self._queue.num_waiting:
            return
        for waiting in self._queue.in_turns():
            if self._held.total() >= self.num_places:
                return
            # A cancelled task removes itself.
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
