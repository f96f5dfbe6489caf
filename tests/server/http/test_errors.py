"""Exceptions of routes as HTTP responses and as refused upgrades, and request bodies that are too long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from antiphon.errors import (
    EngineError,
    LocalProtocolError,
    MediaError,
    ModelError,
    Refused,
    RemoteProtocolError,
    StoreError,
    Unauthorized,
)
from antiphon.server.http.body import limited
from antiphon.server.http.errors import HANDLERS, BodyTooLarge, response_to
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings

# Maps each exception of a route to the status, error type, code and param of the response.
RESPONSES: list[tuple[Exception, int, str, str | None, str | None]] = [
    (Unauthorized("no key"), 401, "authentication_error", "invalid_api_key", None),
    (Refused("the server is full", 2.5), 503, "server_error", "rate_limit_exceeded", None),
    (Refused("the key is", 2.5, by_own_limit=True), 429, "rate_limit_error", "rate_limit_exceeded", None),
    (RemoteProtocolError("invalid_value", "No.", "model"), 400, "invalid_request_error", "invalid_value", "model"),
    (RemoteProtocolError("model_not_found", "No.", "model"), 404, "invalid_request_error", "model_not_found", "model"),
    (RemoteProtocolError("voice_not_found", "No."), 404, "invalid_request_error", "voice_not_found", None),
    (MediaError("no audio"), 400, "invalid_request_error", "invalid_value", "file"),
    (ModelError("it failed"), 500, "server_error", "processing_error", None),
    (EngineError("it failed"), 500, "server_error", "processing_error", None),
    (StoreError("the disk is full"), 507, "server_error", "storage_error", None),
    (BodyTooLarge("Too long.", "file_too_large", "file"), 413, "invalid_request_error", "file_too_large", "file"),
    (BodyTooLarge("Too long."), 413, "invalid_request_error", "request_too_large", None),
    (HTTPException(408, "Too slow."), 408, "invalid_request_error", "request_timeout", None),
    (ClientDisconnect(), 499, "invalid_request_error", "invalid_value", None),
    (HTTPException(415, "Send SDP."), 415, "invalid_request_error", "invalid_value", None),
    (HTTPException(404, "Not Found"), 404, "invalid_request_error", "not_found", None),
    (HTTPException(405, "Method Not Allowed"), 405, "invalid_request_error", None, None),
]
IDS = [f"{type(error).__name__}-{status}" for error, status, *_ in RESPONSES]


def application(handle: Callable[[Request], Any], path: str = "/v1/chat/completions") -> Starlette:
    """Return an app with one HTTP route, and a WebSocket route that raises the same exception before it accepts."""

    async def upgrade(websocket: WebSocket) -> None:
        await handle(websocket)  # type: ignore[arg-type]

    app = Starlette(routes=[Route(path, handle, methods=["POST"]), WebSocketRoute("/ws", upgrade)],
                    exception_handlers=HANDLERS)  # fmt: skip
    app.state.antiphon = ServerState(Settings(), Metrics())
    app.state.body_timeout_s = 30.0
    return app


def raising(error: Exception, path: str = "/v1/chat/completions") -> Starlette:
    async def route(_: Request) -> Response:
        raise error

    return application(route, path)


def post(app: Starlette, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, **options)

    return asyncio.run(main())


async def sent_to_a_socket(app: Starlette) -> list[dict[str, Any]]:
    """Return the ASGI messages that answer an upgrade."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "websocket",
        "path": "/ws",
        "raw_path": b"/ws",
        "root_path": "",
        "scheme": "ws",
        "query_string": b"",
        "headers": [],
        "subprotocols": [],
        "server": ("server", 80),
        "extensions": {"websocket.http.response": {}},
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), RESPONSES, ids=IDS)
def test_when_a_route_raises_then_the_response_has_its_status_and_code(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    response = post(raising(error))
    body = response.json()["error"]
    assert response.status_code == status
    assert (body["type"], body["code"], body["param"]) == (kind, code, param)
    assert body["message"]
    assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), RESPONSES, ids=IDS)
