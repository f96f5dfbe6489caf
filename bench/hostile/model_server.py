"""A hostile model server, for `antiphon bench attack`.

    python -m bench.hostile.model_server CLASS [--quick]

It prints its URL, and sends the class's answer to every request.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
GZIP = HEAD + b"content-encoding: gzip\r\n\r\n"
PLAIN = HEAD + b"\r\n"
MODELS = b'{"object": "list", "data": [{"id": "bad", "max_model_len": 8192}]}'
Parts = AsyncIterator[bytes]


def event(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def prose(text: str) -> bytes:
    return event({"content": text})


def call(number: int, name: str) -> dict[str, Any]:
    return {"index": number, "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": ""}}


END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


async def calls(size: int) -> Parts:
    """Endless calls without arguments and with long names."""
    yield PLAIN
    number = 0
    while True:
        yield event({"tool_calls": [call(number + i, f"{number + i}" + "x" * 9_000) for i in range(10)]})
        number += 10
        if number % 1000 == 0:
            yield prose("word ")


async def single_bytes(size: int) -> Parts:
    """One long line, then chunks of one byte."""
    yield HEAD + b"transfer-encoding: chunked\r\n\r\n"
    line = b"data: " + b"x" * (900_000 // size)
    yield b"%x\r\n" % len(line) + line + b"\r\n"
    for _ in range(100 // size or 1):
        yield b"1\r\nx\r\n" * 1000


async def gzip_events(size: int) -> Parts:
    """25 MB of lines of a single event, compressed to about 30 kB."""
    yield GZIP
    yield gzip.compress(b"data: x\n" * (3_200_000 // size))


async def gzip_line_breaks(size: int) -> Parts:
    """64 MB of line breaks, compressed to 65 kB, sent repeatedly."""
    yield GZIP
    member = gzip.compress(b"\n" * ((64 << 20) // size))
    for _ in range(4):
        yield member


async def line_breaks(size: int) -> Parts:
    """Endless line breaks, uncompressed."""
    yield PLAIN
    while True:
        yield b"\n" * (1 << 16)


async def comments(size: int) -> Parts:
    """Endless comments of server-sent events."""
    yield PLAIN
    while True:
        yield b": hello\n" * (1 << 13)


async def empty_events(size: int) -> Parts:
    """Endless events without content."""
    yield PLAIN
    while True:
        yield b"data: {}\n\n" * (1 << 12)


async def written_calls(size: int) -> Parts:
    """20,000 calls written as JSON in one text, sent in two events."""
    yield PLAIN
    text = json.dumps([{"name": "add", "arguments": {"a": n}} for n in range(20_000 // size)])
    yield prose(text[: len(text) // 2]) + prose(text[len(text) // 2 :])
    yield END


async def braces(size: int) -> Parts:
    """A possible beginning of a call, then one space after another."""
    yield PLAIN
    yield prose("{")
    for _ in range(80 // size or 1):
        yield prose(" ") * 100
    yield END


async def brackets(size: int) -> Parts:
    """Half a megabyte of possible beginnings of calls, in one event."""
    yield PLAIN
    yield prose("[" * (500_000 // size))
    yield END


async def thoughts(size: int) -> Parts:
    """Thousands of thoughts without words, in one event."""
    yield PLAIN
    yield prose("<think></think>" * (60_000 // size) + "Yes.")
    yield END


async def pieces_of_a_call(size: int) -> Parts:
    """The arguments of a second call, one character at a time, while the first call is still open."""
    yield PLAIN
    yield event({"tool_calls": [call(0, "add"), call(1, "add")]})
    more = event({"tool_calls": [{"index": 1, "function": {"arguments": "x"}}]})
    for _ in range(300 // size):
        yield more * 100
    yield END


async def numbers(size: int) -> Parts:
    """Events with a megabyte of numbers in a field that accepts any type."""
    yield PLAIN
    many = b'data: {"choices": [], "usage": [' + b"1," * (500_000 // size) + b"1]}\n\n"
    for _ in range(20):
        yield many
    yield END


async def cookies(size: int) -> Parts:
    """As many cookies as a response head can hold."""
    yield HEAD + b"".join(b"set-cookie: c%d=x; path=/\r\n" % n for n in range(2500 // size)) + b"\r\n"
    yield prose("Yes.") + END


CLASSES: dict[str, Callable[[int], Parts]] = {
    "calls": calls,
    "single-bytes": single_bytes,
    "gzip-events": gzip_events,
    "gzip-line-breaks": gzip_line_breaks,
    "line-breaks": line_breaks,
    "comments": comments,
    "empty-events": empty_events,
    "written-calls": written_calls,
    "braces": braces,
    "brackets": brackets,
    "thoughts": thoughts,
    "pieces-of-a-call": pieces_of_a_call,
    "numbers": numbers,
    "cookies": cookies,
}


async def serve(name: str, size: int) -> None:
    """Run the server. The numbers of the class are divided by `size`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next((line[15:] for line in head.split("\r\n") if line.startswith("content-length:")), "0")
            await reader.readexactly(int(length))
            if head.startswith("get"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(MODELS) + MODELS
                )
            else:
                async for part in CLASSES[name](size):
                    writer.write(part)
                    await writer.drain()
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.hostile.model_server", description="A bad model's server.")
    parser.add_argument("name", choices=CLASSES)
    parser.add_argument("--quick", action="store_true", help="a tenth of its numbers")
    args = parser.parse_args()
    asyncio.run(serve(args.name, 10 if args.quick else 1))
