"""Runs the parts of one response side by side, such as writing and speaking, and merges what they make into one stream.

Knows neither models nor voices: a part is a function that puts chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from antiphon.contracts import ReplyDone, ResponseAudio, ResponseChunk, ToolCallStarted

# Bound: chunks that are made and not read yet. When it is full, `put` waits, and with it the model that makes them.
MAX_WAITING_CHUNKS = 64

Chunk = TypeVar("Chunk")
Put = Callable[[Chunk], Awaitable[None]]
PutChunk = Put[ResponseChunk]


async def side_by_side(*parts: Callable[[Put[Chunk]], Awaitable[None]]) -> AsyncGenerator[Chunk, None]:
    """Run the parts of a response at the same time, and yield what they put in the order in which they put it.

    Each part is called once, with a function that puts one chunk. From the first tool call on, everything but audio is
    held back until all parts have returned, and ReplyDone always is: the audio belongs to text from before the call.
    The first exception of a part is raised here and ends the others. Closing the generator cancels the parts and waits
    until they have ended.
    """
    chunks: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(MAX_WAITING_CHUNKS)

    async def run(part: Callable[[Put[Chunk]], Awaitable[None]]) -> None:
        try:
            await part(chunks.put)
        except Exception as error:
            await chunks.put(error)
        # None: this part has returned.
        await chunks.put(None)

    # Tasks of asyncio, and no task group: a generator that holds one open across `yield` breaks when it is closed in
    # another task than the one that began it. This generator owns them: they have ended before it returns.
    tasks = [asyncio.create_task(run(part)) for part in parts]
    held_back: list[Chunk] = []
    try:
        for _ in tasks:
            while (item := await chunks.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                after_call = held_back and not isinstance(item, ResponseAudio)
                if after_call or isinstance(item, ToolCallStarted | ReplyDone):
                    held_back.append(item)
                else:
                    yield item
        for item in held_back:
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
