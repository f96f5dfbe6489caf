"""What one client of a realtime session may send: how many events without audio, and how much that has to be kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events.conversation import CreateItem, CreateResponse
from antiphon.events.size import num_bytes
from antiphon.server.memory import MemoryAccount

RATE_WINDOW_S = 2.0
# The most items to which a client may add another: finding one takes a search through all.
MAX_ITEMS = 10_000
# How many commands are refused for want of memory before the session ends.
MAX_REFUSED = 100


class CommandBounds:
    """The bounds of one session. `max_events_per_s`: of events without audio, on average over RATE_WINDOW_S."""

    def __init__(
        self, memory: MemoryAccount, max_events_per_s: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._max_events_per_s = max_events_per_s
        self._clock = clock
        # When the last events without audio came, of the last RATE_WINDOW_S.
        self._event_times_s: deque[float] = deque()
        self._num_refused = 0

    @property
    def is_spent(self) -> bool:
        """Whether so many commands were refused for want of memory that the session has to end."""
        return self._num_refused >= MAX_REFUSED

    def count_event(self) -> bool:
        """Count an event without audio; return whether they are too many."""
        now_s = self._clock()
        self._event_times_s.append(now_s)
        while self._event_times_s[0] < now_s - RATE_WINDOW_S:
            self._event_times_s.popleft()
        return len(self._event_times_s) > self._max_events_per_s * RATE_WINDOW_S

    def check(self, command: CreateItem | CreateResponse, num_items: int) -> None:
        """Raise RemoteProtocolError where what a command brings may not be kept, in a history of `num_items`."""
        if isinstance(command, CreateItem) and num_items >= MAX_ITEMS:
            raise RemoteProtocolError("conversation_too_large", f"A conversation may have {MAX_ITEMS} items.")
        try:
            self._memory.check(num_bytes(command))
        except Refused as refusal:
            self._num_refused += 1
            raise RemoteProtocolError("memory_limit_exceeded", f"This was not kept: {refusal}.") from None
