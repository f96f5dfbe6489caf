"""A server of WebSockets on a real port. It follows a test's script for each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

Script = Callable[[ServerConnection], Awaitable[None]]


class Server:
    """Runs a script for each message of the type `trigger`, and repeats the last one.

    `messages`: what clients sent. `num_opened`, `num_asked`: the connections and requests so far.
    """

    def __init__(self, trigger: str, scripts: tuple[Script, ...]) -> None:
        self.trigger, self.scripts = trigger, scripts
        self.messages: list[dict[str, Any]] = []
        self.num_opened = self.num_asked = 0
        # Released for each connection.
        self.opened = asyncio.Semaphore(0)
        self.left = asyncio.Event()
        # The status with which the next upgrades are answered; None: they are accepted.
        self.status: int | None = None
        # What it sends first; None: nothing.
        self.greeting: dict[str, Any] | None = None
        self.url = ""

    async def handle(self, socket: ServerConnection) -> None:
        self.num_opened += 1
        self.opened.release()
        try:
            if self.greeting:
                await socket.send(json.dumps(self.greeting))
            async for message in socket:
                self.messages.append(json.loads(message))
                if self.messages[-1]["type"] == self.trigger:
                    self.num_asked += 1
                    await self.scripts[min(self.num_asked, len(self.scripts)) - 1](socket)
        except ConnectionClosed:
            self.left.set()

    def refuse(self, socket: ServerConnection, request: Request) -> Response | None:
        if "upgrade" not in request.headers:
            return socket.respond(404, "")
        if self.status is None:
            return None
        response = socket.respond(self.status, "")
        response.headers["Retry-After"] = "20"
        response.headers["Location"] = "ws://127.0.0.1:1/"
        return response


@asynccontextmanager
async def scripted_sockets(trigger: str, *scripts: Script) -> AsyncIterator[Server]:
    """Yield a server of WebSockets at all paths. Other requests are answered with 404."""
    server = Server(trigger, scripts)
    async with serve(server.handle, "127.0.0.1", 0, process_request=server.refuse) as found:
        server.url = f"ws://127.0.0.1:{next(iter(found.sockets)).getsockname()[1]}/v1"
        yield server


async def tell(socket: ServerConnection, kind: str, **fields: Any) -> None:
    """Send a message of a type."""
    await socket.send(json.dumps({"type": kind, **fields}))
