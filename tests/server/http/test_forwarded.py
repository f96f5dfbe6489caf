"""Clients behind proxies: which proxies are trusted to report their address, and the limits of each client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.errors import SettingsError
from antiphon.server.http.connections import Connections
from antiphon.server.http.forwarded import ForwardedClients, TrustedProxies
from antiphon.server.http.listening import QuietServer, bind, quiet_log
from antiphon.server.metrics import Metrics
from antiphon.server.run import http_server
from antiphon.server.state import ServerState
from antiphon.settings import load
from antiphon.transports.http import REFUSED_LINES
from tests.attack.doors import UPGRADE
from tests.cluster.processes import INTERNAL_KEY
from tests.cluster.spellings import HIDDEN, ask, spelled

PROXY = "10.0.0.1"


@asynccontextmanager
async def host(**settings: str) -> AsyncIterator[str]:
    """Yield the URL of a server without models, on a real socket."""
    state = ServerState(load(settings | {"port": "0"}), Metrics())
    with bind("127.0.0.1", 0) as sock:
        server = http_server(state)
        assert isinstance(server, QuietServer)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await server.listens.wait()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("trusted", "said", "address"),
    [
        ("", "203.0.113.9", "127.0.0.1"),
        ("10.0.0.0/8", "203.0.113.9", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.0/8, 127.0.0.0/8", "192.0.2.66, 203.0.113.9, 10.9.9.9", "203.0.113.9"),
        ("127.0.0.1", "key=forged", "127.0.0.1"),
        ("127.0.0.1", "", "127.0.0.1"),
    ],
)
async def test_a_refused_key_is_logged_with_the_address_that_a_trusted_proxy_says(
    caplog: pytest.LogCaptureFixture, trusted: str, said: str, address: str
) -> None:
    caplog.set_level(logging.WARNING, "antiphon.server.access_log")
    async with host(api_keys="right", trusted_proxies=trusted) as url:
        for headers in ({}, UPGRADE):
            given = {"X-Forwarded-For": said, "Authorization": "Bearer wrong"} | headers
            assert (await asyncio.to_thread(ask, url, "/v1/realtime", headers=given))[0] in (401, 404)
    found = [word for line in caplog.messages for word in line.split() if word.startswith("address=")]
    assert found == [f"address={address}"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("hidden", HIDDEN)
async def test_a_host_has_one_spelling_for_each_path(hidden: str) -> None:
    key = {"Authorization": f"Bearer {INTERNAL_KEY}"}
    async with host(internal_key=INTERNAL_KEY) as url:
        for name, target in spelled(hidden).items():
            status, _ = await asyncio.to_thread(ask, url, target, headers=key)
            # 307 redirects to the right spelling of the path. 405 is the answer for a host without a name: only DELETE
            # is allowed.
            assert status in (307, 400, 404, 405) or target.split("?")[0] == f"/{hidden}", name


@pytest.mark.anyio
@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/realtime?" + "x" * 9000,
        "GET /v1/realtime HTTP/1.1\r\nX: " + "x" * 9000,
        "GET /v1/realtime HTTP/1.1\r\nContent-Length: 0",
        "GET /v1/realtime HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST /v1/realtime",
        "GET /v1/realtime HTTP/1.1" + "\r\nX: x" * 130,
    ],
)
async def test_an_upgrade_that_is_no_handshake_is_refused_at_once(head: str) -> None:
    head = head if "\r\n" in head else f"{head} HTTP/1.1"
    upgrade = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
    async with host() as url:
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1]))
        async with stream:
            await stream.send(f"{head}\r\nHost: localhost\r\n{upgrade}\r\n".encode())
            with anyio.fail_after(20):
                assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()


@pytest.mark.anyio
async def test_what_is_no_request_is_logged_a_few_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    before = list(log.filters)
    quiet_log(lambda: False)
    try:
        async with host() as url:
            for _ in range(REFUSED_LINES + 5):
                async with await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:
                    await stream.send(b"\x16\x03\x01\r\n\r\n")
                    assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
    finally:
        log.filters[:] = before
    assert [line for line in caplog.messages if "Invalid HTTP request" in line] == caplog.messages
    assert len(caplog.messages) == REFUSED_LINES


class Held:
    """An application that waits until it is released, and then answers with the client's address."""

    def __init__(self) -> None:
        self.go, self.num_begun = anyio.Event(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        await self.go.wait()
        client = HTTPConnection(scope).client
        await PlainTextResponse(client.host if client else "")(scope, receive, send)


def behind(proxy: str, app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(proxy, 4711)), base_url="http://test")


@pytest.mark.anyio
async def test_each_client_behind_a_proxy_has_what_an_address_may_hold_and_the_proxy_has_more() -> None:
    refused: list[str] = []
    proxies = TrustedProxies(PROXY)
    connections = Connections(10, 2, lambda: refused.append(""), proxies)
    held = Held()
    app = ForwardedClients(held, proxies, connections)
    a, b = {"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.2"}
    answers: list[str] = []

    async def one(headers: dict[str, str]) -> None:
        answers.append((await proxy.get("/", headers=headers)).text)

    async with behind(PROXY, app) as proxy, behind("192.0.2.9", app) as stranger:
        async with anyio.create_task_group() as group:
            for headers in (a, a, b):
                group.start_soon(one, headers)
            while held.num_begun < 3:
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(20):
                third = await proxy.get("/", headers=a)
            assert (third.status_code, third.json()["error"]["code"]) == (503, "too_many_connections")
            assert third.headers["retry-after"]
            held.go.set()
        assert sorted(answers) == ["192.0.2.1", "192.0.2.1", "192.0.2.2"]
        assert (await proxy.get("/", headers=a)).text == "192.0.2.1"
        # Any other address is not trusted.
        assert (await stranger.get("/", headers=a)).text == "192.0.2.9"
    assert len(refused) == 1
    # The client that a proxy reports may itself be a proxy, which has no limit.
    assert [connections.take_forwarded(PROXY) for _ in range(10)] == [True] * 10
    assert [connections.take(PROXY) for _ in range(10)] == [True] * 10
    assert not connections.take("192.0.2.1")


@pytest.mark.parametrize("given", ["::ffff:10.0.0.1", "10.0.0.1", "::ffff:0a00:0001"])
def test_a_proxy_of_ipv4_is_one_on_a_socket_of_ipv6(given: str) -> None:
    assert given in TrustedProxies("10.0.0.0/24")
    assert given not in TrustedProxies("10.0.1.0/24, 2001:db8::/32")
    assert "::ffff:10.0.0.0/120" in TrustedProxies("10.0.0.0/24").for_uvicorn()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("*", "neither an address nor a network"),
        ("localhost", "neither an address"),
        ("10.0.0.1:8000", "neither an address"),
        ("10.0.0.1/8", "has the form 10.0.0.0/8"),
        ("http://10.0.0.1", "neither an address"),
        ("10.0.0.1 10.0.0.2", "neither an address"),
        ("0.0.0.0/0", "every address"),
        ("10.0.0.1,::/0", "every address"),
    ],
)
def test_when_a_proxy_is_none_then_the_error_says_so(given: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        TrustedProxies(given)
