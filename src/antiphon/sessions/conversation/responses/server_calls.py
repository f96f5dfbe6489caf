"""Function calls that tool servers carry out, while the conversation goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from antiphon.contracts.language import ToolServers
from antiphon.events.conversation import Item, ItemDone, Response
from antiphon.events.tools import Tool, ToolCallBegan, ToolCallEnded, ToolResult
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory

# Maximum number of responses in a row that call tools, without a turn of the user. The next one may not call any.
MAX_ROUNDS = 8
HOST_LOST = ToolResult("The server that made this call has ended, so its result is not known.", "protocol_error")
CUT_OFF = ToolResult("The user has interrupted, so this call was cancelled.", "protocol_error")


def offered(own: tuple[Tool, ...], servers: ToolServers | None) -> tuple[Tool, ...]:
    """Return the functions that a model may call: the client's `own`, and those of the tool servers.

    A server's function whose name is taken by the client gets its server's label and `__` before its name.
    """
    if servers is None:
        return own
    taken = {tool.name for tool in own}
    return own + tuple(tool.labelled() if tool.name in taken else tool for tool in servers.tools)


def together(*servers: ToolServers | None) -> ToolServers | None:
    """Return several tool servers as one; None if there are none.

    Of two functions with the same name, the later one gets its server's label and `__` before its name.
    """
    given = [each for each in servers if each]
    return _Together(given) if len(given) > 1 else next(iter(given), None)


class _Together:
    def __init__(self, servers: Sequence[ToolServers]) -> None:
        self._servers = servers

    @property
    def tools(self) -> tuple[Tool, ...]:
        tools: tuple[Tool, ...] = ()
        for each in self._servers:
            tools = offered(tools, each)
        return tools

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        # A server that has lost its tools says so itself.
        has = (each for each in self._servers if any(tool.server == server for tool in each.tools))
        return await next(has, self._servers[-1]).call(server, name, arguments)


@dataclass(eq=False, slots=True)
class _Running:
    """A call under way."""

    # The item of the call, its index in its response's output, and the response.
    item: Item
    output_index: int  # See `item`.
    response_id: str  # See `item`.
    # The result of a call that is cancelled.
    instead: ToolResult = CUT_OFF
    # Whether a response is due when the result is known.
    is_wanted: bool = True
    # Cancels the call.
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class ServerCalls:
    """The calls of one conversation that tool servers carry out. Call `open` first.

    When all calls of a response have ended, a response that has their results in its messages is due, unless the turn
    was cut off. `is_due` says so until `response_began` is called: any response that begins has them.

    - `servers`: carry out the calls. Without them, there are no calls.
    - `history`: has the items of the calls.
    - `emit`: awaited with the events of the calls.
    """

    def __init__(self, servers: ToolServers | None, history: ConversationHistory, emit: EmitConversation) -> None:
        self._servers = servers
        self._history = history
        self._emit = emit
        self._scopes: set[anyio.CancelScope] = set()
        self._running: list[_Running] = []
        # Responses with calls since the user's last turn.
        self._num_rounds = 0
        self.is_due = False

    async def open(self) -> None:
        """Fail the calls that an earlier host of the session has left without a result."""
        for item in list(self._history.items):
            if item.server and item.status == "in_progress":
                await self._end(item, 0, HOST_LOST)

    def cancel(self) -> None:
        """Cancel all calls, at the end of the session. Returns at once."""
        for scope in self._scopes:
            scope.cancel()

    @property
    def is_running(self) -> bool:
        """Whether a call has no result yet after which a response will be due."""
        return any(call.is_wanted for call in self._running)

    @property
    def may_call(self) -> bool:
        """Whether a further response may call functions. False after MAX_ROUNDS responses in a row that did."""
        return self._num_rounds < MAX_ROUNDS

    def response_began(self, *, after_calls: bool) -> None:
        """Record that a response of the conversation began, which has all results so far in its messages.

        `after_calls`: it began because of the results of calls, not because of the user or the client.
        """
        self.is_due = False
        if not after_calls:
            self._num_rounds = 0

    def cut(self, response_id: str | None = None) -> bool:
        """Record that the turn of this response was cut off, or all turns: no response is due to their calls.

        Calls that change nothing are cancelled. The others run to their end, because they may have been carried out,
        and the model reads their results later. Returns whether there were such calls.
        """
        cut = [c for c in self._running if c.is_wanted and response_id in (None, c.response_id)]
        for call in cut:
            call.is_wanted = False
            if self._is_read_only(call.item):
                call.scope.cancel()
        return bool(cut)

    def give_up(self, response_id: str, result: ToolResult) -> None:
        """Cancel the calls of a response that have no result yet, and give them this one."""
        for call in self._running:
            if call.response_id == response_id:
                call.instead = result
                call.scope.cancel()

    def _is_read_only(self, item: Item) -> bool:
        own = [tool for tool in (self._servers.tools if self._servers else ()) if tool.server == item.server]
        return any(tool.read_only for tool in own if item.name in (tool.name, tool.labelled().name))

    async def carry_out(self, response: Response) -> None:
        """Carry out the calls of a response that has ended, at the same time, and wait for all results.

        Then a response is due. Calls of a response that was cut off are not carried out.
        """
        calls = [(at, item) for at, item in enumerate(response.output) if item.server and item.status == "in_progress"]
        if response.status != "completed":
            for _, item in calls:
                item.status = "incomplete"
                await self._emit(ItemDone(item.snapshot(), self._before(item)))
            return
        if not calls:
            return
        self._num_rounds += 1
        running = [_Running(item, at, response.id) for at, item in calls]
        self._running += running
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                async with anyio.create_task_group() as group:
                    for call in running:
                        group.start_soon(self._carry_out, call)
            finally:
                self._scopes.discard(scope)
        self.is_due = self.is_due or (not scope.cancelled_caught and all(call.is_wanted for call in running))

    async def _carry_out(self, call: _Running) -> None:
        assert self._servers
        item, result = call.item, None
        try:
            await self._emit(ToolCallBegan(item.id, call.output_index))
            with call.scope:
                result = await self._servers.call(item.server, item.name, item.arguments)
        finally:
            self._running.remove(call)
        if any(other is item for other in self._history.items):
            await self._end(item, call.output_index, result or call.instead)

    async def _end(self, item: Item, output_index: int, result: ToolResult) -> None:
        at = next(at for at, other in enumerate(self._history.items) if other is item)
        later = self._history.items[at + 1 :]
        if any(not other.server for other in later):
            item.result_after = later[-1].id
        item.status, item.output, item.failure = "completed", result.text, result.failure
        await self._emit(ToolCallEnded(item.id, output_index, result.failure))
        await self._emit(ItemDone(item.snapshot(), self._before(item)))

    def _before(self, item: Item) -> str | None:
        return self._history.before(item.id) if any(other is item for other in self._history.items) else None
