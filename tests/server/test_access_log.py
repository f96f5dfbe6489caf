"""The log line of each request. These tests need no server process."""

from __future__ import annotations

import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from antiphon.cli.main import JsonLines
from antiphon.server.access_log import AccessLog, current_request
from antiphon.transports.http import REFUSED_LINES, REFUSED_WINDOW_S


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def _endpoint(request: Request) -> Response:
    record = current_request()
    if name := request.headers.get("x-key"):
        record.key, record.audio_s = name, 1.5
        return Response("ok")
    record.refusal = "invalid_api_key"
    return Response(status_code=401)


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def client(clock: _Clock) -> httpx.AsyncClient:
    routes = [Route("/v1/things/{name}", _endpoint)]
    app = Starlette(routes=routes, middleware=[Middleware(AccessLog, routes, clock)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.anyio
async def test_when_a_request_ends_then_one_line_says_whose_it_was_and_not_what_it_said(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.server.access_log")
    url = "/v1/things/private-name?secret=1"
    answer = await client.get(url, headers={"x-key": "abc", "X-Request-Id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    (line,) = caplog.messages
    assert line == ("request ended request=mine-7 key=abc method=GET endpoint=/v1/things/{name} status=200 audio_s=1.5")


@pytest.mark.anyio
@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "key=1;level=error"])
async def test_when_a_request_id_is_no_short_token_then_it_gets_another(client: httpx.AsyncClient, given: str) -> None:
    answers = [await client.get("/v1/things/a", headers={"x-key": "k", "X-Request-Id": given}) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(made.startswith("req_") for made in ids)


@pytest.mark.anyio
async def test_when_keys_are_guessed_then_the_log_says_from_where_and_does_not_fill(
    client: httpx.AsyncClient, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(REFUSED_LINES + 30):
        await client.get("/v1/things/a")
    assert len(caplog.records) == REFUSED_LINES
    assert {r.levelname for r in caplog.records} == {"WARNING"}
    assert all("address=127.0.0.1" in line and "refusal=invalid_api_key" in line for line in caplog.messages)
    clock.now_s = REFUSED_WINDOW_S
    await client.get("/v1/things/a")
    assert "unlogged=30" in caplog.messages[-1]


def test_when_lines_are_json_then_a_message_cannot_add_one() -> None:
    record = logging.LogRecord("antiphon.x", logging.INFO, "", 0, "a\n%s", ("{\u2028}",), None)
    record.fields = {"level": "forged", "status": 200}
    line = JsonLines().format(record)
    assert line.isascii()
    assert "\n" not in line
    assert '"level": "info"' in line
    assert '"status": 200' in line
