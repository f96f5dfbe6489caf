"""Responses to HTTP clients that may disconnect before the response is ready."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from antiphon.errors import AntiphonError

# nginx's status for a client that closed the connection. No client reads it.
CLIENT_CLOSED_REQUEST = 499
# The head of a response is sent after HEAD_S. Nearly all errors of a request are known by then, and still get a status.
# A comment is sent after each SILENT_S without an event.
HEAD_S, SILENT_S = 1.0, 15.0
# A comment of server-sent events, which readers skip.
COMMENT = b": waiting\n\n"


async def unless_disconnected(request: Request, respond: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of `respond`; if the client disconnects first, cancel it and return an empty 499.

    The body of `request` must have been read already, since this function waits for the message after the body. Raises
    an AntiphonError or HTTPException of `respond` unchanged.
    """
    responses: list[Response] = []
    failure: AntiphonError | HTTPException | None = None

    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_disconnected, request.receive, group.cancel_scope)
        try:
            responses.append(await respond())
        except (AntiphonError, HTTPException) as error:
            # Raised outside of the task group, which would wrap it in an ExceptionGroup.
            failure = error
        group.cancel_scope.cancel()
    if failure:
        raise failure
    return responses[0] if responses else Response(status_code=CLIENT_CLOSED_REQUEST)


class LiveEvents(Response):
    """Server-sent events that may have long pauses. Comments fill the pauses, since proxies close silent responses.

    The head is sent with the first event, or HEAD_S after the request. A comment follows after each SILENT_S without an
    event. An AntiphonError or HTTPException of `events` is raised unchanged before the head is sent. After that,
    `error_frame` turns it into the last event. `events` is closed when the client disconnects.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_frame: Callable[[AntiphonError | HTTPException], bytes],
        *,
        pause: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        # The length is unknown.
        del self.headers["content-length"]
        self._events, self._error_frame, self._pause = events, error_frame, pause
        self._begun = self._came = False
        self._writing = anyio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: AntiphonError | HTTPException | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_disconnected, receive, group.cancel_scope)
            group.start_soon(self._comment, send)
            try:
                async with aclosing(self._events) as events:
                    async for event in events:
                        await self._write(send, event)
            except (AntiphonError, HTTPException) as error:
                # Raised outside of the task group, which would wrap it in an ExceptionGroup.
                failure = error
            if failure and self._begun:
                await self._write(send, self._error_frame(failure))
                failure = None
            if not failure:
                await send({"type": "http.response.body", "body": b""})
            group.cancel_scope.cancel()
        if failure:
            raise failure

    async def _comment(self, send: Send) -> None:
        await self._pause(HEAD_S)
        if not self._begun:
            await self._write(send, COMMENT)
        while True:
            self._came = False
            await self._pause(SILENT_S)
            if not self._came:
                await self._write(send, COMMENT)

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._writing:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._came = True
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _cancel_when_disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class HeldStream(StreamingResponse):
    """Server-sent events that hold `resources` (a place, a file) until they end or their client disconnects.

    `resources` is closed even if no event was ever read.
    """

    def __init__(self, events: AsyncIterator[str], resources: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)
