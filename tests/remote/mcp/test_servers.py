"""Clients of real MCP servers, over standard input and output and over HTTP: tools, results and failures."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from antiphon.engine.schemas import check_schemas
from antiphon.errors import GrammarError
from antiphon.events.tools import Tool, ToolResult, offered
from antiphon.remote.allowed_hosts import AllowedHosts
from antiphon.remote.mcp import servers as servers_module
from antiphon.remote.mcp.config import McpServer
from antiphon.remote.mcp.servers import MAX_RESULT_CHARS, MAX_TOOLS, CheckTools, McpServers
from tests.remote.mcp.hand_made import site

ROOT = Path(__file__).parents[3]
DEMO = "tests.remote.mcp.demo_server"
TOOLS = {"add", "wait", "fail", "die", "recite", "paint", "nothing", "rename"}


async def take(_: Sequence[Tool]) -> None:
    """Accept all schemas."""


async def check_schemas_of(tools: Sequence[Tool]) -> None:
    """Accept the schemas that a grammar can be made of, as a server with the extra `talk` does."""
    check_schemas([tool.parameters for tool in tools], together=True)


def local(notes: Path | None = None, **fields: Any) -> McpServer:
    """Return a demo server that is started here."""
    args = ("-m", DEMO, "stdio", *([str(notes)] if notes else []))
    return McpServer(sys.executable, args, cwd=str(ROOT), **fields)


@contextmanager
def remote() -> Iterator[McpServer]:
    """Start a demo server that speaks HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", DEMO, str(port)], cwd=ROOT)
    try:
        yield McpServer(url=f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def running(check: CheckTools = take, **given: McpServer) -> AsyncIterator[McpServers]:
    servers = McpServers(given, check, AllowedHosts((), "--mcp-from-clients"))
    task = asyncio.create_task(servers.run())
    try:
        yield servers
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(0.01)


def names(servers: McpServers) -> set[str]:
    return {tool.name for tool in servers.tools}


def test_a_server_that_is_started_here_offers_its_tools_and_returns_results() -> None:
    async def main() -> None:
        async with running(demo=local()) as servers:
            await until(lambda: servers.tools)
            assert names(servers) == TOOLS
            tool = next(tool for tool in servers.tools if tool.name == "add")
            assert (tool.server, tool.description) == ("demo", "Add two numbers.")
            assert set(tool.parameters["properties"]) == {"a", "b"}

            async def call(name: str, arguments: str = "{}") -> ToolResult:
                return await servers.call("demo", name, arguments)

            assert await call("add", '{"a": 1, "b": 2}') == ToolResult("3")
            assert await call("nothing") == ToolResult('{"result": null}')
            assert (await call("paint")).text == "[The result also has content that is not text: image.]"
            long = (await call("recite", '{"characters": 5000000}')).text
            assert long.startswith("a" * MAX_RESULT_CHARS + "\n[The rest of the result")
            assert len(long) < MAX_RESULT_CHARS + 100
            failed = await call("fail")
            assert failed.failure == "tool_execution_error"
            assert (await call("add", "[1]")) == ToolResult("The arguments are not a JSON object.", "protocol_error")
            assert (await call("add", '{"a": "x"}')).failure == "tool_execution_error"
            assert (await call("sing")).failure in ("protocol_error", "tool_execution_error")
            assert (await servers.call("none", "add", "{}")).failure == "protocol_error"

    asyncio.run(main())


def test_a_server_over_http_that_dies_is_not_available_and_comes_back() -> None:
    async def main() -> None:
        with remote() as server, mock.patch.object(servers_module, "FIRST_RETRY_S", 0.05):
            async with running(demo=server) as servers:
                await until(lambda: servers.tools)
                assert await servers.call("demo", "add", '{"a": 1, "b": 2}') == ToolResult("3")
                died = await servers.call("demo", "die", "{}")
                assert died.failure in ("http_error", "protocol_error")
                await until(lambda: not servers.tools)
                lost = await servers.call("demo", "add", '{"a": 1, "b": 2}')
                assert lost.failure == "http_error"
                assert "cannot be reached" in lost.text

    asyncio.run(main())


def test_a_server_that_is_started_here_is_started_again_when_it_dies() -> None:
    async def main() -> None:
        with mock.patch.object(servers_module, "FIRST_RETRY_S", 0.05):
            async with running(demo=local()) as servers:
                await until(lambda: servers.tools)
                assert (await servers.call("demo", "die", "{}")).failure
                await until(lambda: not servers.tools)
                await until(lambda: servers.tools)
                assert await servers.call("demo", "add", '{"a": 1, "b": 2}') == ToolResult("3")

    asyncio.run(main())


def test_a_call_that_takes_too_long_and_one_whose_caller_leaves_are_cancelled_at_the_server(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    async def main() -> None:
        async with running(demo=local(notes, timeout_s=0.2)) as servers:
            await until(lambda: servers.tools)
            late = await servers.call("demo", "wait", '{"seconds": 60}')
            assert late == ToolResult("The tool did not answer within 0.2 s.", "protocol_error")
            await until(notes.exists)
            notes.unlink()
        async with running(demo=local(notes)) as servers:
            await until(lambda: servers.tools)
            call = asyncio.create_task(servers.call("demo", "wait", '{"seconds": 60}'))
            await asyncio.sleep(0.2)
            call.cancel()
            await until(notes.exists)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_when_a_server_changes_its_list_then_the_tools_change(kind: str) -> None:
    async def main(server: McpServer) -> None:
        async with running(demo=server) as servers:
            await until(lambda: servers.tools)
            assert await servers.call("demo", "rename", "{}") == ToolResult("renamed")
            await until(lambda: "sum" in names(servers))
            assert "add" not in names(servers)

    if kind == "stdio":
        asyncio.run(main(local()))
    else:
        with remote() as server:
            asyncio.run(main(server))


def test_chosen_tools_only_and_names_of_two_servers_with_their_labels() -> None:
    async def main() -> None:
        async with running(one=local(tools=("add", "wait")), two=local(tools=("add",))) as servers:
            await until(lambda: len(servers.tools) == 3)
            assert [tool.name for tool in offered((), servers.tools)] == ["one__add", "wait", "two__add"]
            assert await servers.call("two", "two__add", '{"a": 1, "b": 2}') == ToolResult("3")

    asyncio.run(main())


def test_a_tool_whose_schema_cannot_be_enforced_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def check(tools: Sequence[Tool]) -> None:
        for index, tool in enumerate(tools):
            if tool.name == "wait":
                raise GrammarError("it is too large", index)

    async def main() -> None:
        async with running(check, demo=local()) as servers:
            await until(lambda: servers.tools)
            assert names(servers) == TOOLS - {"wait"}

    asyncio.run(main())
    assert "the tool wait of the MCP server demo is left out: it is too large" in caplog.text


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (McpServer("no-such-program-here"), "No such file"),
        (McpServer(sys.executable, ("-c", "pass")), "onnection closed"),
        (McpServer(url="http://127.0.0.1:9/mcp"), "connect"),
    ],
)
def test_a_server_that_does_not_start_is_named_once(
    server: McpServer, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with mock.patch.object(servers_module, "FIRST_RETRY_S", 0.01):
            async with running(demo=server) as servers:
                connection = servers.connections["demo"]
                await until(lambda: says in connection.problem)
                await asyncio.sleep(0.1)
                assert servers.tools == ()

    asyncio.run(main())
    assert caplog.text.count("the MCP server demo is not available") == 1


def test_of_many_tools_the_first_are_offered(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with mock.patch.object(servers_module, "MAX_TOOLS", 3):
            async with running(demo=local()) as servers:
                await until(lambda: servers.tools)
                assert len(servers.tools) == 3

    asyncio.run(main())
    assert "the MCP server demo has 8 tools, of which the first 3 are used" in caplog.text


# --- servers that break the rules -------------------------------------------------------------------------------------


def broken(mode: str, **fields: Any) -> McpServer:
    """Return a server that breaks the rules in some way, started here."""
    return McpServer(sys.executable, ("-m", "tests.remote.mcp.hand_made", mode), cwd=str(ROOT), **fields)


def test_a_server_with_500_tools_offers_the_first_64(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(many=broken("many")) as servers:
            await until(lambda: servers.tools)
            assert [tool.name for tool in servers.tools] == [f"tool_{number}" for number in range(MAX_TOOLS)]

    asyncio.run(main())
    assert "the MCP server many has 500 tools, of which the first 64 are used" in caplog.text


@pytest.mark.parametrize("mode", ["endless", "twice"])
def test_a_list_without_an_end_and_a_tool_that_is_listed_twice_give_one_tool(mode: str) -> None:
    async def main() -> None:
        async with running(odd=broken(mode)) as servers:
            await until(lambda: servers.tools)
            assert [(tool.name, tool.description) for tool in servers.tools] == [("echo", "The tool echo.")]

    asyncio.run(main())


def test_a_server_that_answers_nothing_does_not_delay_another(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with mock.patch.object(servers_module, "CONNECT_S", 0.3):
            async with running(silent=broken("silent"), plain=broken("plain")) as servers:
                assert not await servers.connections["silent"].listed()
                assert await servers.connections["plain"].listed()
                lost = await servers.call("silent", "echo", "{}")
                assert lost.failure == "http_error"

    asyncio.run(main())
    assert "the MCP server silent is not available" in caplog.text


@pytest.mark.parametrize("mode", ["hanging", "other_id"])
def test_a_call_without_an_answer_of_its_own_ends_after_its_time_limit(mode: str) -> None:
    async def main() -> None:
        async with running(odd=broken(mode, timeout_s=0.3)) as servers:
            await until(lambda: servers.tools)
            late = await servers.call("odd", "echo", "{}")
            assert late == ToolResult("The tool did not answer within 0.3 s.", "protocol_error")
            # Other calls go on.
            assert servers.tools
            assert servers.counts["odd"].failures == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "result"),
    [
        ("empty", ToolResult("The tool returned nothing.")),
        ("picture", ToolResult("A picture.\n[The result also has content that is not text: image.]")),
        ("error", ToolResult("It is broken.", "protocol_error")),
    ],
)
def test_results_without_text_and_errors_become_texts(mode: str, result: ToolResult) -> None:
    async def main() -> None:
        async with running(odd=broken(mode)) as servers:
            await until(lambda: servers.tools)
            assert await servers.call("odd", "echo", "{}") == result

    asyncio.run(main())


def test_a_result_of_another_form_is_a_failure_and_the_server_goes_on() -> None:
    async def main() -> None:
        async with running(odd=broken("wrong_form")) as servers:
            await until(lambda: servers.tools)
            assert (await servers.call("odd", "echo", "{}")).failure
            await until(lambda: servers.tools)

    asyncio.run(main())


def test_five_megabytes_over_http_are_cut() -> None:
    async def main(url: str) -> None:
        async with running(large=McpServer(url=url)) as servers:
            await until(lambda: servers.tools)
            text = (await servers.call("large", "echo", "{}")).text
            assert text.startswith("a" * MAX_RESULT_CHARS + "\n[The rest of the result")

    with site("large") as made:
        asyncio.run(main(made.url))


def test_a_schema_that_no_call_can_be_held_to_leaves_its_tool_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(check_schemas_of, odd=broken("schemas")) as servers:
            await until(lambda: servers.tools)
            assert names(servers) == {"echo"}

    asyncio.run(main())
    assert "the tool wrong of the MCP server odd is left out" in caplog.text


def test_a_tool_without_a_schema_makes_its_server_unavailable_and_no_other() -> None:
    async def main() -> None:
        async with running(odd=broken("no_schema"), plain=broken("plain")) as servers:
            assert not await servers.connections["odd"].listed()
            await until(lambda: servers.tools)
            assert [tool.server for tool in servers.tools] == ["plain"]

    asyncio.run(main())


@pytest.mark.parametrize(("approval", "asks"), [(True, {"echo", "delete"}), (("delete",), {"delete"}), (False, set())])
def test_the_operator_says_which_calls_need_an_approval(approval: bool | tuple[str, ...], asks: set[str]) -> None:
    async def main() -> None:
        async with running(odd=broken("delete", approval=approval)) as servers:
            await until(lambda: servers.tools)
            assert {tool.name for tool in servers.tools if tool.needs_approval} == asks
            assert {tool.name for tool in servers.tools if tool.read_only} == {"echo"}

    asyncio.run(main())
