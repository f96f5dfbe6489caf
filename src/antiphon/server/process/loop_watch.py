"""Watches the event loop from a thread of its own: how long it takes to answer, and what holds it when it does not.

All sessions share one event loop, so whatever holds it holds all of them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

import anyio

log = logging.getLogger(__name__)
# How often the loop is asked, and after what time without an answer the log says what holds it.
INTERVAL_S, LIMIT_S = 0.05, 0.25
# At most one such line in this time, and the innermost calls that it shows.
LOG_EVERY_S, MAX_FRAMES = 10.0, 12


async def watch_loop(observe: Callable[[float], None], limit_s: float = LIMIT_S) -> None:
    """Watch the running event loop until cancelled.

    `observe` is called in another thread, with the seconds from when the loop was asked to call back to when it did. A
    loop that has not done so after `limit_s` is logged as a warning, with the stack of its thread at that moment.
    """
    watch = _Watch(asyncio.get_running_loop(), observe, limit_s)
    threading.Thread(target=watch.run, name="loop-watch", daemon=True).start()
    try:
        await anyio.sleep_forever()
    finally:
        # Not joined: the thread may be waiting for this loop. It ends within `limit_s`.
        watch.stopped.set()


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None], limit_s: float) -> None:
        self._loop, self._observe, self._limit_s = loop, observe, limit_s
        self._loop_thread = threading.get_ident()
        self._logged_s = -LOG_EVERY_S
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            asked_s, answered = time.monotonic(), threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                # The loop is closed.
                return
            if not answered.wait(self._limit_s):
                self._tell()
            while not answered.wait(self._limit_s):
                if self.stopped.is_set():
                    return
            self._observe(time.monotonic() - asked_s)

    def _tell(self) -> None:
        """Log where the loop's thread is now, unless another line has just been logged."""
        frame, now_s = sys._current_frames().get(self._loop_thread), time.monotonic()
        if frame is None or self.stopped.is_set() or now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        calls = "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        log.warning("the event loop has been held for %.0f ms by:\n%s", self._limit_s * 1000, calls.rstrip())
