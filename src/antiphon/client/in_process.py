"""A WebSocket to an ASGI application in this process: its messages pass through queues instead of a socket."""

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
AsgiMessage = MutableMapping[str, Any]
App = Callable[[AsgiMessage, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Any]
# The capacity of each queue, in messages. A sender waits while its queue is full, as it would on a full socket buffer.
MAX_MESSAGES = 64
# Timeout for the application to accept the connection, in seconds.
OPEN_S = 10.0
NORMAL, GOING_AWAY, ABNORMAL, FAILED = 1000, 1001, 1006, 1011
# Strong references to the applications' tasks: the event loop holds only weak ones.
_RUNNING = set[asyncio.Task[None]]()


async def connect_in_process(app: App, url: str, headers: Mapping[str, str]) -> AppSocket:
    """Open a WebSocket at a path of the application.

    Args:
        app: The ASGI application.
        url: The URL of the endpoint. Its path and query are passed to the application; its host is only a header.
        headers: Request headers.

    Raises:
        InvalidStatus: The application refuses the upgrade.
        TimeoutError: The application does not accept within OPEN_S.
    """
    return await AppSocket(app, url, headers).open()


class AppSocket:
    """One WebSocket with the methods and exceptions of a `websockets` connection that a client needs.

    The application runs as a task on the caller's event loop, and sees 127.0.0.1 as the client's address.
    """

    def __init__(self, app: App, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._scope: AsgiMessage = {
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
            # Lets the application refuse the upgrade with an HTTP response instead of a bare close.
            "extensions": {"websocket.http.response": {}},
        }
        self._app = app
        self._to_app: asyncio.Queue[AsgiMessage] = asyncio.Queue(MAX_MESSAGES)
        self._from_app: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_MESSAGES)
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[ConnectionClosed] = asyncio.get_running_loop().create_future()
        self._refusal: Response | None = None

    @property
    def transport(self) -> AppSocket:
        """The object that has `abort`, as the transport of a `websockets` connection does."""
        return self

    async def open(self) -> AppSocket:
        """Start the application and wait until it accepts. Returns this socket.

        Raises:
            InvalidStatus: The application refuses; the exception has its response.
            TimeoutError: The application does not accept within OPEN_S.
        """
        self._to_app.put_nowait({"type": "websocket.connect"})
        running = asyncio.create_task(self._run())
        # Keeps the task alive after the connection has closed, because it may run a session that can be resumed.
        _RUNNING.add(running)
        running.add_done_callback(_RUNNING.discard)
        try:
            async with asyncio.timeout(OPEN_S):
                await self._accepted
        except BaseException:
            # The caller does not get this socket, so it cannot close it.
            self.abort()
            raise
        return self

    async def send(self, data: str | bytes) -> None:
        """Send a message. Waits while MAX_MESSAGES are queued for the application.

        Raises:
            ConnectionClosed: The connection is closed, or closes while this waits.
        """
        if self._closed.done():
            raise self._closed.result()
        kind = "text" if isinstance(data, str) else "bytes"
        await self._unless_closed(self._to_app.put({"type": "websocket.receive", kind: data}))

    async def recv(self) -> str | bytes:
        """Return the application's next message.

        Raises:
            ConnectionClosed: The connection is closed and all messages were received.
        """
        if not self._from_app.empty():
            return self._from_app.get_nowait()
        return await self._unless_closed(self._from_app.get())

    async def close(self, code: int = NORMAL) -> None:
        """Close the connection. The application's task continues until it returns by itself, as on a server."""
        self._end(code, "", ours=True)
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Drop the connection without a close frame, as a network failure does."""
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

    async def _take(self, message: AsgiMessage) -> None:
        """Handle a message that the application sends: the ASGI `send` callable."""
        match message["type"]:
            case "websocket.accept":
                if not self._accepted.done():
                    self._accepted.set_result(None)
            case "websocket.send":
                if not self._closed.done():
                    data = message.get("text")
                    # If the client closes meanwhile, the message is dropped.
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
        """Record how the connection ended, and send the application a disconnect.

        If the queue to the application is full, its oldest messages are dropped to make room.
        """
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
        """Await `work` and return its result. Raises ConnectionClosed if the connection closes first."""
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
