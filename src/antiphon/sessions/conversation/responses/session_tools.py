"""The tools of one conversation that tool servers carry out: the operator's, and those that its client names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.abc

from antiphon.contracts.language import ToolConnection, ToolServers
from antiphon.events.conversation import ConversationConfig, CreateResponse, Item, ItemAdded, ItemDone
from antiphon.events.tools import OWN_LABELS, NamedServer, Tool, ToolListBegan, ToolListEnded, ToolResult, offered
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory


def together(*servers: ToolServers | None) -> ToolServers | None:
    """Return several tool servers as one; None if there are none. The last of them connects to named servers."""
    given = [each for each in servers if each]
    return _Together(given) if len(given) > 1 else next(iter(given), None)


class _Together:
    def __init__(self, servers: Sequence[ToolServers]) -> None:
        self._servers = servers

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(tool for each in self._servers for tool in each.tools)

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        # A server that has lost its tools says so itself.
        has = (each for each in self._servers if any(tool.server == server for tool in each.tools))
        return await next(has, self._servers[-1]).call(server, name, arguments)

    def connection(self, server: NamedServer) -> ToolConnection:
        return self._servers[-1].connection(server)


class SessionTools:
    """The tool servers of one conversation. Call `open` first.

    When the client names a server, its tools become an item of the history. A server at a URL of the client's is
    connected until the client names it no more, or until the conversation ends.

    - `servers`: the operator's tool servers, which also connect to the client's. If None, there are no tools.
    - `history`: gets the items.
    - `emit`: awaited with the events of the items.
    - `new_id`: returns a fresh id that begins with the given prefix.
    """

    def __init__(
        self,
        servers: ToolServers | None,
        history: ConversationHistory,
        emit: EmitConversation,
        new_id: Callable[[str], str],
    ) -> None:
        self._servers = servers
        self._history = history
        self._emit = emit
        self._new_id = new_id
        self._named: tuple[NamedServer, ...] = ()
        # The connections to the client's servers by their labels, and the scopes of the tasks for named servers.
        self._own: dict[str, ToolConnection] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        # The labels of the servers that need not be listed.
        self._listed: set[str] = set()
        self._group: anyio.abc.TaskGroup | None = None

    def open(self, group: anyio.abc.TaskGroup, named: Sequence[NamedServer]) -> None:
        """Begin to list the tools of the servers that the client has named. Servers are connected by tasks of `group`.

        Servers whose tools the history has, because the session was on another host, are connected and not listed.
        """
        self._group = group
        items = self._history.items
        self._listed = {item.server for item in items if item.kind == "tool_list" and item.status == "completed"}
        self.choose(named)
        self._listed = set()

    def choose(self, named: Sequence[NamedServer]) -> None:
        """Begin to list the tools of the servers that are new among `named`, and disconnect the others."""
        before, self._named = self._named, tuple(named)
        for server in before:
            if server not in self._named:
                self._own.pop(server.label, None)
                if scope := self._scopes.pop(server.label, None):
                    scope.cancel()
        assert self._group
        for server in self._named:
            if server not in before and self._servers:
                connection = self._servers.connection(server)
                scope = self._scopes[server.label] = anyio.CancelScope()
                if server.url:
                    self._own[server.label] = connection
                lists = server.label not in self._listed
                self._group.start_soon(self._follow, server, connection, scope, lists)

    def close(self) -> None:
        """Disconnect the client's servers, at the end of the session. Returns at once."""
        for scope in self._scopes.values():
            scope.cancel()

    async def _follow(
        self, server: NamedServer, connection: ToolConnection, scope: anyio.CancelScope, lists: bool
    ) -> None:
        """List a server's tools if `lists`. Keep it connected until `scope` is cancelled, if it is the client's."""
        with scope:
            async with anyio.create_task_group() as group:
                if server.url:
                    group.start_soon(connection.run)
                if lists:
                    await self._list(server, connection)

    async def _list(self, server: NamedServer, connection: ToolConnection) -> None:
        item = Item(self._new_id("item_"), "tool_list", "system", "in_progress", server=server.label)
        previous = self._history.add(item)
        await self._emit(ItemAdded(item.snapshot(), previous))
        await self._emit(ToolListBegan(item.id))
        is_known = await connection.listed()
        item.status, item.tools = "completed" if is_known else "incomplete", server.chosen(connection.tools)
        await self._emit(ToolListEnded(item.id, failed=not is_known))
        if any(other is item for other in self._history.items):
            await self._emit(ItemDone(item.snapshot(), self._history.before(item.id)))

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result, see ToolServers."""
        if connection := self._own.get(server):
            return await connection.call(name.removeprefix(f"{server}__"), arguments)
        if self._servers:
            return await self._servers.call(server, name, arguments)
        return ToolResult(f"There is no tool server named {server} any more.", "protocol_error")

    def is_read_only(self, server: str, name: str) -> bool:
        """Whether a call of a tool changes nothing, according to its server."""
        name = name.removeprefix(f"{server}__")
        return any(tool.read_only for tool in self._all() if (tool.server, tool.own_name) == (server, name))

    def of_config(self, config: ConversationConfig) -> tuple[Tool, ...]:
        """Return the functions that a model may call according to a configuration.

        A client that does not name the operator's servers cannot be expected to approve calls. It gets no functions of
        theirs that need an approval. Functions of OWN_LABELS belong to every session.
        """
        found = self._of(config.servers)
        names_none = all(server.url for server in config.servers)
        found += [
            tool
            for tool in (self._servers.tools if self._servers else ())
            if tool.server in OWN_LABELS or (names_none and not tool.needs_approval)
        ]
        return offered(config.tools, found)

    def of_request(self, command: CreateResponse, config: ConversationConfig) -> tuple[Tool, ...] | None:
        """Return the functions that a model may call according to a request; None: those of the configuration."""
        if command.tools is None:
            return None
        of_session = {server.label: self._of([server]) for server in config.servers}
        found = [
            tool
            for server in command.servers
            for tool in server.chosen(of_session.get(server.label) or self._of([server]))
        ]
        return offered(command.tools, found)

    def _of(self, named: Sequence[NamedServer]) -> list[Tool]:
        return [tool for server in named for tool in server.chosen(self._all())]

    def _all(self) -> list[Tool]:
        tools = [*self._servers.tools] if self._servers else []
        return tools + [tool for connection in self._own.values() for tool in connection.tools]
