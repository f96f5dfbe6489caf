"""Work for an HTTP client that may go away: nobody is answered who does not listen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from starlette.requests import Request
from starlette.responses import Response

from antiphon.errors import AntiphonError


async def unless_gone(request: Request, call: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `call`; it is worked for no more once its client goes away."""
    answer: list[Response] = []
    failure: AntiphonError | None = None

    async def watch(scope: anyio.CancelScope) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch, group.cancel_scope)
        try:
            answer.append(await call())
        except AntiphonError as error:
            # As it is, not inside the task group's ExceptionGroup.
            failure = error
        group.cancel_scope.cancel()
    if failure:
        raise failure
    # Nobody reads it: nginx' status for a client that went away.
    return answer[0] if answer else Response(status_code=499)
