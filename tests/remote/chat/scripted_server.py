"""A model's server on a real socket. It follows a test's script of answers, faults and silence for each request."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

END = "[DONE]"
LIMIT_S = 10


@dataclass(frozen=True, slots=True)
class Asked:
    """A received request. `headers` have names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Answer:
    """One response on the wire. `gone`: set when the client has closed the connection."""

    def __init__(self, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        self.writer = writer
        self.gone = gone

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        """Send the status line and the headers; underscores in names are written as dashes."""
        fields = {"content-type": kind, "connection": "close"} | headers
        lines = [f"HTTP/1.1 {status} -", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        try:
            await self.writer.drain()
        except ConnectionError:
            # `drain` no longer waits for anything, so a script that writes without end has to stop by itself.
            self.gone.set()

    async def event(self, data: dict[str, Any] | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.raw(f"data: {text}\n\n".encode())

    async def words(self, *words: str) -> None:
        """Send words as chunks of Chat Completions."""
        for word in words:
            await self.event({"choices": [{"index": 0, "delta": {"content": word}}]})

    async def end(self, reason: str = "stop", usage: dict[str, Any] | None = None) -> None:
        """Send the end of a reply in the form of Chat Completions."""
        await self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        await self.event({"choices": [], "usage": usage or {"prompt_tokens": 7, "completion_tokens": 2}})
        await self.event(END)


Script = Callable[[Answer], Awaitable[None]]


def says(*words: str) -> Script:
    """Send a valid answer with these words."""

    async def script(answer: Answer) -> None:
        await answer.head()
        await answer.words(*words)
        await answer.end()

    return script


def fails(status: int, message: str = "no", **headers: str) -> Script:
    """An error with a status, in OpenAI's form."""

    async def script(answer: Answer) -> None:
        await answer.head(status, "application/json", **headers)
        await answer.raw(json.dumps({"error": {"message": message}}).encode())

    return script


async def hangs(answer: Answer) -> None:
    """Send nothing until the client leaves."""
    await answer.gone.wait()


async def lists_clever(answer: Answer) -> None:
    """Send a list of models with one model, "clever", of 4,096 tokens."""
    await answer.head(200, "application/json")
    await answer.raw(b'{"object": "list", "data": [{"id": "clever", "max_model_len": 4096}]}')


async def lists_nothing(answer: Answer) -> None:
    """Answer as a server without such a list."""
    await answer.head(404)


@dataclass(slots=True)
class ScriptedServer:
    """The received requests, in order, and the address of the server.

    Requests for its models and its voices are answered by `models` and `voices`, and not counted.
    """

    url: str
    scripts: Sequence[Script]
    models: Script = lists_clever
    voices: Script = lists_nothing
    asked: list[Asked] = field(default_factory=list)
    # Has one entry for each connection that the client closed before the answer.
    _closed: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handle(reader, writer)
        except asyncio.CancelledError:
            # The test is over, and unsent data would keep the connection open.
            writer.transport.abort()
            raise
        writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await self._read(reader)
            gone = asyncio.Event()
            watching = asyncio.create_task(self._watch(reader, gone))
            answer = Answer(writer, gone)
            if request.path.endswith("/models"):
                await self.models(answer)
            elif request.path.endswith("/audio/voices"):
                await self.voices(answer)
            else:
                self.asked.append(request)
                await self.scripts[min(len(self.asked), len(self.scripts)) - 1](answer)
                if gone.is_set():
                    self._closed.put(None)
            watching.cancel()

    def begin(self, scripts: Sequence[Script]) -> None:
        """Forget the received requests, and follow these scripts from now on."""
        self.scripts = scripts
        self.asked.clear()
        self._closed = queue.SimpleQueue()

    async def client_left(self) -> None:
        """Wait until a client has closed its connection before the answer; each call waits for one more.

        Can be called from any thread's event loop.
        """
        await asyncio.to_thread(self._closed.get, timeout=LIMIT_S)

    async def _watch(self, reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async def _read(self, reader: asyncio.StreamReader) -> Asked:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Asked(method, path, headers, json.loads(body) if body else {})


@asynccontextmanager
async def scripted_server(*scripts: Script) -> AsyncIterator[ScriptedServer]:
    """A server that runs one script for each request, and repeats the last one."""
    found = ScriptedServer("", scripts)
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield found
    finally:
        server.close()
