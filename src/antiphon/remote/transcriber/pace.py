"""How often the servers of whole windows are asked for partials.

A server may decode one window at a time, or many. A partial that waits there delays the finals behind it. So the number
of partials under way at a server grows while their times stay near the shortest ones, and shrinks when they do not.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A partial is slow if it takes more than SLOW times as long as the fastest of the last MAX_TIMES ones, by their sizes.
SLOW, MAX_TIMES = 2.0, 64
# The share of its limit that a server keeps after a slow partial, and the highest limit.
KEPT_SHARE, MAX_LIMIT = 0.7, 64.0
# A session's partials take at most this share of the time: after a partial, it waits as long as the partial took.
REST = 1.0


class Pace:
    """The partials of all sessions at one server."""

    def __init__(self) -> None:
        self._limit = 1.0
        self._running = 0
        self._seconds_by_size: deque[float] = deque(maxlen=MAX_TIMES)
        # Partials that wait for their turn. A session has at most one.
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """The number of partials that may be under way."""
        return int(self._limit)

    @property
    def is_full(self) -> bool:
        """Whether another partial has to wait."""
        return self._running >= self.limit

    @property
    def num_waiting(self) -> int:
        """The number of partials that wait."""
        return len(self._waiting)

    async def begin(self) -> None:
        """Wait until another partial may be sent, and count it. The first to wait goes first."""
        while self.is_full:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
            finally:
                self._waiting.remove(turn)
        self._running += 1

    def _wake(self) -> None:
        """Let the first partial that still waits check whether it may be sent."""
        turn = next((turn for turn in self._waiting if not turn.done()), None)
        if turn:
            turn.set_result(None)

    def end(self, took_s: float | None, size: float) -> float:
        """Note the end of a partial. Return the seconds for which its session should rest.

        `took_s`: None if it was cancelled or failed. `size`: as the time is proportional to it.
        """
        self._running -= 1
        self._wake()
        if took_s is None:
            return 0.0
        by_size = took_s / size
        fastest = min(self._seconds_by_size, default=by_size)
        self._seconds_by_size.append(by_size)
        if by_size > SLOW * fastest:
            self._limit = max(1.0, self._limit * KEPT_SHARE)
        else:
            self._limit = min(MAX_LIMIT, self._limit + 1.0 / self._limit)
        return REST * took_s
