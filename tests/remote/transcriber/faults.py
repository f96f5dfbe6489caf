"""A proxy in front of a real server, which fails in the ways in which servers and networks fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Fault = Literal["none", "killed", "hung", "garbage", "429", "500", "redirect", "endless"]
ANSWERS = {
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 30\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    "redirect": b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:%d/caught\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n",
    # 2 GB are announced, and come as fast as they are read.
    "endless": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2147483648\r\n\r\n",
}


class FaultProxy:
    """Passes bytes to a server on `port` until `fault` is set. Connections that are open get the fault too."""

    def __init__(self, port: int) -> None:
        self.port, self.fault = port, "none"
        self.num_connections = 0
        # Bytes that were sent of an endless answer.
        self.num_sent = 0
        # The port to which a redirect leads.
        self.elsewhere = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, fault: Fault) -> None:
        """Begin a fault, or end it with "none". It is in effect when this returns."""
        self.fault = fault
        if self._loop and fault not in ("none", "hung"):
            asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(10)

    async def _break(self) -> None:
        for writer in list(self._writers):
            if self.fault == "garbage":
                writer.write(b"\x00\xff garbage \r\n\r\n{" * 100)
            writer.transport.close() if self.fault == "garbage" else writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        self.num_connections += 1
        self._writers.add(writer)
        try:
            with suppress(OSError):
                await self._serve(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault == "killed":
            return
        if self.fault == "hung":
            await reader.read()
            return
        if self.fault == "garbage":
            writer.write(b"\x00\xff garbage \r\n\r\n{" * 100)
            return
        if self.fault in ANSWERS:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWERS[self.fault].replace(b"%d", str(self.elsewhere).encode()))
            while self.fault == "endless":
                writer.write(b"x" * (1 << 16))
                await writer.drain()
                self.num_sent += 1 << 16
            await writer.drain()
            # The client's request is read to its end, so that the answer is not lost by a reset.
            await reader.read()
            return
        theirs, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.add(to_server)
        back = asyncio.create_task(self._pump(theirs, writer))
        try:
            await self._pump(reader, to_server)
        finally:
            back.cancel()
            self._writers.discard(to_server)
            to_server.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.fault == "hung":
                    continue
                writer.write(data)
                await writer.drain()
            writer.close()


@contextmanager
def on_a_port(serve: object) -> Iterator[int]:
    """Serve connections on a port of this machine, in a thread of their own, with an asyncio server's callback."""
    ports, loops, stops = list[int](), list[asyncio.AbstractEventLoop](), list[asyncio.Event]()
    ready = threading.Event()

    async def main() -> None:
        stops.append(asyncio.Event())
        loops.append(asyncio.get_running_loop())
        server = await asyncio.start_server(serve, "127.0.0.1", 0)  # type: ignore[arg-type]
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        async with server:
            await stops[0].wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield ports[0]
    finally:
        loops[0].call_soon_threadsafe(stops[0].set)
        thread.join(10)
