"""Request bodies of bounded size."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message

from antiphon.server.errors import BodyTooLarge


def limited(request: Request, most: int, error: BodyTooLarge | None = None) -> Request:
    """The same request, whose body raises `error` (BodyTooLarge) past `most` bytes, whatever its headers say.

    A Content-Length over the limit raises at once. Read the body or form of what is returned, not of `request`.
    """
    error = error or BodyTooLarge(f"The body is larger than {most} bytes.")
    if int(request.headers.get("content-length", "0") or 0) > most:
        raise error
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            raise error
        return message

    return Request(request.scope, receive)