def test_when_a_route_raises_before_the_upgrade_then_it_is_refused_with_the_same_response(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    start, *chunks = asyncio.run(sent_to_a_socket(raising(error)))
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    body = json.loads(b"".join(c["body"] for c in chunks))["error"]
    assert (body["type"], body["code"], body["param"]) == (kind, code, param)


def test_every_exception_that_has_a_handler_is_tested() -> None:
    # Other exceptions need a server that raises them again. tests/attack/test_faults_inside.py tests them.
    assert {type(error) for error, *_ in RESPONSES} - {BodyTooLarge} == set(HANDLERS) - {Exception}
    assert issubclass(BodyTooLarge, HTTPException)


@pytest.mark.parametrize(("retry_after_s", "header"), [(2.5, "3"), (10.0, "10")])
def test_when_there_is_no_room_then_the_response_says_when_to_try_again(retry_after_s: float, header: str) -> None:
    app = raising(Refused("the server is full", retry_after_s))
    assert post(app).headers["Retry-After"] == header
    assert b'antiphon_refused_total{reason="no_room"} 1.0' in app.state.antiphon.metrics.text()


def test_when_a_key_is_unknown_then_the_refusal_is_counted() -> None:
    app = raising(Unauthorized("no key"))
    post(app)
    assert b'antiphon_refused_total{reason="unauthorized"} 1.0' in app.state.antiphon.metrics.text()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/audio/speech", "The model failed on this text."),
        ("/v1/audio/transcriptions", "The model failed on this file."),
        ("/v1/audio/translations", "The model failed on this file."),
        ("/v1/chat/completions", "The model failed."),
    ],
)
def test_when_a_model_fails_then_the_client_learns_what_it_failed_on_and_the_log_why(
    path: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = post(raising(ModelError("out of memory"), path), path)
    assert response.json()["error"]["message"] == message
    assert "out of memory" not in response.text
    assert f"{path} failed: out of memory" in caplog.text


@pytest.mark.parametrize(
    "error", [ModelError("late"), RemoteProtocolError("invalid_value", "late"), StoreError("late")]
)
def test_when_a_route_raises_after_the_upgrade_then_the_exception_is_not_hidden(error: Exception) -> None:
    async def late(websocket: Any) -> Response:
        await websocket.accept()
        raise error

    with pytest.raises(RuntimeError, match="after the upgrade") as raised:
        asyncio.run(sent_to_a_socket(application(late)))
    assert raised.value.__cause__ is error


def test_when_there_is_no_room_after_the_upgrade_then_the_session_has_answered_already() -> None:
    async def late(websocket: Any) -> Response:
        await websocket.accept()
        raise Refused("full", 1.0)

    assert [m["type"] for m in asyncio.run(sent_to_a_socket(application(late)))] == ["websocket.accept"]


def test_when_an_exception_has_no_status_then_it_is_a_500_that_does_not_tell_it() -> None:
    app = raising(LocalProtocolError("a secret"))
    # The exception is raised again after the response, so it is logged.
    with pytest.raises(LocalProtocolError):
        post(app)
    request = Request({"type": "http", "app": app, "headers": []})
    response = response_to(request, LocalProtocolError("a secret"))
    assert response.status_code == 500
    assert b'"server_error"' in bytes(response.body)
    assert b"secret" not in bytes(response.body)


# --- bodies of bounded size


LIMIT = 1000


def reading(error: BodyTooLarge | None = None) -> tuple[Starlette, list[int]]:
    """Return an app whose route reads a body of at most LIMIT bytes, and the list of the lengths that it read."""
    lengths: list[int] = []

    async def route(request: Request) -> Response:
        body = await limited(request, LIMIT, error).body()
        lengths.append(len(body))
        return Response(body)

    return application(route), lengths


async def in_chunks(size: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


def test_when_a_body_fits_then_it_is_read_whole() -> None:
    app, lengths = reading()
    assert post(app, content=b"x" * LIMIT).status_code == 200
    assert post(app, content=in_chunks(100, 10)).content == b"x" * LIMIT
    assert lengths == [LIMIT, LIMIT]


def test_when_a_body_declares_too_many_bytes_then_it_is_refused_unread() -> None:
    app, lengths = reading()
    read: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        read.append(b"x" * 10)
        yield read[-1]

    response = post(app, content=content(), headers={"Content-Length": str(LIMIT + 1)})
    assert response.status_code == 413
    assert response.json()["error"]["message"] == f"The body is larger than {LIMIT} bytes."
    assert (read, lengths) == ([], [])


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "10"}], ids=["undeclared", "declared as short"])
def test_when_a_body_turns_out_too_long_then_it_is_read_up_to_the_limit_only(headers: dict[str, str]) -> None:
    app, lengths = reading()
    num_chunks = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal num_chunks
        async for chunk in in_chunks(100, 1000):
            num_chunks += 1
            yield chunk

    response = post(app, content=content(), headers=headers)
    assert response.status_code == 413
    assert num_chunks <= LIMIT // 100 + 2
    assert lengths == []


@pytest.mark.parametrize("content", [b"x" * (LIMIT + 1), in_chunks(LIMIT, 2)], ids=["declared", "in chunks"])
def test_when_a_route_names_an_error_for_long_bodies_then_the_response_has_its_code(content: Any) -> None:
    app, _ = reading(BodyTooLarge("The file is too large.", "file_too_large", "file"))
    error = post(app, content=content).json()["error"]
    assert (error["message"], error["code"], error["param"]) == ("The file is too large.", "file_too_large", "file")
