"""The common moments at which requests of many sessions go on, so that they share the passes of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable


class Tick:
    """Lets requests of many sessions wait for a common moment, so that they share the passes of a model.

    `interval_s`: the time between two moments; 0: no request waits.
    """

    # A session counts as active if its last request was at most this number of seconds ago.
    ACTIVE_S = 2.5

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        # The last two sessions that asked, the newest first, and when they did.
        self._asked: list[tuple[Hashable, float]] = []
        self._next: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def wait(self, session: Hashable) -> None:
        """Wait for the next moment. Returns at once if no other session is active."""
        loop = asyncio.get_running_loop()
        now, others = loop.time(), [(s, at) for s, at in self._asked if s != session]
        self._asked = [(session, now), *others[:1]]
        if not self.interval_s or not others or now - others[0][1] > self.ACTIVE_S:
            return
        if self._next is None or self._next[0] is not loop:
            moment = asyncio.Event()
            self._next = loop, moment
            loop.call_at((now // self.interval_s + 1) * self.interval_s, self._come, moment)
        await self._next[1].wait()

    def _come(self, moment: asyncio.Event) -> None:
        self._next = None
        moment.set()
