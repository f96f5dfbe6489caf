"""Bodies: those of requests are of bounded size, those of responses are Structs as JSON."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from antiphon.server.errors import BodyTooLarge

_encoder = msgspec.json.Encoder()


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    """Make the response whose body is this value as JSON without spaces; text stays Unicode, in UTF-8."""
    return Response(_encoder.encode(body), status, media_type="application/json")


def limited(request: Request, max_bytes: int, error: BodyTooLarge | None = None) -> Request:
    """Return the same request with a body of at most `max_bytes` bytes, whatever its headers say.

    A Content-Length beyond the limit raises `error` at once. A body that turns out longer raises it while it is read,
    so that no more than the limit and one chunk is ever held. Read the body or form of what is returned, not of
    `request`. Without `error`, a BodyTooLarge that names the limit is raised.
    """
    error = error or BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    if int(request.headers.get("content-length", "0") or 0) > max_bytes:
        raise error
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise error
        return message

    return Request(request.scope, receive)
