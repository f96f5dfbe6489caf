"""Drains the server: finishes sessions and requests under way, and ends the rest with an error after a timeout."""

from __future__ import annotations

import logging

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.server.admission import Admission
from antiphon.server.http.errors import error_response
from antiphon.server.registry import SessionRegistry
from antiphon.server.state import ServerState
from antiphon.signals import unless_set

log = logging.getLogger(__name__)
# Seconds that clients have to read the last frames after their sessions were cut off.
LAST_WORDS_S = 2.0
MESSAGE, CODE = "The server is shutting down.", "server_shutting_down"


async def drain(state: ServerState, seconds: float, now: anyio.Event | None = None) -> None:
    """Stop admitting sessions, let each live session finish its current turn and close, and wait until all have ended.

    After `seconds`, or when `now` is set, the rest is cut off: requests are answered with 503, and sessions send their
    waiting frames and close. A session is abandoned if its client does not read these frames within LAST_WORDS_S.
    """
    state.admission.draining = True
    state.metrics.drained.set(1)
    if state.admission.num_under_way:
        log.info("draining %d sessions and requests", state.admission.num_under_way)
    state.listeners.drain()
    for live in list(state.sessions.live):
        live.drain(seconds)
    await _wait_for_all(state.admission, seconds, now or anyio.Event())
    if state.admission.num_under_way:
        log.warning("%d sessions and requests are cut off", state.admission.num_under_way)
    for request in list(state.sessions.requests):
        request.cancel()
    state.listeners.cut()
    for live in list(state.sessions.live):
        live.finish()
    await _wait_for_all(state.admission, LAST_WORDS_S, anyio.Event())
    for live in list(state.sessions.live):
        live.attachment.abandon()


async def _wait_for_all(admission: Admission, seconds: float, now: anyio.Event) -> None:
    """Wait until no place is held, for at most `seconds`, or until `now` is set."""
    with anyio.move_on_after(seconds):
        await unless_set(now, admission.all_left)


class CutRequests:
    """ASGI middleware that lets `drain` cancel the HTTP requests under way, and answers them.

    A response that has not begun becomes 503 `server_shutting_down`. Server-sent events end with an error event. Any
    other body that has begun is cut off. Its client detects this because the end of the chunked encoding is missing.
    """

    def __init__(self, app: ASGIApp, sessions: SessionRegistry) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] | None = None
        complete = False

        async def noting_send(message: Message) -> None:
            nonlocal headers, complete
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        with anyio.CancelScope() as work:
            self._sessions.requests.add(work)
            try:
                await self._app(scope, receive, noting_send)
            finally:
                self._sessions.requests.discard(work)
        if not work.cancelled_caught or complete:
            return
        response = error_response(503, MESSAGE, code=CODE, retry_after_s=5)
        if headers is None:
            await response(scope, receive, send)
        elif headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            data = b"data: " + bytes(response.body) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": False})
