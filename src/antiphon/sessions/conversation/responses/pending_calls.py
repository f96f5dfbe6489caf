"""What a conversation does until the results of a response's calls are known: fillers, deadlines, and cut turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from antiphon.events.conversation import Item, ItemAdded, ItemDone, Response
from antiphon.events.tools import OWN_LABELS, CallOptions, ToolResult
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.server_calls import ServerCalls

# Begins a filler: its text, or "" if the model is to word it, and the calls whose results are waited for.
SayFiller = Callable[[str, Sequence[Item]], None]


@dataclass(eq=False, slots=True)
class _Awaited:
    """The calls of a response that the client has not answered, by their ids. `scope` ends the waiting.

    `holds`: no response is due before.
    """

    response_id: str
    call_ids: set[str]
    holds: bool
    is_complete: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class PendingCalls:
    """The calls of one conversation whose results are not known yet: those of tool servers, and the client's.

    - `server`: carries out the calls of tool servers. Its `is_due` is set when a response to results is due.
    - `history`, `emit`: have the items of the calls, and get the events about them.
    - `new_id`: returns a fresh id that begins with the given prefix.
    - `say`: called when a filler is due. It need not say it, for instance because somebody speaks.
    """

    def __init__(
        self,
        server: ServerCalls,
        history: ConversationHistory,
        emit: EmitConversation,
        new_id: Callable[[str], str],
        say: SayFiller,
    ) -> None:
        self._server = server
        self._history = history
        self._emit = emit
        self._new_id = new_id
        self._say = say
        self._awaited: list[_Awaited] = []
        self._num_fillers = 0

    @property
    def is_due(self) -> bool:
        """Whether a response to results is due."""
        return self._server.is_due and not any(awaited.holds for awaited in self._awaited)

    def left_over(self) -> Response | None:
        """Return a response with the calls that the client of a restored session has not answered, if the user has said
        nothing since; else None.
        """
        answered = {item.call_id for item in self._history.items if item.kind == "function_call_output"}
        items = list(self._history.items)
        newest = max((at for at, item in enumerate(items) if item.role == "user" and item.kind == "message"), default=0)
        calls = [
            item
            for item in items[newest:]
            if item.kind == "function_call" and not item.server and item.call_id not in answered
        ]
        return Response("", True, None, None, status="completed", output=calls) if calls else None

    def cancel(self) -> None:
        """Cancel all calls, at the end of the session. Returns at once."""
        self._server.cancel()
        for awaited in self._awaited:
            awaited.scope.cancel()

    def answered(self, call_id: str) -> None:
        """Record that the client has returned the result of a call. It is in the history."""
        for awaited in self._awaited:
            awaited.call_ids.discard(call_id)
            if not awaited.call_ids:
                awaited.is_complete.set()

    def cut(self, response_id: str | None = None) -> bool:
        """Record that the turn of this response was cut off, or all turns; see `ServerCalls.cut`. Returns whether
        results were waited for.
        """
        cut = [awaited for awaited in self._awaited if response_id in (None, awaited.response_id)]
        for awaited in cut:
            awaited.scope.cancel()
        return self._server.cut(response_id) or bool(cut)

    async def wait(self, response: Response, options: CallOptions, *, of_client: bool) -> None:
        """Carry out the calls of a response that has ended, and wait until all results are known.

        `of_client`: also wait for the results of the client's functions.
        """
        calls = [item for item in response.output if item.kind == "function_call" and (item.server or of_client)]
        if response.status != "completed" or not calls:
            await self._server.carry_out(response)
            return
        async with anyio.create_task_group() as meanwhile:
            # The server's own functions are quick, or wait until the last words were heard.
            slow = [item for item in calls if item.server not in OWN_LABELS]
            if options.has_fillers and slow and not any(item.kind == "message" for item in response.output):
                meanwhile.start_soon(self._fill, slow, options)
            if options.deadline_ms is not None:
                meanwhile.start_soon(self._give_up, response.id, options.deadline_ms / 1000)
            async with anyio.create_task_group() as group:
                group.start_soon(self._server.carry_out, response)
                if own := {item.call_id for item in calls if not item.server}:
                    # One response has the results of servers and of the client.
                    holds = options.answers_results and len(own) < len(calls)
                    group.start_soon(self._await_client, _Awaited(response.id, own, holds), options)
            meanwhile.cancel_scope.cancel()

    async def _await_client(self, awaited: _Awaited, options: CallOptions) -> None:
        self._awaited.append(awaited)
        try:
            with awaited.scope:
                await awaited.is_complete.wait()
        finally:
            self._awaited.remove(awaited)
        is_late = bool(awaited.call_ids)
        if (options.answers_results or is_late) and not awaited.scope.cancelled_caught:
            self._server.is_due = True

    async def _fill(self, calls: Sequence[Item], options: CallOptions) -> None:
        await anyio.sleep(options.filler_after_ms / 1000)
        text = options.fillers[self._num_fillers % len(options.fillers)] if options.fillers else ""
        self._num_fillers += 1
        self._say(text, calls)

    async def _give_up(self, response_id: str, after_s: float) -> None:
        """Give the calls that have no result after this time the result that they have none."""
        await anyio.sleep(after_s)
        result = ToolResult(f"The function did not answer within {after_s:g} s.", "protocol_error")
        self._server.give_up(response_id, result)
        for awaited in [awaited for awaited in self._awaited if awaited.response_id == response_id]:
            for call_id in sorted(awaited.call_ids):
                item = Item(self._new_id("item_"), "function_call_output", call_id=call_id, output=result.text)
                previous = self._history.add(item)
                await self._emit(ItemAdded(item.snapshot(), previous))
                await self._emit(ItemDone(item.snapshot(), previous))
            awaited.is_complete.set()
