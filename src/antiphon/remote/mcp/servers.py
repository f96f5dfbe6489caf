"""The MCP servers of one process: one client for each, shared by all sessions, and connected again when it is lost."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from antiphon.errors import GrammarError
from antiphon.events.tools import Tool, ToolResult
from antiphon.remote.mcp.config import McpServer

if TYPE_CHECKING:
    from mcp.client import Client
    from mcp_types import CallToolResult

log = logging.getLogger(__name__)
# Raises GrammarError for the first tool, by its index, to whose schema a model's calls cannot be held.
CheckTools = Callable[[Sequence[Tool]], Awaitable[None]]
# Seconds in which a server has to be connected and to list its tools.
CONNECT_S = 30.0
# Seconds until a lost server is connected again. They double with each failure, up to the second value.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
# Seconds after which a server's tools are listed again. This also finds a server that was lost.
RELIST_S = 60.0
# Maximum number of tools of one server. Each is part of every prompt.
MAX_TOOLS, MAX_PAGES = 64, 20
# Maximum number of characters of a result.
MAX_RESULT_CHARS = 20_000


class McpConnection:
    """The client of one MCP server. Run `run` as a task.

    - `label`: the server's name in the settings.
    - `check`: called with the server's tools. Those that it refuses are left out.
    - `on_change`: called when `tools` has changed.

    `tools` has the tools that the server offers, with their own names. It is empty while the server is not connected.
    """

    def __init__(
        self, label: str, server: McpServer, check: CheckTools, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.label, self.server = label, server
        self.tools: tuple[Tool, ...] = ()
        # Why the server is not connected; "" while it is.
        self.problem = "it is not connected yet"
        self._check = check
        self._on_change = on_change
        self._client: Client | None = None
        # The tools as the server listed them last; None while it is not connected.
        self._listed: tuple[Tool, ...] | None = None
        # Set when the list may have changed, or the server may be lost.
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Connect to the server, and connect again whenever it is lost, until cancelled. Failures are logged once."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with self._connected() as client:
                    await self._list(client)
                    retry_s = FIRST_RETRY_S
                    await self._keep_listed(client)
            except Exception as error:  # The library raises the errors of its transports as they are, and in groups.
                self._lose(_reason(error))
            await anyio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result. Raises nothing. `arguments`: JSON text."""
        from mcp.shared.exceptions import MCPError

        if (client := self._client) is None:
            return ToolResult(f"The server of this tool cannot be reached: {self.problem}.", "http_error")
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return ToolResult("The arguments are not a JSON object.", "protocol_error")
        try:
            with anyio.fail_after(self.server.timeout_s):
                return _result(await client.call_tool(name, given))
        except TimeoutError:
            return ToolResult(f"The tool did not answer within {self.server.timeout_s:g} s.", "protocol_error")
        except MCPError as error:
            # Whether the server is lost shows when its tools are listed.
            self._changed.set()
            return ToolResult(str(error), "protocol_error")
        except Exception as error:  # As in `run`.
            self._changed.set()
            return ToolResult(_reason(error), "http_error")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        connect = partial(Client, message_handler=self._message, cache=None, read_timeout_seconds=CONNECT_S)
        server = self.server
        if server.command:
            program = StdioServerParameters(
                command=server.command, args=list(server.args), env=server.env or None, cwd=server.cwd
            )
            async with connect(program) as client:
                yield client
        else:
            async with (
                create_mcp_http_client(server.headers) as http,
                connect(streamable_http_client(server.url, http_client=http)) as client,
            ):
                yield client

    async def _message(self, message: object) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._changed.set()

    async def _keep_listed(self, client: Client) -> None:
        """List the tools again whenever they change, and after each RELIST_S. Raises what a lost server causes."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen, client)
            while True:
                with anyio.move_on_after(RELIST_S):
                    await self._changed.wait()
                self._changed = anyio.Event()
                await self._list(client)

    async def _listen(self, client: Client) -> None:
        """Notice changes of the list at a server of the protocol of 2026, which sends them only to whom asks."""
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
        from mcp.shared.exceptions import MCPError

        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._changed.set()
        except (ListenNotSupportedError, SubscriptionLost, MCPError, TimeoutError):
            # The list is read again after RELIST_S all the same.
            return

    async def _list(self, client: Client) -> None:
        listed, cursor = dict[str, Tool](), None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if self.server.tools is None or tool.name in self.server.tools:
                    # Of two tools with the same name, the first one counts.
                    reads = bool(tool.annotations and tool.annotations.read_only_hint)
                    own = Tool(tool.name, tool.description or "", tool.input_schema, self.label, reads)
                    listed.setdefault(tool.name, own)
            if not (cursor := page.next_cursor):
                break
        self._client, self.problem = client, ""
        if (tools := tuple(listed.values())) == self._listed:
            return
        self._listed = tools
        if len(tools) > MAX_TOOLS:
            message = (
                "the MCP server %s has %d tools, of which the first %d are used: choose with `tools` in its settings"
            )
            log.warning(message, self.label, len(tools), MAX_TOOLS)
        tools = await self._usable(tools[:MAX_TOOLS])
        log.info("the MCP server %s offers %d tools", self.label, len(tools))
        self._offer(tools)

    async def _usable(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools whose schemas a model's calls can be held to. Logs the others."""
        left = list(tools)
        while left:
            try:
                await self._check(left)
                break
            except GrammarError as error:
                tool = left.pop(min(error.index, len(left) - 1))
                log.warning("the tool %s of the MCP server %s is left out: %s", tool.name, self.label, error)
        return tuple(left)

    def _lose(self, reason: str) -> None:
        if reason != self.problem:
            log.warning("the MCP server %s is not available: %s", self.label, reason)
        self._client, self.problem, self._listed = None, reason, None
        self._offer(())

    def _offer(self, tools: tuple[Tool, ...]) -> None:
        if tools != self.tools:
            self.tools = tools
            self._on_change()


