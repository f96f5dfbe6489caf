"""Gives every request an id, and writes one log line when a request or a WebSocket ends.

The line names the endpoint by its route and the API key by a short hash. It never contains the URL, because a client
chooses the URL's text. The record is in a context variable, so any code that runs for a request can add to the line, in
the request's task or in a task that it started.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.remote.trace_context import TRACEPARENT, valid_traceparent
from antiphon.transports.http import LineLimit

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
# Matches the ids that a client may choose. Any other id could forge a log line, or fill the log.
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Routes that are polled every few seconds, or that serve the page. They are logged only at level DEBUG.
_QUIET = ("/health", "/ready", "/metrics", "/", "/web/{name}", "/web/client/{name}")
# Close codes of a normal end. Their reason is not logged as a refusal.
_PLAIN_CLOSES = (1000, 1001)
Fields = dict[str, str | int | float]


@dataclass(slots=True)
class RequestRecord:
    """The fields of one request's or WebSocket's log line."""

    # The request's id, which the response contains too.
    id: str
    # The short hash of the caller's key; "-" on a server without keys, "" until the caller is known.
    key: str = ""
    # The code of the error in the response; "" for none.
    refusal: str = ""
    # The origin or host name that was refused; "" for none.
    refused: str = ""
    # The flag that would allow `refused`; "" for none.
    allowed_by: str = ""
    # The id of the session that the request began; "" for none.
    session: str = ""
    # Seconds of audio received or made, if the endpoint counts them.
    audio_s: float = 0.0
    # The HTTP status, or the close code of an accepted WebSocket; 0 until it is known.
    status: int = 0
    # The client's `traceparent` header (W3C Trace Context); "" for none. Not logged.
    traceparent: str = ""


_current: ContextVar[RequestRecord] = ContextVar("request")


def current_request() -> RequestRecord:
    """Return the record of the request that this task runs for. Outside of a request, the record is never logged."""
    return _current.get(None) or RequestRecord("-")


def log_fields(logger: logging.Logger, level: int, message: str, fields: Fields) -> None:
    """Log `message` with fields. In text they follow it as `name=value`; in JSON they are members of the object.

    Fields that are empty or 0 are left out. Values must not contain text that a client chooses, except checked ids.
    """
    given = {name: value for name, value in fields.items() if value not in ("", 0)}
    text = " ".join(f"{name}={value}" for name, value in given.items())
    logger.log(level, "%s %s", message, text, extra={"event": message, "fields": given})


class AccessLog:
    """ASGI middleware that gives requests and upgrades an id, and logs their end.

    It has to be the outermost middleware, except for `BasePath`. The id is the client's `X-Request-Id` if that is a
    token of at most 128 characters, else a new one. The response has it as a header. `clock` returns monotonic seconds.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._routes = routes
        self._clock = clock
        self._refused = LineLimit(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        record = RequestRecord(given if _VALID_ID.fullmatch(given) else f"req_{uuid4().hex}")
        parents = Headers(scope=scope).getlist(TRACEPARENT)
        record.traceparent = valid_traceparent(parents[0]) if len(parents) == 1 else ""
        _current.set(record)
        begun_s = self._clock()

        async def observed_receive() -> Message:
            message = await receive()
            _observe(record, message)
            return message

        async def observed_send(message: Message) -> None:
            _observe(record, message)
            await send(message)

        try:
            await self._app(scope, observed_receive, observed_send)
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            self._log(record, scope, self._clock() - begun_s)

    def _log(self, record: RequestRecord, scope: Scope, took_s: float) -> None:
        endpoint = self._endpoint(scope)
        level = logging.DEBUG if endpoint in _QUIET and record.status < 400 else logging.INFO
        fields: Fields = {
            "request": record.id,
            "key": record.key,
            "method": scope.get("method", "WEBSOCKET"),
            "endpoint": endpoint,
            "status": record.status,
            "refusal": record.refusal,
            "refused": record.refused,
            "allowed_by": record.allowed_by,
            "session": record.session,
            "ms": round(took_s * 1000, 1),
            "audio_s": round(record.audio_s, 2),
        }
        if not record.key and record.refusal:
            unlogged = self._refused.admit()
            if unlogged is None:
                return
            level = logging.WARNING
            fields |= {"address": (scope.get("client") or ("",))[0], "unlogged": unlogged}
        log_fields(log, level, "request ended", fields)

    def _endpoint(self, scope: Scope) -> str:
        """Return the path of the route that serves the request, with placeholders; "unknown" if no route serves it."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", "unknown"))
        return "unknown"


def _observe(record: RequestRecord, message: Message) -> None:
    """Copy an ASGI message's status into the record, and add the record's id to a message that begins a response."""
    kind = message["type"]
    if kind in ("http.response.start", "websocket.http.response.start"):
        record.status = message["status"]
    elif kind in ("websocket.close", "websocket.disconnect") and not record.status:
        record.status = message.get("code") or 1005
        if record.status not in _PLAIN_CLOSES and kind == "websocket.close":
            record.refusal = record.refusal or message.get("reason") or ""
    if kind in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
        message.setdefault("headers", [])
        MutableHeaders(scope=message)[REQUEST_ID] = record.id
