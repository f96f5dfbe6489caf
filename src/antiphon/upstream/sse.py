"""Reads streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from antiphon.errors import RemoteError

# Bounds: an event, and the lines of a stream, comments and empty ones included. A token takes two or three.
MAX_EVENT_BYTES, MAX_LINES = 1 << 20, 1 << 20
# After so many lines the event loop gets a turn.
LINES_A_TURN = 256


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event of a stream of server-sent events (https://html.spec.whatwg.org, chapter 9.2).

    An event's lines of data are joined by line feeds. Raises RemoteError for one of more than MAX_EVENT_BYTES, and for
    a stream of more than MAX_LINES.
    """
    # `held` is searched for the end of a line from `searched` on: what is before was searched already.
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
                _check(num_bytes)
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
        _check(num_bytes + len(held))
    if held.startswith(b"data:"):
        data.append(bytes(held[5:]).strip())
    if data:
        yield b"\n".join(data)


def _check(num_bytes: int) -> None:
    if num_bytes > MAX_EVENT_BYTES:
        raise RemoteError("the model's server sent an event that is too long")