class McpServers:
    """All MCP servers of one process, as ToolServers (contracts/language.py). Run `run` as a task.

    If two servers have a tool of the same name, both tools get their server's label and `__` before their name.
    """

    def __init__(self, servers: Mapping[str, McpServer], check: CheckTools) -> None:
        self._tools: tuple[Tool, ...] = ()
        self.connections = {
            label: McpConnection(label, server, check, self._collect) for label, server in servers.items()
        }

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the servers offer now, each with the label of its server."""
        return self._tools

    async def run(self) -> None:
        """Keep all servers connected, until cancelled."""
        async with anyio.create_task_group() as group:
            for connection in self.connections.values():
                group.start_soon(connection.run)

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result, see ToolServers."""
        connection = self.connections.get(server)
        if connection is None:
            return ToolResult(f"There is no tool server named {server} any more.", "protocol_error")
        own = {tool.name for tool in connection.tools}
        return await connection.call(name if name in own else name.removeprefix(f"{server}__"), arguments)

    def _collect(self) -> None:
        offered = [tool for connection in self.connections.values() for tool in connection.tools]
        names = [tool.name for tool in offered]
        self._tools = tuple(tool if names.count(tool.name) == 1 else tool.labelled() for tool in offered)


def _result(made: CallToolResult) -> ToolResult:
    """Return a result as text: its texts, or else its structured content as JSON."""
    texts = [text for part in made.content if isinstance(text := getattr(part, "text", None), str)]
    text = "\n".join(texts)
    if not text and made.structured_content is not None:
        text = json.dumps(made.structured_content, ensure_ascii=False)
    others = sorted({part.type for part in made.content if part.type != "text"})
    if others:
        text += f"\n[The result also has content that is not text: {', '.join(others)}.]"
    if len(text) > MAX_RESULT_CHARS:
        cut = f"[The rest of the result, {len(text) - MAX_RESULT_CHARS} characters, is cut off.]"
        text = f"{text[:MAX_RESULT_CHARS]}\n{cut}"
    return ToolResult(text.strip() or "The tool returned nothing.", "tool_execution_error" if made.is_error else "")


def _reason(error: BaseException) -> str:
    """Return the first cause of an error, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
