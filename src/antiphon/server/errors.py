"""HTTP errors in OpenAI's shape: `{error: {message, type, param, code}}`, with the right status."""

from __future__ import annotations

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketState

_TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}


def error_response(
    status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float = 0.0
) -> JSONResponse:
    """One error. `retry_after_s` above 0 becomes a Retry-After header."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"Retry-After": str(math.ceil(retry_after_s))} if retry_after_s else None
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


async def deny(websocket: WebSocket, status: int, message: str, code: str, retry_after_s: float = 0.0) -> None:
    """Answer an upgrade with an HTTP error; nothing once the socket is open."""
    if websocket.client_state == WebSocketState.CONNECTING:
        await websocket.send_denial_response(error_response(status, message, code=code, retry_after_s=retry_after_s))


async def http_exception(_: Request, error: Exception) -> JSONResponse:
    """Starlette's own errors (404, 405, a body that is no multipart)."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, code="not_found" if error.status_code == 404 else None)
