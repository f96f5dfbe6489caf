"""API keys, as each vendor's clients send them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from starlette.requests import HTTPConnection
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from antiphon.protocols.opening import URL_KEYS
from antiphon.server.http.auth import key_of
from antiphon.server.http.listening import quiet_log
from antiphon.settings import Settings
from tests.server.scripted import serving

KEY = "dg-1234567890"
HEADERS = [
    {"Authorization": f"Bearer {KEY}"},
    {"Authorization": f"Token {KEY}"},
    {"Authorization": f"token  {KEY} "},
    {"Authorization": KEY},
    {"xi-api-key": KEY},
    {"x-goog-api-key": KEY},
    {"X-API-Key": KEY},
]
OFFERED = [
    (["token", KEY], "token"),
    (["bearer", KEY], "bearer"),
    (["realtime", f"openai-insecure-api-key.{KEY}"], "realtime"),
]


def asked(headers: dict[str, str], query: str = "") -> HTTPConnection:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw, "query_string": query.encode()})


@pytest.mark.parametrize("headers", HEADERS)
def test_a_key_is_found_in_each_vendors_header(headers: dict[str, str]) -> None:
    assert key_of(asked(headers)) == KEY
    assert key_of(asked(headers, "key=other")) == KEY


@pytest.mark.parametrize("name", URL_KEYS)
def test_a_key_is_found_in_the_url(name: str) -> None:
    assert key_of(asked({}, f"model=nova-3&{name}={KEY}")) == KEY


@pytest.mark.parametrize("value", ["", "Bearer", "Token ", "Basic dXNlcjpw", "Digest a b", "token"])
def test_what_is_no_key_is_none(value: str) -> None:
    assert key_of(asked({"Authorization": value, "Sec-WebSocket-Protocol": "token"})) is None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings()
    log = logging.getLogger("uvicorn.error")
    before = list(log.filters)
    quiet_log(lambda: False)
    with serving(replace(settings, server=replace(settings.server, api_keys=(KEY,)))) as (url, _, _):
        yield url
    log.filters[:] = before


@pytest.mark.parametrize(("offered", "selected"), OFFERED)
def test_a_subprotocol_with_a_key_opens_a_session_and_the_server_selects_the_other(
    url: str, offered: list[Subprotocol], selected: str
) -> None:
    for path in ("/v1/realtime", "/v1/audio/speech/stream"):
        with ExitStack() as stack:
            if path == "/v1/audio/speech/stream":
                stack.enter_context(pytest.raises(InvalidStatus, match="404"))
            socket = stack.enter_context(connect(f"{url}{path}", subprotocols=offered))
            assert socket.subprotocol == selected


def test_keys_of_urls_are_in_no_log_line_and_no_answer(url: str, caplog: pytest.LogCaptureFixture) -> None:
    # The test's own clients log what they send.
    for name in ("httpx", "httpcore", "websockets.client"):
        caplog.set_level(logging.WARNING, name)
    caplog.set_level(logging.DEBUG)
    http = f"http{url.removeprefix('ws')}"
    for key, status in ((KEY, 200), ("dg-wrong-key", 401)):
        for name in URL_KEYS:
            assert httpx.get(f"{http}/v1/models?{name}={key}").status_code == status
            refused = httpx.get(f"{http}/v1/nothing?{name}={key}")
            assert key not in refused.text
            assert refused.status_code == (404 if status == 200 else status)
            if status == 200:
                with connect(f"{url}/v1/realtime?intent=transcription&{name}={key}") as socket:
                    assert key not in str(socket.recv())
            else:
                with pytest.raises(InvalidStatus) as answer:
                    connect(f"{url}/v1/realtime?{name}={key}")
                assert key not in str(answer.value.response.body)
    assert "endpoint=/v1/models status=200" in caplog.text
    assert KEY not in caplog.text
    assert "dg-wrong-key" not in caplog.text
