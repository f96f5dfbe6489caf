"""Runs the parts of one response concurrently, such as writing and speaking, and merges their output into one stream.

It is independent of models and voices: each part is a function that puts chunks into the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from antiphon.contracts import ReplyDone, ResponseAudio, ResponseChunk, ToolCallStarted

# Maximum number of chunks that are not read yet. When the queue is full, `put` waits, and so does the model that puts.
MAX_WAITING_CHUNKS = 64

Chunk = TypeVar("Chunk")
Put = Callable[[Chunk], Awaitable[None]]
PutChunk = Put[ResponseChunk]


async def side_by_side(*parts: Callable[[Put[Chunk]], Awaitable[None]]) -> AsyncGenerator[Chunk, None]:
    """Run the parts of a response concurrently, and yield the chunks in the order in which they were put.

    Each part is called once, with a function that puts one chunk. From the first tool call on, everything except audio
    is held back until all parts have returned, because the audio belongs to text before the call. ReplyDone is always
    held back until then. The first exception of a part is raised here and ends the other parts. Closing the generator
    cancels the parts and waits for them.
    """
    chunks: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(MAX_WAITING_CHUNKS)

    async def run(part: Callable[[Put[Chunk]], Awaitable[None]]) -> None:
        try:
            await part(chunks.put)
        except Exception as error:
            await chunks.put(error)
        # None marks the end of the part.
        await chunks.put(None)

    # This uses asyncio tasks, not a task group: a generator with an open task group breaks if it is closed by a task
    # that did not start it. The generator owns these tasks, which have ended before it returns.
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
