"""Errors of HTTP requests and refused upgrades, in OpenAI's shape: `{error: {message, type, param, code}}`.

At the paths of another vendor (`SHAPES`), errors have that vendor's shape.
Routes raise exceptions, and only `HANDLERS` turns them into a status. A WebSocket is refused over HTTP before it is
accepted. After that, the session itself sends errors to the client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketState

from antiphon.errors import (
    EngineError,
    MediaError,
    ModelError,
    ModelLost,
    Refused,
    RemoteProtocolError,
    StoreError,
    Unauthorized,
)
from antiphon.protocols.cartesia.speaking import CARTESIA_PATHS, cartesia_error
from antiphon.protocols.deepgram.forms import DEEPGRAM_PATHS, deepgram_error
from antiphon.protocols.elevenlabs.rest import ELEVENLABS_PATHS, elevenlabs_error
from antiphon.protocols.wire import ShapedError
from antiphon.server.access_log import REQUEST_ID, current_request
from antiphon.server.http.disconnect import CLIENT_CLOSED_REQUEST

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
# Error codes of statuses that routes and the router raise. The code of any other status is `invalid_value`.
_CODES: Mapping[int, str | None] = {404: "not_found", 405: None, 408: "request_timeout"}
NOT_FOUND = frozenset({"model_not_found", "speaker_not_found", "voice_not_found"})
# Names the input of a model that failed, for the error message. Keys are prefixes of the request's path.
_FAILED_ON = {"/v1/audio/speech": " on this text", "/v1/audio/tran": " on this file"}


class _Error(msgspec.Struct):
    message: str
    code: str | None


class _Body(msgspec.Struct):
    error: _Error


# The shape of errors at these paths, and at those below: a function of the status, our code, the message and the id of
# the request.
SHAPES: Mapping[str, Callable[[int, str, str, str], ShapedError]] = {
    **dict.fromkeys(DEEPGRAM_PATHS, deepgram_error),
    **dict.fromkeys(ELEVENLABS_PATHS, elevenlabs_error),
    **dict.fromkeys(CARTESIA_PATHS, cartesia_error),
}


class BodyTooLarge(HTTPException):
    """The body of a request exceeds its limit (status 413). The response's error has this `code` and `param`."""

    def __init__(self, message: str, code: str = "request_too_large", param: str | None = None) -> None:
        super().__init__(413, message)
        self.code = code
        self.param = param


class Forbidden(HTTPException):
    """The web page that sent a request, or its host name, is not allowed (status 403). The error has this `code`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(403, message)
        self.code = code


def error_response(
    status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float = 0.0
) -> JSONResponse:
    """Make an error response. The error's `type` follows from the status.

    `retry_after_s` above 0 becomes a Retry-After header, rounded up to whole seconds.
    """
    current_request().refusal = code or str(status)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"Retry-After": str(math.ceil(retry_after_s))} if retry_after_s else None
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


def response_to(connection: HTTPConnection, error: Exception) -> JSONResponse:
    """Return the response for an exception of a route, in the shape of its path. Counts refusals, and logs failures of
    models.

    An unexpected exception becomes a 500 `server_error` without details.
    """
    response, path = _openai_response(connection, error), connection.scope["path"]
    shape = next((shape for start, shape in SHAPES.items() if f"{path}/".startswith(f"{start}/")), None)
    if shape is None:
        return response
    refused = msgspec.json.decode(response.body, type=_Body).error
    shaped = shape(response.status_code, refused.code or "", refused.message, current_request().id)
    headers = {k: v for k, v in response.headers.items() if k not in ("content-length", "content-type")}
    return JSONResponse(shaped.body, response.status_code, {**headers, **shaped.headers})


def _openai_response(connection: HTTPConnection, error: Exception) -> JSONResponse:
    metrics = connection.app.state.antiphon.metrics
    match error:
        case Unauthorized():
            metrics.refused.labels("unauthorized").inc()
            response = error_response(401, str(error), code="invalid_api_key")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        case Refused():
            metrics.refused.labels("no_room").inc()
            status = 429 if error.by_own_limit else 503
            return error_response(status, error.reason, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case RemoteProtocolError():
            status = 404 if error.code in NOT_FOUND else 400
            return error_response(status, error.message, code=error.code, param=error.param)
        case MediaError():
            return error_response(400, str(error), code="invalid_value", param="file")
        case ModelLost():
            log.error("%s failed: %s", connection.url.path, error)
            return error_response(503, str(error), code="model_lost")
        case ModelError() | EngineError():
            path = connection.url.path
            log.error("%s failed: %s", path, error)
            subject = next((s for start, s in _FAILED_ON.items() if path.startswith(start)), "")
            return error_response(500, f"The model failed{subject}.", code="processing_error")
        case StoreError():
            return error_response(507, str(error), code="storage_error")
        case Forbidden():
            metrics.refused.labels("forbidden").inc()
            return error_response(403, error.detail, code=error.code)
        case BodyTooLarge():
            return error_response(413, error.detail, code=error.code, param=error.param)
        case HTTPException():
            # The router raises 404 and 405. Routes raise a status for a value that they do not accept.
            code = _CODES.get(error.status_code, "invalid_value")
            # Starlette lists the methods in arbitrary order.
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            message = f"This path takes {allowed}, not {connection.scope.get('method')}." if allowed else error.detail
            response = error_response(error.status_code, message, code=code)
            response.headers.update({**(error.headers or {}), **({"Allow": allowed} if allowed else {})})
            return response
        case ClientDisconnect():
            return error_response(
                CLIENT_CLOSED_REQUEST, "The client left before its request had arrived.", code="invalid_value"
            )
        case _:
            return error_response(500, "The server failed on this request.", code="server_error")


async def _handle(connection: HTTPConnection, error: Exception) -> Response | None:
    """Return the error response to a request, or refuse an upgrade with it. Starlette calls this for both."""
    response = response_to(connection, error)
    if not isinstance(connection, WebSocket):
        return response
    if connection.client_state == WebSocketState.CONNECTING:
        await connection.send_denial_response(response)
    elif not isinstance(error, Refused):
        # After the upgrade, a session sends its errors to its client itself. An error that arrives here is a bug, which
        # must not be hidden. If `error` itself were raised, Starlette would call its handler again, because Starlette
        # believes that the socket is not accepted yet.
        raise RuntimeError(f"{connection.url.path}: {type(error).__name__} after the upgrade") from error
    return None


async def failed(connection: HTTPConnection, error: Exception) -> Response:
    """Return the response to a request that failed because of a bug in the server.

    Starlette raises the error again, and it is logged with its traceback.
    """
    response = response_to(connection, error)
    # This response does not pass through the middleware, which would add the header.
    response.headers[REQUEST_ID] = current_request().id
    return response


# Exception class -> handler, for `Starlette(exception_handlers=...)`.
HANDLERS: Mapping[Any, Any] = dict[Any, Any].fromkeys(
    (
        Unauthorized,
        Refused,
        RemoteProtocolError,
        MediaError,
        ModelError,
        EngineError,
        StoreError,
        HTTPException,
        ClientDisconnect,
    ),
    _handle,
) | {Exception: failed}
