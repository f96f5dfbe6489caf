"""MCP servers at URLs of clients: only allowed addresses are connected to, whatever a name or a redirect says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

from antiphon.events.tools import NamedServer, Tool, ToolResult
from antiphon.remote.allowed_hosts import AllowedHosts
from antiphon.remote.mcp import guarded
from antiphon.remote.mcp.guarded import guarded_client
from antiphon.remote.mcp.servers import OF_CLIENTS, McpServers
from tests.remote.mcp.hand_made import Site, site

SECRET = {"Authorization": "Bearer s3cret"}


async def take(_: Sequence[Tool]) -> None:
    """Accept all schemas."""


@pytest.fixture
def theirs() -> Iterator[Site]:
    with site("plain") as made:
        yield made


def allowing(*hosts: str) -> AllowedHosts:
    return AllowedHosts(hosts, "--mcp-from-clients")


def listed(hosts: AllowedHosts, url: str, name: str = "theirs") -> tuple[bool, str]:
    """Connect to a client's server. Return whether its tools are known, and why not."""

    async def main() -> tuple[bool, str]:
        connection = McpServers({}, take, hosts).connection(NamedServer(name, url, SECRET))
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(20):
            is_known = await connection.listed()
        task.cancel()
        await asyncio.wait([task])
        return is_known, connection.problem

    return asyncio.run(main())


def get(hosts: AllowedHosts, url: str) -> int:
    async def main() -> int:
        async with guarded_client({}, hosts) as client:
            return (await client.post(url, json={})).status_code

    return asyncio.run(main())


def test_a_listed_server_is_connected_gets_the_headers_and_carries_out_calls(theirs: Site) -> None:
    async def main() -> None:
        servers = McpServers({}, take, allowing(f"127.0.0.1:{theirs.port}"))
        connection = servers.connection(NamedServer("theirs", theirs.url, SECRET))
        task = asyncio.create_task(connection.run())
        assert await connection.listed()
        assert [tool.name for tool in connection.tools] == ["echo"]
        assert await connection.call("echo", '{"text": "x"}') == ToolResult('echo {"text": "x"}')
        assert (servers.counts[OF_CLIENTS].calls, servers.counts[OF_CLIENTS].failures) == (1, 0)
        # The operator's tools do not have those of clients.
        assert servers.tools == ()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert {headers["authorization"] for _, headers in theirs.requests} == {"Bearer s3cret"}
    assert {headers["host"] for _, headers in theirs.requests} == {f"127.0.0.1:{theirs.port}"}


@pytest.mark.parametrize("entries", [(), ("*",), ("tools.example",), ("127.0.0.1:9",)])
def test_a_private_address_that_is_not_listed_gets_no_request(theirs: Site, entries: tuple[str, ...]) -> None:
    is_known, why = listed(allowing(*entries), theirs.url)
    assert not is_known
    assert "is not among" in why or "no public address" in why
    assert theirs.requests == []


def test_a_name_that_resolves_to_a_private_address_gets_no_request(
    theirs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"http://tools.example:{theirs.port}/mcp"
    assert listed(allowing(f"tools.example:{theirs.port}"), url) == (False, "its host has no public address")
    assert theirs.requests == []


def test_when_a_name_resolves_to_another_address_at_the_next_request_then_that_is_checked_too(
    theirs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, resolved = theirs.port, list[str]()
    hosts = allowing(f"tools.example:{port}", f"127.0.0.1:{port}")

    def resolve(host: str, port: int, **kwargs: Any) -> list[Any]:
        address = "10.0.0.1" if host == "tools.example" and resolved else "127.0.0.1"
        if host == "tools.example":
            resolved.append(address)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def main() -> None:
        async with guarded_client(SECRET, hosts) as client:
            url = f"http://tools.example:{port}/mcp"
            assert (await client.post(url, json={})).status_code == 202
            with pytest.raises(httpx2.ConnectError, match="no public address"):
                await client.post(url, json={})

    asyncio.run(main())
    assert resolved == ["127.0.0.1", "10.0.0.1"]
    # The server sees the name, not the address.
    assert [headers["host"] for _, headers in theirs.requests] == [f"tools.example:{port}"]


def test_a_redirect_to_another_host_is_not_followed_and_its_headers_do_not_leave(theirs: Site) -> None:
    with site("plain") as other:
        theirs.redirects_to = other.url
        is_known, why = listed(allowing(f"127.0.0.1:{theirs.port}", f"127.0.0.1:{other.port}"), theirs.url)
        assert not is_known
        assert "not followed" in why
        assert other.requests == []


def test_a_redirect_within_the_host_is_followed(theirs: Site) -> None:
    async def main() -> None:
        servers = McpServers({}, take, allowing(f"127.0.0.1:{theirs.port}"))
        theirs.redirects_to = "/mcp/"
        connection = servers.connection(NamedServer("theirs", theirs.url))
        task = asyncio.create_task(connection.run())
        async with asyncio.timeout(20):
            while not any(path == "/mcp/" for path, _ in theirs.requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_no_proxy_is_used(theirs: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", theirs.url)
    monkeypatch.setenv("ALL_PROXY", theirs.url)
    with site("plain") as other:
        assert get(allowing(f"127.0.0.1:{other.port}"), other.url) == 202
    assert theirs.requests == []


def test_a_large_answer_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "MAX_ANSWER_BYTES", 1000)

    async def main(made: Site) -> None:
        async with guarded_client({}, allowing(f"127.0.0.1:{made.port}")) as client:
            with pytest.raises(httpx2.ReadError, match="too large"):
                await client.post(made.url, json={"id": 1, "method": "tools/call", "params": {"name": "echo"}})

    with site("large") as made:
        asyncio.run(main(made))


def test_a_host_that_lacks_the_setting_does_not_connect_to_the_server_of_a_session_that_moved() -> None:
    with site("plain") as made:
        assert listed(allowing(), made.url)[0] is False
        assert made.requests == []
    # Nor does it know the operator's server of another host.
    is_known, why = listed(allowing(), "", "files")
    assert (is_known, why) == (False, "it is not among the servers of this host")
