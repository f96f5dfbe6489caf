"""Request bodies with limits on size and time, and JSON response bodies from Structs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
from anyio import move_on_after
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.server.http.auth import key_of
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.state import ServerState
from antiphon.transports.http import in_time

# Maximum size, in bytes, of an unread body that is received so that its connection can be reused.
SMALL_BODY_BYTES = 64 << 10
# Maximum seconds and bytes for which a larger unread body is received after the response, so that the client gets the
# response.
LINGER_S, LINGER_BYTES = 0.5, 8 << 20
# Maximum size, in bytes, of all text fields of a form together, and of each field.
FORM_BYTES, FIELD_BYTES = 1 << 20, 256 << 10
# Maximum number of bytes of a form that are in memory: its fields, and the beginning of its file.
HELD_FORM_BYTES = 2 << 20
# Paths whose bodies are files, which their routes write to temporary files, unless they are JSON.
FILE_PATHS = frozenset({"/v1/listen"})
# Charsets that a form may declare, by any of their common names. The client chooses the charset, and Python has codecs
# that take quadratic time (punycode) or yield lone surrogates (unicode_escape).
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1"})

_encoder = msgspec.json.Encoder()


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct], status: int = 200) -> Response:
    """Make a response with this value as compact JSON in UTF-8."""
    return Response(_encoder.encode(body), status, media_type="application/json")


def limited(request: Request, max_bytes: int, error: BodyTooLarge | None = None) -> Request:
    """Return the same request with its body limited to `max_bytes`. Read the body from the result, not from `request`.

    Raises `error` at once if the Content-Length is larger. Otherwise reading a larger body raises it, so that at most
    the limit and one chunk are held. `error` defaults to a BodyTooLarge that names the limit. Reading raises
    HTTPException 408 if the body arrives more slowly than `in_time` allows with the application's `body_timeout_s`.
    """
    error = error or BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    if int(request.headers.get("content-length", "0") or 0) > max_bytes:
        raise error
    received = in_time(request.receive, request.app.state.body_timeout_s)
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        try:
            message = await received()
        except TimeoutError:
            raise HTTPException(408, "The body arrived too slowly.") from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise error
        return message

    return Request(request.scope, receive)


def limited_form(
    request: Request,
    max_bytes: int,
    *,
    max_fields: int,
    max_files: int = 1,
    error: BodyTooLarge | None = None,
    max_field_bytes: int = FIELD_BYTES,
) -> AbstractAsyncContextManager[FormData]:
    """Read a form of at most `max_bytes`. Use it in an `async with`, which closes the form's files at the end.

    A field of a multipart form has at most `max_field_bytes` (else 400). A form of another type has at most FORM_BYTES,
    and its fields FIELD_BYTES. Raises as `limited` does, and HTTPException 415 for a charset that is not in CHARSETS,
    before anything is decoded.
    """
    # Starlette uses the same parser, so it finds the same charset.
    content_type, parameters = parse_options_header(request.headers.get("content-type"))
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in CHARSETS:
        raise HTTPException(415, f"A form's charset is utf-8, us-ascii or iso-8859-1, not '{charset[:40]}'.")
    if content_type != b"multipart/form-data":
        max_bytes, max_field_bytes = min(max_bytes, FORM_BYTES), FIELD_BYTES
    bounded = limited(request, max_bytes, error)
    return bounded.form(max_files=max_files, max_fields=max_fields, max_part_size=max_field_bytes)


class HeldBody:
    """ASGI middleware that counts the body of an HTTP request as memory of its API key until the response has ended.

    A form or a file counts with at most HELD_FORM_BYTES, since the rest is in temporary files. If the key or the server
    has reached its memory limit, reading the body raises Refused in the route.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state: ServerState = scope["app"].state.antiphon
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "")
        is_file = scope["path"] in FILE_PATHS and not kind.startswith("application/json")
        is_form = is_file or kind.startswith("multipart/")
        caller = state.credentials.caller(key_of(HTTPConnection(scope)), short=True)
        with state.memory.opened(caller.key if caller else "") as account:

            async def counting_receive() -> Message:
                message = await receive()
                size = account.num_bytes + len(message.get("body", b""))
                if is_form:
                    size = min(size, HELD_FORM_BYTES)
                account.check(size - account.num_bytes)
                account.hold(size)
                return message

            await self._app(scope, counting_receive, send)


class CloseUnread:
    """ASGI middleware that closes the connection of an HTTP request that is answered before its body has arrived.

    With HTTP/1.1, the server would have to receive the rest, which may be endless, before the connection's next
    request. A body of at most SMALL_BODY_BYTES is received, and the connection stays open. A larger body is received
    and dropped for LINGER_S after the response, up to LINGER_BYTES: closing a connection with unread bytes resets it,
    and the client may lose the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = "transfer-encoding" in headers or _length(headers) > SMALL_BODY_BYTES

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def closing_send(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not (unread and is_last):
                await send(message)
                return
            await send({**message, "more_body": True})
            num_bytes = 0
            with move_on_after(LINGER_S):
                while unread and num_bytes < LINGER_BYTES:
                    num_bytes += len((await watched_receive()).get("body", b""))
            await send({"type": "http.response.body"})

        await self._app(scope, watched_receive, closing_send)


def _length(headers: Headers) -> int:
    """Return the Content-Length. An invalid one counts as larger than SMALL_BODY_BYTES."""
    length = headers.get("content-length", "0")
    return int(length) if length.isdecimal() else SMALL_BODY_BYTES + 1
