"""A WebSocket to an ASGI application of this process: its messages go through queues, and through no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK, InvalidStatus
from websockets.frames import Close
from websockets.http11 import Response

Taken = TypeVar("Taken")
Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]
# Messages that the other side has not taken: whoever sends more waits, as with a socket whose buffers are full.
MAX_MESSAGES = 64
# How long an application may take to accept, in seconds.
OPEN_S = 10.0
NORMAL, GOING_AWAY, ABNORMAL, FAILED = 1000, 1001, 1006, 1011
# The tasks of applications, which nobody else holds.
_RUNNING = set[asyncio.Task[None]]()


async def connect_in_process(app: App, url: str, headers: Mapping[str, str]) -> AppSocket:
    """Open a WebSocket at a path of the application. Raises InvalidStatus where it refuses."""
    return await AppSocket(app, url, headers).open()


class AppSocket:
    """One WebSocket, with the methods and exceptions of websockets' connections that a client needs.

    The application runs as a task of the caller's event loop, with an address of this machine as its client's.
    """

    def __init__(self, app: App, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._scope: Message = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.5"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "root_path": "",
            "query_string": parts.query.encode(),
            "headers": [(b"host", (parts.netloc or "127.0.0.1").encode())]
            + [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
            "subprotocols": [],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
            # As a server has it that can answer an upgrade with more than a close.
            "extensions": {"websocket.http.response": {}},
        }
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue(MAX_MESSAGES)
        self._from_app: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_MESSAGES)
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[ConnectionClosed] = asyncio.get_running_loop().create_future()
        self._refusal: Response | None = None

    @property
    def transport(self) -> AppSocket:
        """What `abort` is called on, as on a connection's transport."""
        return self

    async def open(self) -> AppSocket:
        """Wait until the application has accepted. Raises InvalidStatus with its answer where it refuses."""
        self._to_app.put_nowait({"type": "websocket.connect"})
        running = asyncio.create_task(self._run())
        # A session that may be resumed outlives its connection, and is run by the application's task.
        _RUNNING.add(running)
        running.add_done_callback(_RUNNING.discard)
        try:
            async with asyncio.timeout(OPEN_S):
                await self._accepted
        except BaseException:
            # Nobody will use it.
            self.abort()
            raise
        return self

    async def send(self, data: str | bytes) -> None:
        """Send a message. Waits while the application has many that it has not taken. Raises ConnectionClosed."""
        if self._closed.done():
            raise self._closed.result()
        kind = "text" if isinstance(data, str) else "bytes"
        await self._unless_closed(self._to_app.put({"type": "websocket.receive", kind: data}))

    async def recv(self) -> str | bytes:
        """Return the application's next message. Raises ConnectionClosed when there are no more."""
        if not self._from_app.empty():
            return self._from_app.get_nowait()
        return await self._unless_closed(self._from_app.get())

    async def close(self, code: int = NORMAL) -> None:
        """Close. The application goes on until it has ended what it does, as that of a server does."""
        self._end(code, "", ours=True)
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Break the connection, as a network does."""
        self._end(ABNORMAL, "")

    async def __aenter__(self) -> AppSocket:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the application's side ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._to_app.get, self._take)
            self._refuse(ConnectionError("the application ended without an answer"))
            self._end(ABNORMAL, "")
        except Exception as error:
            self._refuse(error)
            self._end(FAILED, "")

    async def _take(self, message: Message) -> None:
        """Take what the application sends."""
        match message["type"]:
            case "websocket.accept":
                if not self._accepted.done():
                    self._accepted.set_result(None)
            case "websocket.send":
                if not self._closed.done():
                    data = message.get("text")
                    # Where the other side leaves, nobody takes it any more.
                    with suppress(ConnectionClosed):
                        await self._unless_closed(self._from_app.put(message["bytes"] if data is None else data))
            case "websocket.close" if self._accepted.done():
                self._end(message.get("code", NORMAL), message.get("reason") or "")
            case "websocket.close":
                self._refuse(InvalidStatus(Response(403, "Forbidden", Headers())))
            case "websocket.http.response.start":
                headers = Headers([(k.decode("latin-1"), v.decode("latin-1")) for k, v in message.get("headers", ())])
                self._refusal = Response(message["status"], "", headers, b"")
            case "websocket.http.response.body" if self._refusal:
                body = (self._refusal.body or b"") + message.get("body", b"")
                self._refusal = Response(self._refusal.status_code, "", self._refusal.headers, body)
                if not message.get("more_body"):
                    self._refuse(InvalidStatus(self._refusal))

    def _refuse(self, error: Exception) -> None:
        if not self._accepted.done():
            self._accepted.set_exception(error)

    def _end(self, code: int, reason: str, *, ours: bool = False) -> None:
        """Keep how the connection ended, and tell the application. What it has not taken of a full queue is lost."""
        if self._closed.done():
            return
        close = None if code == ABNORMAL else Close(code, reason)
        kind = ConnectionClosedOK if code in (NORMAL, GOING_AWAY) else ConnectionClosedError
        both = close is not None and not ours
        self._closed.set_result(kind(close if both else None, close, True if both else None))
        while self._to_app.full():
            self._to_app.get_nowait()
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})

    async def _unless_closed(self, work: Awaitable[Taken]) -> Taken:
        """Do it, unless the connection ends before. Raises ConnectionClosed then."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._closed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done() and not task.cancelled():
            return task.result()
        raise self._closed.result()
