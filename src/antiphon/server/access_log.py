"""Gives every request an id, and writes one log line when a request or a WebSocket ends.

The line names the endpoint by its route, never by the URL, which may hold what the client chose, and the API key by
a short hash. A record is reached through a context variable, so that whatever runs for a request, in its task or in
one that it began, can add to its line.
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
# An id that a client may choose. Others could forge a log line, or fill the log.
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Scraped every few seconds, or part of the page: logged only at the level debug.
_QUIET = ("/health", "/ready", "/metrics", "/", "/web/{name}", "/web/client/{name}")
# Close codes that are no refusal: their reason says who left.
_PLAIN_CLOSES = (1000, 1001)
Fields = dict[str, str | int | float]


@dataclass(slots=True)
class RequestRecord:
    """What the log line of one request or WebSocket says.

    - `id`: the request's id, which the response carries too.
    - `key`: the short hash of the caller's key, "-" for a server without keys; "" until the caller is known.
    - `refusal`: the code of the error that it was answered with; "" for none.
    - `refused`: the origin or host name that was refused, and `allowed_by`: the flag that would allow it; "" for none.
    - `session`: the id of the session that it began; "" for none.
    - `audio_s`: seconds of audio taken or made, where the endpoint counts them.
    - `traceparent`: the client's, as W3C Trace Context has it; "" for none.
    - `status`: the HTTP status, or the close code of an accepted WebSocket; 0 until it is known.
    """

    id: str
    key: str = ""
    refusal: str = ""
    refused: str = ""
    allowed_by: str = ""
    session: str = ""
    audio_s: float = 0.0
    status: int = 0
    traceparent: str = ""


_current: ContextVar[RequestRecord] = ContextVar("request")


def current_request() -> RequestRecord:
    """Return the record of the request that this task runs for; outside of any, one that is never logged."""
    return _current.get(None) or RequestRecord("-")


def log_fields(logger: logging.Logger, level: int, message: str, fields: Fields) -> None:
    """Log `message` with fields: as `name=value` behind it in text, and as members of the line's object in JSON.

    Fields that are empty or 0 are left out. Values must not hold what a client may choose, except for checked ids.
    """
    given = {name: value for name, value in fields.items() if value not in ("", 0)}
    text = " ".join(f"{name}={value}" for name, value in given.items())
    logger.log(level, "%s %s", message, text, extra={"event": message, "fields": given})


class AccessLog:
    """ASGI middleware that gives requests and upgrades their id and logs their end. It has to be the outermost but
    for the one that mends paths.

    The id is that of the client's `X-Request-Id`, where it is a token of at most 128 characters, else a new one. The
    response, or the answer to the upgrade, carries it. `clock` returns monotonic seconds.
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
        """Return the path of the route that serves the request, with placeholders; "unknown" where there is none."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", "unknown"))
        return "unknown"


def _observe(record: RequestRecord, message: Message) -> None:
    """Add what a message of ASGI says to the record, and the record's id to the message that begins an answer."""
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
