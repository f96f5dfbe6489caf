"""Which web pages may use a server, and how the log reports pages that were refused."""

from __future__ import annotations

import logging

import httpx
import pytest

from antiphon.server.app import build
from antiphon.server.http.origin import allowed_origins
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import load


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://voice.example/", "https://voice.example"),
        ("HTTPS://Voice.Example", "https://voice.example"),
        ("https://voice.example:443", "https://voice.example"),
        ("http://voice.example:80/", "http://voice.example"),
        ("http://voice.example:443", "http://voice.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("capacitor://localhost", "capacitor://localhost"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_allowed_as_a_browser_sends_it(given: str, sent: str) -> None:
    assert allowed_origins(load({"cors_origins": [given]}).server) == [sent]


@pytest.mark.anyio
async def test_a_refused_page_is_logged_with_its_origin_and_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.server.access_log")
    app = build(ServerState(load({"cors_origins": ["https://voice.example:443/"]}), Metrics()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
        allowed = await client.get("/health", headers={"Origin": "https://voice.example"})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://voice.example")
        assert (await client.get("/health", headers={"Origin": "https://Other.example:81"})).status_code == 403
        assert (await client.get("/health", headers={"Origin": "https://a b=c"})).status_code == 403
        assert (await client.get("/health", headers={"Host": "other.example"})).status_code == 403
    lines = [line.split(" status=403 ")[1].split(" ms=")[0] for line in caplog.messages if "403" in line]
    assert lines == [
        "refusal=origin_not_allowed refused=https://other.example:81 allowed_by=--cors-origin",
        "refusal=origin_not_allowed allowed_by=--cors-origin",
        "refusal=host_not_allowed refused=other.example allowed_by=--allowed-host",
    ]
