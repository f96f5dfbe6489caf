"""Threads for clients' work.

The server's own work, such as a host's lease, uses anyio's default threads, so clients cannot occupy them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from antiphon.shares.places import Places

T = TypeVar("T")
Args = TypeVarTuple("Args")

# For work that is quick, or that waits for a disk or the session store. A single key gets at most half.
THREADS = Places(40, per_owner=20)
# For pictures; see vision/images.py for the number. Decoding one takes at most a second.
IMAGE_THREADS = Places(2)
# For sound files. Decoding one may take seconds, so one place is always left for another key.
FILE_THREADS = Places(3, per_owner=2)
# For messages with JSON schemas, and for grammars made from them. Each may take `--grammar-s` seconds.
GRAMMAR_THREADS = Places(2, per_owner=1)


async def in_thread(function: Callable[[*Args], T], *args: *Args, places: Places = THREADS) -> T:
    """Call `function` in a thread and return its result. The thread holds one of `places` for `current_owner`.

    Waits for a place, and then for the function, even if the task's cancel scope is cancelled meanwhile. If the task
    itself is cancelled, it stops waiting, and the function runs to its end. The place is given back when the function
    ends.
    """
    release = await places.take()
    begun = Future[None]()

    def call() -> T:
        if not begun.set_running_or_notify_cancel():
            raise CancelledError
        try:
            return function(*args)
        finally:
            release()

    try:
        # `places` already bounds the number of threads.
        return await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1))
    finally:
        if begun.cancel():
            release()
