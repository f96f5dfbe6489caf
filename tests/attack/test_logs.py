"""What operators see: a log line for each request and session, without keys or text, and metrics that need a key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.attack.doors import as_key, upgrade
from tests.conftest import Process, Serve
from tests.server.clients import connect

KEY = as_key("sk-very-private")


@pytest.fixture(scope="module")
def logged(serve: Serve) -> Process:
    """Return a server that logs JSON lines, and requires a key for its metrics."""
    return serve("--api-key", "sk-very-private", "--metrics-key", "scrape", "--log-format", "json")


def lines(server: Process, message: str, **fields: object) -> list[dict[str, Any]]:
    """Wait for log lines with this message and these fields, and return them."""
    while True:
        found = [json.loads(line) for line in server.log.read_text().splitlines()]
        found = [row for row in found if row["message"] == message and fields.items() <= row.items()]
        if found:
            return found


def test_when_a_request_ends_then_its_line_has_the_key_only_as_a_hash(logged: Process) -> None:
    answer = httpx.get(f"{logged.url}/v1/models/what-I-look-for?token=t0p", headers=KEY | {"X-Request-Id": "req-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "req-1")
    (line,) = lines(logged, "request ended", request="req-1")
    assert (line["method"], line["endpoint"], line["status"]) == ("GET", "/v1/models/{id:path}", 404)
    assert line["refusal"] == "model_not_found"
    assert len(line["key"]) == 12
    assert line["ms"] > 0
    for text in ("sk-very-private", "what-I-look-for", "t0p"):
        assert text not in logged.log.read_text()


def test_when_a_key_is_refused_then_the_log_says_from_where(logged: Process) -> None:
    guess = as_key("sk-guessed") | {"X-Request-Id": "guess"}
    assert httpx.get(f"{logged.url}/v1/models", headers=guess).status_code == 401
    assert upgrade(logged, "/v1/realtime", **guess | {"X-Request-Id": "guess-2"}) == 401
    for request in ("guess", "guess-2"):
        (line,) = lines(logged, "request ended", request=request)
        assert (line["level"], line["address"], line["refusal"]) == ("warning", "127.0.0.1", "invalid_api_key")
    assert "sk-guessed" not in logged.log.read_text()


def test_when_a_session_ends_then_its_line_and_its_sockets_name_each_other(logged: Process) -> None:
    async def main() -> str:
        async with connect(logged.ws, additional_headers=KEY | {"X-Request-Id": "talk"}) as wire:
            return str((await wire.read())["session"]["id"])

    session = asyncio.run(main())
    (ended,) = lines(logged, "session ended", session=session)
    (line,) = lines(logged, "request ended", request="talk")
    assert (ended["request"], line["session"]) == ("talk", session)
    assert ended["key"] == line["key"]
    assert (line["method"], line["endpoint"], line["status"]) == ("WEBSOCKET", "/v1/realtime", 1000)


def test_when_metrics_have_a_key_then_only_it_opens_them_and_probes_stay_open(logged: Process) -> None:
    statuses = [
        httpx.get(f"{logged.url}/metrics", headers=headers).status_code
        for headers in ({}, KEY, as_key("scrape-"), as_key("scrape"))
    ]
    assert statuses == [401, 401, 401, 200]
    assert [httpx.get(f"{logged.url}{path}").status_code for path in ("/health", "/ready")] == [200, 200]
    assert httpx.get(f"{logged.url}/v1/models", headers=as_key("scrape")).status_code == 401
    text = httpx.get(f"{logged.url}/metrics", headers=as_key("scrape")).text
    assert "process_resident_memory_bytes" in text
    assert "process_open_fds" in text
