"""An answer that several tasks make at once: one writes, one speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from antiphon.contracts import ReplyDone, ResponseAudio, ResponseChunk, ToolCallStarted

# Bound: outputs nobody has read; the makers wait.
MAX_WAITING = 64

PutChunk = Callable[[ResponseChunk], Awaitable[None]]


async def side_by_side(*work: Callable[[PutChunk], Awaitable[None]]) -> AsyncGenerator[ResponseChunk, None]:
    """What they put, as it comes; calls of tools, and ReplyDone, once all are through: what is spoken belongs to what was written before a call.

    What one raises ends all; so does closing the generator.
    """
    out: asyncio.Queue[ResponseChunk | Exception | None] = asyncio.Queue(MAX_WAITING)

    async def guarded(part: Callable[[PutChunk], Awaitable[None]]) -> None:
        try:
            await part(out.put)
        except Exception as error:
            await out.put(error)
        # It is through.
        await out.put(None)

    tasks = [asyncio.create_task(guarded(part)) for part in work]
    later: list[ResponseChunk] = []
    try:
        for _ in tasks:
            while (item := await out.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, ToolCallStarted | ReplyDone) or (later and not isinstance(item, ResponseAudio)):
                    later.append(item)
                else:
                    yield item
        for item in later:
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
