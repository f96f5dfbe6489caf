"""Threads for the work of clients.

anyio's own threads are for the server's work, such as a host's lease: no client can fill them.
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

# What is quick, or waits for a disk or the session store. A key that is alone has half.
THREADS = Places(40, per_owner=20)
# Pictures that are decoded at the same time; vision/images.py has the reason. None takes longer than a second.
IMAGE_THREADS = Places(2)
# Sound files that are decoded at the same time. One may take seconds, so that one place is always another key's.
FILE_THREADS = Places(3, per_owner=2)
# Messages with JSON schemas, and grammars made of these: each may take `--grammar-s`.
GRAMMAR_THREADS = Places(2, per_owner=1)


async def in_thread(function: Callable[[*Args], T], *args: *Args, places: Places = THREADS) -> T:
    """Return what `function` returns in a thread, which holds one of `places` for `current_owner` until it ends.

    Waits for a place, and then until the function returns, whether the task's cancel scope is cancelled meanwhile or
    not. A task that is cancelled by itself leaves the function to its end.
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
        # The place is the bound.
        return await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1))
    finally:
        if begun.cancel():
            release()
