"""The peers of telephone tests: an HTTP server that records requests, and a carrier's stream.

The stream is written from Twilio's documents (`bench/carrier.py`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from bench import carrier
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from antiphon.audio.line.g711 import to_ulaw
from antiphon.settings import ServerSettings, Settings, TelephoneSettings

KEY, LIMIT_S = "key-1", 15
MEDIA = "/v1/telephone/media"
SILENCE = to_ulaw(np.zeros(160, np.float32))


def settings(**telephone: Any) -> Settings:
    return replace(Settings(), telephone=TelephoneSettings(**telephone), server=ServerSettings(api_keys=(KEY,)))


@dataclass
class Received:
    """A request that an HTTP server got."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Site:
    """An HTTP server. `answer` returns the status and the body for a request."""

    url: str
    answer: Callable[[Received], tuple[int, bytes]]
    got: list[Received] = field(default_factory=list)

    async def request(self, number: int = 0) -> Received:
        """Wait for the request with this number."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.got) <= number:  # noqa: ASYNC110 (it is of another thread)
                await asyncio.sleep(0.01)
        return self.got[number]


@contextmanager
def site(answer: Callable[[Received], tuple[int, bytes]] = lambda _: (200, b"{}")) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            received = Received(self.path, headers, body)
            status, data = found.answer(received)
            found.got.append(received)
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Site(f"http://127.0.0.1:{server.server_port}", answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join(LIMIT_S)
        server.server_close()


@asynccontextmanager
async def stream(ws: str, path: str = f"{MEDIA}/{KEY}", **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(ws + path, **options) as socket, asyncio.timeout(LIMIT_S):
        yield socket


async def end(socket: ClientConnection) -> tuple[int, str]:
    """Read until the server closes the stream; return the code and the reason."""
    with pytest.raises(ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code or 0, socket.close_reason or ""


async def until(app: ClientConnection, type: str) -> Any:
    """Return an application's next event of this type."""
    while True:
        event = json.loads(await app.recv())
        if event["type"] == type:
            return event


async def hold(socket: ClientConnection) -> None:
    """Send the caller's silence, and play and return marks as Twilio does, until the stream is closed."""
    loop = asyncio.get_running_loop()
    buffer = carrier.PlayBuffer(loop.time)
    try:
        while True:
            for name in buffer.due():
                await socket.send(carrier.mark(name))
            await socket.send(carrier.media(SILENCE))
            try:
                async with asyncio.timeout(0.02):
                    while True:
                        for name in buffer.take(json.loads(await socket.recv())):
                            await socket.send(carrier.mark(name))
            except TimeoutError:
                continue
    except ConnectionClosed:
        return


async def ask(app: ClientConnection, text: str) -> None:
    """Let an application say a text as the caller, and ask for the answer."""
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    await app.send(json.dumps({"type": "conversation.item.create", "item": item}))
    await app.send('{"type": "response.create"}')
