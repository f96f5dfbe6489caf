"""Tool servers that a session names, and calls that the client has to approve."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from antiphon.contracts import ResponseChunk, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    CreateItem,
    CreateResponse,
    DeleteItem,
    IdleTimeoutReached,
    Item,
    ItemAdded,
    ItemDone,
    ResponseDone,
)
from antiphon.events.tools import NamedServer, Tool, ToolCallBegan, ToolFilter, ToolListBegan, ToolListEnded
from antiphon.events.transcription import ServerVad
from antiphon.sessions.conversation.history import APPROVAL_TO_COME
from antiphon.sessions.conversation.responses.server_calls import NOT_APPROVED
from tests.sessions.conversation.responses.test_server_calls import SAYS, Calling, brief, play_in

LOOK_UP = Tool("look_up", "Looks a word up.", {"type": "object"}, "files")
DELETE = Tool("delete", "Deletes a word.", {"type": "object"}, "files", needs_approval=True)
ADD = Tool("add", "Adds.", {"type": "object"}, "sums", read_only=True)
CALLS_DELETE: tuple[ResponseChunk, ...] = (ToolCallStarted("call_1", "delete"), ToolCallDelta('{"word": "antiphon"}'))
ELSEWHERE = NamedServer("theirs", "https://tools.example/mcp", {"Authorization": "Bearer x"}, asks=True)


def deleting(**config: Any) -> Calling:
    """Return a conversation whose first response calls a function that has to be approved."""
    config.setdefault("servers", (NamedServer("files"), NamedServer("sums")))
    return Calling(LOOK_UP, DELETE, ADD, chunks=CALLS_DELETE, **config)


def request_of(room: Calling) -> Item:
    (request,) = [o.item for o in room.out if isinstance(o, ItemDone) and o.item.needs_approval]
    return request


async def approve(room: Calling, request_id: str, approves: bool, reason: str = "") -> None:
    answer = Item(f"answer_{len(room.out)}", "approval", "system", approval_id=request_id, approves=approves)
    answer.output = reason
    await room.session.handle(CreateItem(answer, event_id="mine"))
    await room.settle()


def rejections(room: Calling) -> list[tuple[str, str | None]]:
    return [(o.code, o.param) for o in room.out if isinstance(o, CommandRejected)]


# --- approvals --------------------------------------------------------------------------------------------------------


def test_a_call_that_needs_an_approval_is_made_when_the_client_approves_it() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        assert room.responses() == ["completed"]
        assert room.servers.asked == []
        request = request_of(room)
        assert (request.name, request.arguments, request.server) == ("delete", '{"word": "antiphon"}', "files")
        await approve(room, request.id, True)
        assert room.servers.asked == [("files", "delete", '{"word": "antiphon"}')]
        await room.answer("Deleted.")
        assert brief(room.model.asked[-1]) == ["user: Delete it.", "assistant: delete#call_1", "tool: Deleted."]

    room = play_in(deleting, act)
    assert room.responses() == ["completed", "completed"]
    (call,) = [o.item for o in room.out if isinstance(o, ItemAdded) and o.item.approval_id and o.item.server]
    assert (call.approval_id, call.name) == (request_of(room).id, "delete")
    kinds = [type(o) for o in room.out if isinstance(o, ToolCallBegan | ResponseDone)]
    assert kinds == [ResponseDone, ToolCallBegan, ResponseDone]


def test_when_the_client_declines_then_no_call_is_made_and_the_model_reads_why() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        await approve(room, request_of(room).id, False, "Not today.")
        assert brief(room.model.asked[-1]) == [
            "user: Delete it.",
            "assistant: delete#call_1",
            f"tool: {NOT_APPROVED} Not today.",
        ]

    room = play_in(deleting, act)
    assert room.servers.asked == []
    assert room.responses() == ["completed", "completed"]


def test_while_a_call_waits_for_its_approval_then_the_user_is_answered_and_the_session_is_not_silent() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        assert not room.session.progress.is_silent
        await room.say("And are you well?")
        assert brief(room.model.asked[-1])[1:] == [
            "assistant: delete#call_1",
            f"tool: {APPROVAL_TO_COME}",
            "user: And are you well?",
        ]
        await approve(room, request_of(room).id, True)
        await room.answer("Deleted.")
        assert brief(room.model.asked[-1]) == [
            "user: Delete it.",
            "user: And are you well?",
            "assistant: One two. delete#call_1",
            "tool: Deleted.",
        ]
        assert room.session.progress.owed_responses == []

    play_in(deleting, act)


def test_when_the_user_went_on_before_the_client_declined_then_the_model_reads_it_where_it_came() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        await room.say("And are you well?")
        await approve(room, request_of(room).id, False)
        assert brief(room.model.asked[-1])[3:] == [
            "user: And are you well?",
            "assistant: One two. delete#call_1_2",
            f"tool: {NOT_APPROVED}",
        ]

    play_in(deleting, act)


def test_the_idle_timeout_does_not_count_while_a_call_waits_for_its_approval() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        # Longer than the idle timeout.
        await asyncio.sleep(0.05)
        assert not [o for o in room.out if isinstance(o, IdleTimeoutReached)]
        await approve(room, request_of(room).id, False)
        await room.until(IdleTimeoutReached)

    play_in(lambda: deleting(idle_timeout_ms=1, vad=ServerVad()), act)


@pytest.mark.parametrize("approves", [True, False])
def test_an_answer_counts_once_and_only_for_a_call_that_waits(approves: bool) -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        await approve(room, "item_none", True)
        request = request_of(room)
        await approve(room, request.id, approves)
        await approve(room, request.id, True)
        assert rejections(room) == [("invalid_value", "item.approval_request_id")] * 2
        assert len(room.servers.asked) == approves

    play_in(deleting, act)


def test_a_request_that_was_deleted_cannot_be_approved() -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        request = request_of(room)
        await room.session.handle(DeleteItem(request.id))
        await approve(room, request.id, True)
        assert room.servers.asked == []
        assert len(rejections(room)) == 1

    play_in(deleting, act)


def test_when_the_response_is_cut_off_after_its_request_then_it_cannot_be_approved() -> None:
    async def act(room: Calling) -> None:
        room.model.end.clear()
        room.model.chunks = (*CALLS_DELETE, TextDelta("So I will. "))
        await room.say("Delete it.")
        await room.session.interrupt("turn_detected")
        await room.settle()
        request = next(item for item in room.session.history.items if item.needs_approval)
        await approve(room, request.id, True)
        assert room.servers.asked == []
        assert room.session.progress.is_silent
        room.model.end.set()

    play_in(deleting, act)


@pytest.mark.parametrize("servers", [(), (ELSEWHERE,)])
def test_a_client_that_names_no_server_of_the_operator_gets_no_functions_that_need_an_approval(
    servers: tuple[NamedServer, ...],
) -> None:
    async def act(room: Calling) -> None:
        await room.ask("Delete it.")
        assert [tool.name for tool in room.model.options[0].tools] == ["look_up", "add"]

    play_in(lambda: Calling(LOOK_UP, DELETE, ADD, chunks=SAYS, servers=servers), act)


def test_a_request_waits_for_its_answer_at_another_host() -> None:
    async def main(room: Calling) -> None:
        await room.ask("Delete it.")
        # Scripted sessions number their items from 0.
        items = [replace(item.snapshot(), id=f"first_{item.id}") for item in room.session.history.items]
        second = deleting()
        second.model.chunks = SAYS
        second.session.history.restore(items)
        async with second:
            await approve(second, f"first_{request_of(room).id}", True)
            await second.answer("Deleted.")
            assert brief(second.model.asked[-1])[-1] == "tool: Deleted."

    play_in(deleting, main)


# --- named servers ----------------------------------------------------------------------------------------------------


def test_a_session_that_names_a_server_of_the_operator_gets_its_chosen_functions_only() -> None:
    named = NamedServer("files", allowed=ToolFilter(("look_up", "delete")), never=ToolFilter(("delete",)))

    async def act(room: Calling) -> None:
        (connection,) = room.servers.connections.values()
        connection.list(LOOK_UP, DELETE)
        await room.settle()
        await room.ask("What is an antiphon?")
        tools = room.model.options[0].tools
        # The operator's requirement stays.
        assert [(tool.name, tool.needs_approval) for tool in tools] == [("look_up", False), ("delete", True)]
        assert not connection.runs

    room = play_in(lambda: deleting(servers=(named,)), act)
    assert room.servers.connections.keys() == {"files"}


@pytest.mark.parametrize(
    ("server", "asks"),
    [
        (NamedServer("files", asks=True), {"look_up", "delete"}),
        (NamedServer("files"), {"delete"}),
        (NamedServer("files", asks=True, never=ToolFilter(("look_up",))), {"delete"}),
        (NamedServer("files", always=ToolFilter(("look_up",))), {"look_up", "delete"}),
        (NamedServer("files", asks=True, never=ToolFilter(read_only=False)), {"delete"}),
        (NamedServer("files", asks=True, never=ToolFilter(read_only=True)), {"look_up", "delete"}),
    ],
)
def test_which_calls_of_a_named_server_need_an_approval(server: NamedServer, asks: set[str]) -> None:
    chosen = server.chosen((LOOK_UP, DELETE, ADD))
    assert [tool.name for tool in chosen] == ["look_up", "delete"]
    assert {tool.name for tool in chosen if tool.needs_approval} == asks


def test_read_only_functions_can_be_chosen() -> None:
    assert NamedServer("sums", allowed=ToolFilter(read_only=True)).chosen((LOOK_UP, ADD)) == (ADD,)
    assert NamedServer("sums", allowed=ToolFilter(read_only=False)).chosen((LOOK_UP, ADD)) == ()
    assert NamedServer("sums", allowed=ToolFilter(())).chosen((ADD,)) == ()


def test_the_tools_of_a_named_server_become_an_item_and_a_turn_before_that_is_answered_without_them() -> None:
    theirs = replace(LOOK_UP, server="theirs")

    async def act(room: Calling) -> None:
        room.model.chunks = SAYS
        connection = room.servers.connections["theirs"]
        assert connection.runs
        await room.say("Are you there?")
        assert [tool.name for tool in room.model.options[0].tools] == ["look_up", "add"]
        connection.list(theirs)
        await room.settle()
        await room.say("And now?", 10_000)
        names = [tool.name for tool in room.model.options[1].tools]
        assert names == ["theirs__look_up", "files__look_up", "add"]
        assert brief(room.model.asked[-1]) == ["user: Are you there?", "assistant: One two.", "user: And now?"]

    room = play_in(lambda: deleting(servers=(ELSEWHERE,)), act)
    events = [o for o in room.out if isinstance(o, ToolListBegan | ToolListEnded)]
    assert [type(o) for o in events] == [ToolListBegan, ToolListEnded]
    (added, done) = [o.item for o in room.out if isinstance(o, ItemAdded | ItemDone) and o.item.kind == "tool_list"]
    assert (added.tools, done.tools) == ((), (replace(theirs, needs_approval=True),))
    assert not room.servers.connections["theirs"].runs


def test_a_call_goes_to_the_server_that_the_session_names_without_its_label() -> None:
    chunks = (ToolCallStarted("call_1", "theirs__look_up"), ToolCallDelta("{}"))

    async def act(room: Calling) -> None:
        room.servers.connections["theirs"].list(replace(LOOK_UP, server="theirs"))
        await room.settle()
        await room.ask("What is an antiphon?")
        assert room.servers.asked == [("theirs", "look_up", "{}")]
        await room.answer("A chant.")

    play_in(lambda: Calling(chunks=chunks, servers=(replace(ELSEWHERE, asks=False),)), act)


def test_a_server_that_cannot_be_reached_is_reported() -> None:
    async def act(room: Calling) -> None:
        room.servers.connections["theirs"].list()
        await room.settle()

    room = play_in(lambda: deleting(servers=(ELSEWHERE,)), act)
    assert [o.failed for o in room.out if isinstance(o, ToolListEnded)] == [True]


def test_when_the_session_names_a_server_no_more_then_it_is_disconnected() -> None:
    async def act(room: Calling) -> None:
        connection = room.servers.connections["theirs"]
        connection.list(replace(ADD, server="theirs"))
        await room.settle()
        assert connection.runs
        await room.session.handle(ConfigureConversation(replace(room.session.config, servers=())))
        await room.settle()
        assert not connection.runs
        await room.ask("Add.")
        assert "theirs__add" not in [tool.name for tool in room.model.options[0].tools]

    play_in(lambda: deleting(servers=(ELSEWHERE,)), act)


def test_a_response_may_use_some_servers_of_the_session() -> None:
    async def act(room: Calling) -> None:
        room.model.chunks = SAYS
        command = CreateResponse(tools=(), servers=(NamedServer("sums"), NamedServer("theirs")))
        connection = room.servers.connections["theirs"]
        connection.list(replace(LOOK_UP, server="theirs"))
        await room.settle()
        await room.session.handle(command)
        await room.settle()
        tools = room.model.options[0].tools
        # The session's rule for approvals stays.
        assert [(tool.name, tool.needs_approval) for tool in tools] == [("add", False), ("look_up", True)]

    play_in(lambda: deleting(servers=(ELSEWHERE,)), act)


def test_at_another_host_a_named_server_is_connected_and_not_listed_again() -> None:
    async def main(room: Calling) -> None:
        room.servers.connections["theirs"].list(replace(LOOK_UP, server="theirs"))
        await room.settle()
        second = deleting(servers=(ELSEWHERE,))
        second.session.history.restore([item.snapshot() for item in room.session.history.items])
        async with second:
            assert second.servers.connections["theirs"].runs
            assert not [o for o in second.out if isinstance(o, ToolListBegan)]

    play_in(lambda: deleting(servers=(ELSEWHERE,)), main)
