"""Reads a stream in a task of its own, so that whoever waits for it can leave at once, or wait for two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

from antiphon.errors import RemoteError

T = TypeVar("T")

# Items that wait for their reader; with more the stream is not read, and the server waits.
MAX_WAITING = 64


class ReaderTask(Generic[T]):
    """One stream, read from the construction until its end, or `end`.

    `tasks` holds the task while it goes on or is being closed, so that it is not garbage before its connection is
    closed.
    """

    def __init__(self, stream: AsyncGenerator[T, None], tasks: set[asyncio.Task[None]]) -> None:
        self._queue: asyncio.Queue[T | Exception] = asyncio.Queue(MAX_WAITING)
        self._ended = False
        self._task = asyncio.create_task(self._run(stream))
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    async def _run(self, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await self._queue.put(item)
            await self._queue.put(RemoteError("the model's server ended its answer"))
        except Exception as error:
            # Nobody reads a stream that was ended, and a full queue would hold it for ever.
            if not self._ended:
                await self._queue.put(error)

    async def take(self) -> T:
        """The next item, however long it takes. Raises what the stream failed with; RemoteError once it has ended."""
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def next(self, timeout_s: float) -> T:
        """The next item. Raises RemoteError where none comes within the time, and what `take` raises."""
        try:
            return await asyncio.wait_for(self.take(), timeout_s)
        except TimeoutError:
            raise RemoteError(f"the model's server was silent for {timeout_s:g} s in its answer") from None

    def fail(self, error: Exception) -> None:
        """Close the stream, and have whoever reads it next get `error`. To be called in its event loop."""
        self.end()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def end(self) -> None:
        """Close the stream, which ends the request at the server. Returns at once.

        It is not waited for: a caller that is being cancelled itself would cancel the closing too.
        """
        self._ended = True
        self._task.cancel()
