"""The page may only open WebSockets of its own server, whatever the Host header of its request."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from antiphon.server.routes.page import asset, policy


def connects(host: str) -> list[str]:
    """Return the sources that a page with this Host may connect to."""
    (found,) = re.findall(r"connect-src ([^;]*)", policy(host))
    return str(found).split()


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "voice.example.org", "VOICE.example.org:443", "xn--bcher-kva.example"]
)
def test_the_page_talks_to_the_server_that_it_came_from(host: str) -> None:
    assert connects(host) == ["'self'", f"ws://{host}", f"wss://{host}"]


@pytest.mark.parametrize(
    "host",
    [
        "",
        "*",
        "*.example.org",
        "a; script-src *",
        "a, default-src *",
        "a *",
        "a\tb",
        "a'unsafe-inline'",
        "user@a",
        "a/path",
        "a?b",
        "a:*",
        "a:80:90",
        "a:123456",
        "-a",
        "a..b",
        "[::1]:8000",
        "münchen.example",
        "a\n",
        "a" * 256,
    ],
)
def test_a_host_that_no_policy_can_name_writes_none(host: str) -> None:
    """The policy contains no part of such a Host header. In most browsers, 'self' includes WebSockets."""
    assert policy(host) == policy("")
    assert connects(host) == ["'self'"]


@pytest.mark.parametrize("name", ["app.js", "index.html", "style.css"])
def test_every_file_of_the_page_has_the_policy_of_its_request(name: str) -> None:
    headers = [(b"host", b"voice.example.org"), (b"host", b"other.example")]
    scope = {"type": "http", "headers": headers, "path_params": {"name": name}, "app": SimpleNamespace()}
    answer = asyncio.run(asset(Request(scope)))
    assert answer.headers["content-security-policy"] == policy("voice.example.org")
    # A scheme without a host would allow any server.
    assert not re.search(r"\bwss?:(?!//)", policy("voice.example.org"))
