"""Checks whether work on the event loop lets other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Counts the turns of the event loop that another task got."""

    count = 0


@contextmanager
def turns_of_others() -> Iterator[Turns]:
    """Count the turns that another task takes while the block runs. Needs a running event loop."""
    turns = Turns()

    async def others() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    try:
        yield turns
    finally:
        task.cancel()
