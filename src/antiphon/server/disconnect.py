"""Work for an HTTP client that may disconnect before its response is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from antiphon.errors import AntiphonError

# nginx's status for a client that closed the connection; nobody reads it.
CLIENT_CLOSED_REQUEST = 499


async def unless_disconnected(request: Request, respond: Callable[[], Awaitable[Response]]) -> Response:
    """Return what `respond` returns, and cancel it once the client disconnects.

    The body of `request` must have been read: this waits for the message that follows it. An AntiphonError or
    HTTPException of `respond` is raised as it is; for a client that has disconnected, the response is an empty one with
    status 499.
    """
    responses: list[Response] = []
    failure: AntiphonError | HTTPException | None = None

    async def cancel_when_disconnected(scope: anyio.CancelScope) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cancel_when_disconnected, group.cancel_scope)
        try:
            responses.append(await respond())
        except (AntiphonError, HTTPException) as error:
            # Kept and raised outside, because the task group would wrap it in an ExceptionGroup.
            failure = error
        group.cancel_scope.cancel()
    if failure:
        raise failure
    return responses[0] if responses else Response(status_code=CLIENT_CLOSED_REQUEST)


class HeldStream(StreamingResponse):
    """Server-sent events that need resources (a place, a file) until they end or their client disconnects.

    `resources` is closed then, whether or not the first event was ever asked for.
    """

    def __init__(self, events: AsyncIterator[str], resources: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)
