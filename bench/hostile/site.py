"""A site of audio files, for `antiphon bench attack`: python -m bench.hostile.site

It prints its URL. `/sound` is a file of two bytes. Any other path is a file that arrives one byte per second, without
end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

BYTE_S = 1.0


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, and close the connection."""
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nConnection: close\r\n\r\n")
        if head.startswith(b"GET /sound"):
            writer.write(b"RI")
        else:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(BYTE_S)
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
