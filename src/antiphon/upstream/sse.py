"""Reads streams of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from antiphon.errors import RemoteError

# Bound: an event of a stream.
MAX_EVENT_BYTES = 1 << 20


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event of a stream of server-sent events (https://html.spec.whatwg.org, chapter 9.2).

    An event's lines of data are joined by line feeds. Raises RemoteError for one of more than MAX_EVENT_BYTES.
    """
    held, data = b"", list[bytes]()
    async for chunk in chunks:
        held += chunk
        *lines, held = held.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
        if len(held) + sum(map(len, data)) > MAX_EVENT_BYTES:
            raise RemoteError("the model's server sent an event that is too long")
    if held.startswith(b"data:"):
        data.append(held[5:].strip())
    if data:
        yield b"\n".join(data)
