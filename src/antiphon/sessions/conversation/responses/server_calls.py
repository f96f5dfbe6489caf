"""Function calls that tool servers carry out, while the conversation goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import Item, ItemAdded, ItemDone, Response
from antiphon.events.tools import ToolCallBegan, ToolCallEnded, ToolResult
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.session_tools import SessionTools

# Maximum number of responses in a row that call tools, without a turn of the user. The next one may not call any.
MAX_ROUNDS = 8
NOT_APPROVED = "The user did not approve this call, so it was not made."
HOST_LOST = ToolResult("The server that made this call has ended, so its result is not known.", "protocol_error")
CUT_OFF = ToolResult("The user has interrupted, so this call was cancelled.", "protocol_error")


@dataclass(eq=False, slots=True)
class _Running:
    """A call under way."""

    # The call.
    item: Item
    # Its index in the output of its response.
    output_index: int
    # The id of the response; "" for a call that was approved.
    response_id: str
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

    - `tools`: carries out the calls.
    - `history`: has the items of the calls.
    - `emit`: awaited with the events of the calls.
    - `new_id`: returns a fresh id that begins with the given prefix.
    """

    def __init__(
        self, tools: SessionTools, history: ConversationHistory, emit: EmitConversation, new_id: Callable[[str], str]
    ) -> None:
        self._tools = tools
        self._history = history
        self._emit = emit
        self._new_id = new_id
        self._scopes: set[anyio.CancelScope] = set()
        self._running: list[_Running] = []
        # Responses with calls since the user's last turn.
        self._num_rounds = 0
        self.is_due = False

    async def open(self) -> None:
        """Fail the calls that an earlier host of the session has left without a result."""
        for item in list(self._history.items):
            if _is_call(item):
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
    def awaits_approval(self) -> bool:
        """Whether a call waits until the client approves or declines it."""
        return any(item.needs_approval and item.status == "in_progress" for item in self._history.items)

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
            if self._tools.is_read_only(call.item.server, call.item.name):
                call.scope.cancel()
        return bool(cut)

    def give_up(self, response_id: str, result: ToolResult) -> None:
        """Cancel the calls of a response that have no result yet, and give them this one."""
        for call in self._running:
            if call.response_id == response_id:
                call.instead = result
                call.scope.cancel()

    async def carry_out(self, response: Response) -> None:
        """Carry out the calls of a response that has ended, at the same time, and wait for all results.

        Then a response is due. Calls of a response that was cut off are not carried out, nor can they be approved.
        """
        calls = [(at, item) for at, item in enumerate(response.output) if _is_call(item)]
        if response.status != "completed":
            for item in response.output:
                if item.needs_approval and item.status == "in_progress":
                    item.status = "incomplete"
            for _, item in calls:
                item.status = "incomplete"
                await self._emit(ItemDone(item.snapshot(), self._before(item)))
            return
        await self._carry_out_all([_Running(item, at, response.id) for at, item in calls])

    def check_answer(self, answer: Item) -> None:
        """Raise RemoteProtocolError if the call that an `approval` is for does not wait for one."""
        self._request(answer.approval_id)

    def answer(self, answer: Item) -> Item | None:
        """Record the client's answer to a request, which is an `approval` in the history. Return the call to `make`;
        None if it is not approved, so that a response is due.
        """
        request = self._request(answer.approval_id)
        if not answer.approves:
            text = f"{NOT_APPROVED} {answer.output}".strip()
            self._set_result(request, ToolResult(text))
            self.is_due = True
            return None
        request.status = "incomplete"
        return Item(
            self._new_id("item_"),
            "function_call",
            "assistant",
            "in_progress",
            call_id=request.call_id,
            name=request.name,
            arguments=request.arguments,
            server=request.server,
            approval_id=request.id,
        )

    async def make(self, call: Item) -> None:
        """Carry out a call that was approved, and wait for its result. Then a response is due."""
        previous = self._history.add(call)
        await self._emit(ItemAdded(call.snapshot(), previous))
        await self._carry_out_all([_Running(call, 0, "")])

    def _request(self, item_id: str) -> Item:
        for item in self._history.items:
            if item.id == item_id and item.needs_approval and item.status == "in_progress":
                return item
        message = f"No call waits for an approval with the id '{item_id}'."
        raise RemoteProtocolError("invalid_value", message, "item.approval_request_id")

    async def _carry_out_all(self, calls: Sequence[_Running]) -> None:
        """Carry out calls at the same time, and wait for all results."""
        if not calls:
            return
        self._num_rounds += 1
        self._running += calls
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                async with anyio.create_task_group() as group:
                    for call in calls:
                        group.start_soon(self._carry_out, call)
            finally:
                self._scopes.discard(scope)
        self.is_due = self.is_due or (not scope.cancelled_caught and all(call.is_wanted for call in calls))

    async def _carry_out(self, call: _Running) -> None:
        item, result = call.item, None
        try:
            await self._emit(ToolCallBegan(item.id, call.output_index))
            with call.scope:
                result = await self._tools.call(item.server, item.name, item.arguments)
        finally:
            self._running.remove(call)
        if any(other is item for other in self._history.items):
            await self._end(item, call.output_index, result or call.instead)

    async def _end(self, item: Item, output_index: int, result: ToolResult) -> None:
        self._set_result(item, result)
        await self._emit(ToolCallEnded(item.id, output_index, result.failure))
        await self._emit(ItemDone(item.snapshot(), self._before(item)))

    def _set_result(self, item: Item, result: ToolResult) -> None:
        at = next(at for at, other in enumerate(self._history.items) if other is item)
        later = self._history.items[at + 1 :]
        if any(not other.server and other.kind != "approval" for other in later):
            item.result_after = later[-1].id
        item.status, item.output, item.failure = "completed", result.text, result.failure

    def _before(self, item: Item) -> str | None:
        return self._history.before(item.id) if any(other is item for other in self._history.items) else None


def _is_call(item: Item) -> bool:
    """Whether an item is a call that a tool server still has to carry out."""
    is_open = item.kind == "function_call" and item.status == "in_progress"
    return is_open and bool(item.server) and not item.needs_approval
