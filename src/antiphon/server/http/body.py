"""Bodies: those of requests are bounded in bytes and in time, those of responses are Structs as JSON."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import msgspec
from anyio import move_on_after
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.server.http.auth import bearer
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.state import ServerState
from antiphon.transports.http import in_time

# What is received of a body that nobody reads, so that its connection can be used again.
SMALL_BODY_BYTES = 64 << 10
# What is received of a larger one once it is answered, so that its client has the answer.
LINGER_S, LINGER_BYTES = 0.5, 8 << 20
# What the text fields of a form may hold together, and each of them, in bytes.
FORM_BYTES, FIELD_BYTES = 1 << 20, 256 << 10
# What of a form is in memory at most: its fields, and the beginning of its file.
HELD_FORM_BYTES = 2 << 20
# The charsets in which fields may be sent, by any of their common names. Python knows codecs that take quadratic time
# (punycode) or yield lone surrogates (unicode_escape), and a form's charset is the client's to choose.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1"})

_encoder = msgspec.json.Encoder()


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    """Make the response whose body is this value as JSON without spaces; text stays Unicode, in UTF-8."""
    return Response(_encoder.encode(body), status, media_type="application/json")


def limited(request: Request, max_bytes: int, error: BodyTooLarge | None = None) -> Request:
    """Return the same request with a body of at most `max_bytes` bytes, whatever its headers say.

    A Content-Length beyond the limit raises `error` at once. A body that turns out longer raises it while it is read,
    so that no more than the limit and one chunk is ever held. A body that arrives more slowly than `in_time` allows,
    with the application's `body_timeout_s`, raises HTTPException 408. Read the body or form of what is returned, not of
    `request`. Without `error`, a BodyTooLarge that names the limit is raised.
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
            raise HTTPException(408, "The body came too slowly.") from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise error
        return message

    return Request(request.scope, receive)


def limited_form(
    request: Request, max_bytes: int, *, max_fields: int, max_files: int = 1, error: BodyTooLarge | None = None
) -> AbstractAsyncContextManager[FormData]:
    """Read a form of at most `max_bytes` bytes, for an `async with` that closes its files at the end.

    A field has at most FIELD_BYTES (400), and a form without files at most FORM_BYTES. Raises as `limited` does, and
    HTTPException 415 for a charset that is not in CHARSETS, before anything is decoded.
    """
    # Parsed as Starlette parses it, so that the charset checked here is the one used there.
    content_type, parameters = parse_options_header(request.headers.get("content-type"))
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in CHARSETS:
        raise HTTPException(415, f"A form's charset is utf-8, us-ascii or iso-8859-1, not '{charset[:40]}'.")
    if content_type != b"multipart/form-data":
        max_bytes = min(max_bytes, FORM_BYTES)
    bounded = limited(request, max_bytes, error)
    return bounded.form(max_files=max_files, max_fields=max_fields, max_part_size=FIELD_BYTES)


class HeldBody:
    """ASGI middleware: the body of an HTTP request counts as held by its API key until the response has ended.

    Of a form, what is beyond HELD_FORM_BYTES is in temporary files. Where the key, or the server, holds all that it
    may, the route that reads the body gets Refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state: ServerState = scope["app"].state.antiphon
        headers = Headers(scope=scope)
        is_form = headers.get("content-type", "").startswith("multipart/")
        caller = state.credentials.caller(bearer(headers), short=True)
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
    """ASGI middleware: closes the connection of an HTTP request that is answered before its body has arrived.

    HTTP/1.1 would have the server receive the rest, which may be endless, before the next request of the connection. A
    body of at most SMALL_BODY_BYTES is received, and the connection stays. Of another one, what comes within LINGER_S
    of the answer is received and dropped, up to LINGER_BYTES: a connection that is closed with unread bytes is reset,
    and the client may lose the answer.
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
    """The Content-Length; one that is no number counts as endless."""
    length = headers.get("content-length", "0")
    return int(length) if length.isdecimal() else SMALL_BODY_BYTES + 1
