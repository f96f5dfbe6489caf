"""Reads streams of other servers, with a parser of server-sent events, and a task that reads a stream.

With a ReaderTask, a caller can stop waiting for a stream at once, or wait for two streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Generic, TypeVar

from antiphon.errors import RemoteError

T = TypeVar("T")

# Bounds: bytes of an event, and lines of a stream, including comments and empty lines. A token takes two or three
# lines.
MAX_EVENT_BYTES, MAX_LINES = 1 << 20, 1 << 20
# After LINES_A_TURN lines, the event loop can run other tasks.
LINES_A_TURN = 256


async def events(chunks: AsyncIterator[bytes], max_event_bytes: int = MAX_EVENT_BYTES) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event of a stream of server-sent events (https://html.spec.whatwg.org, chapter 9.2).

    An event's data lines are joined by line feeds. Raises RemoteError if an event is larger than `max_event_bytes`, or
    the stream has more than MAX_LINES lines.
    """
    # The search for a line end in `held` starts at `searched`, because the bytes before it contain no line end.
    held, data, num_bytes, num_lines, searched = bytearray(), list[bytes](), 0, 0, 0
    async for chunk in chunks:
        held += chunk
        begin = 0
        while (end := held.find(b"\n", searched)) >= 0:
            line = bytes(held[begin:end]).rstrip(b"\r")
            begin = searched = end + 1
            num_lines += 1
            if line.startswith(b"data:"):
                num_bytes += len(line)
                _check(num_bytes, max_event_bytes)
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data, num_bytes = [], 0
            if num_lines > MAX_LINES:
                raise RemoteError(f"the model's server sent more than {MAX_LINES} lines in one answer")
            if num_lines % LINES_A_TURN == 0:
                await asyncio.sleep(0)
        del held[:begin]
        searched = len(held)
        _check(num_bytes + len(held), max_event_bytes)
    if held.startswith(b"data:"):
        data.append(bytes(held[5:]).strip())
    if data:
        yield b"\n".join(data)


def _check(num_bytes: int, max_event_bytes: int) -> None:
    if num_bytes > max_event_bytes:
        raise RemoteError("the model's server sent an event that is too long")


# Bound of the queue of items. When it is full, the stream is not read, and the server has to wait.
MAX_WAITING = 64


class StreamEnded(RemoteError):
    """A stream has no further item."""


class ReaderTask(Generic[T]):
    """Reads one stream in a task, from construction until the stream ends or `end` is called.

    `tasks` holds the task while it runs or is being closed, so that it is not garbage-collected before its connection
    is closed.
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
            await self._queue.put(StreamEnded("the model's server ended its answer"))
        except Exception as error:
            # After `end`, no reader is left, and `put` on a full queue would block forever.
            if not self._ended:
                await self._queue.put(error)

    async def take(self) -> T:
        """Return the next item, without a timeout. Raises the stream's error, or StreamEnded after its end."""
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def next(self, timeout_s: float) -> T:
        """Return the next item. Raises RemoteError after `timeout_s` without an item, and the errors of `take`."""
        try:
            return await asyncio.wait_for(self.take(), timeout_s)
        except TimeoutError:
            raise RemoteError(f"the model's server was silent for {timeout_s:g} s in its answer") from None

    def fail(self, error: Exception) -> None:
        """Close the stream, and raise `error` in the next read. Must be called in its event loop."""
        self.end()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def end(self) -> None:
        """Close the stream, which ends the request at the server. Returns at once.

        It does not wait for the closing, because a cancelled caller would cancel the closing too.
        """
        self._ended = True
        self._task.cancel()
