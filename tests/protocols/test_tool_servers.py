"""Tool servers in a session's tools (`type: mcp`): what is read, refused, shown and stored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ConfigureConversation,
    CreateItem,
    CreateResponse,
    Item,
    ItemAdded,
    ItemDone,
    ItemRetrieved,
    OutputItemAdded,
    OutputItemDone,
    Response,
    ResponseDone,
)
from antiphon.events.tools import NamedServer, Tool, ToolFilter, ToolListBegan, ToolListEnded
from antiphon.protocols.connection import Context
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.openai.conversation import OpenAIConversation
from antiphon.protocols.realtime.tool_servers import MAX_SERVERS, no_servers
from tests.protocols.gathered import Gathered

EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
URL = "https://tools.example/mcp"
OURS = {"type": "mcp", "server_label": "ours"}
THEIRS = {"type": "mcp", "server_label": "theirs", "server_url": URL}
FUNCTION = {"type": "function", "name": "f"}


def check_server(server: NamedServer, param: str) -> None:
    """Know the server `ours`, and allow all URLs."""
    if not server.url and server.label != "ours":
        raise RemoteProtocolError("invalid_value", "There is none.", f"{param}.server_label")


def dialect(*, beta: bool = False, **context: Any) -> Gathered:
    count = iter(range(10**6))
    context.setdefault("check_server", check_server)
    made = Context(
        models=ModelNames(("whisper-base",)),
        steady_s=lambda: 0.0,
        now_s=lambda: 1.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
        **context,
    )
    return Gathered(OpenAIConversation(made, "sess-1", 1, "gpt-realtime", beta=beta))


def update(wire: Gathered, **session: Any) -> dict[str, Any]:
    """Send an update, and return the answer."""
    kind = {} if wire.wire.snapshot().beta else {"type": "realtime"}
    wire.receive(json.dumps({"type": "session.update", "session": kind | session}))
    (frame,) = [json.loads(f.encode()) for f in wire.frames()]
    EVENT.validate_python(frame)
    return dict(frame)


def servers_of(wire: Gathered) -> tuple[NamedServer, ...]:
    command = wire.commands()[-1]
    assert isinstance(command, ConfigureConversation)
    return command.config.servers


def sent(wire: Gathered, event: Any) -> dict[str, Any]:
    wire.send(event)
    (frame,) = [json.loads(f.encode()) for f in wire.frames()]
    parsed = EVENT.validate_python(frame)
    assert parsed.type == frame["type"]
    return dict(frame)


def test_a_server_is_read_with_its_headers_which_are_neither_shown_nor_stored() -> None:
    wire = dialect()
    tool = THEIRS | {"authorization": "s3cret", "headers": {"X-Key": "t0ken"}, "server_description": "Sums."}
    shown = update(wire, tools=[FUNCTION, tool])["session"]["tools"]
    assert shown == [FUNCTION, THEIRS | {"server_description": "Sums."}]
    (server,) = servers_of(wire)
    assert (server.label, server.url) == ("theirs", URL)
    assert server.headers == {"X-Key": "t0ken", "Authorization": "Bearer s3cret"}
    stored = msgspec.json.encode(wire.wire.snapshot()).decode()
    for secret in ("s3cret", "t0ken"):
        assert secret not in stored + repr(server) + repr(wire.wire.configured())
    # An update of another field leaves them as they are, and an update of the tools replaces them.
    update(wire, instructions="Add.")
    assert servers_of(wire) == (server,)
    update(wire, tools=[THEIRS])
    assert servers_of(wire)[0].headers == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"asks": True}),
        ({"require_approval": None}, {"asks": True}),
        ({"require_approval": "never"}, {}),
        ({"require_approval": "always"}, {"asks": True}),
        ({"require_approval": {"never": {"tool_names": ["a"]}}}, {"asks": True, "never": ToolFilter(("a",))}),
        ({"require_approval": {"always": {"read_only": False}}}, {"asks": True, "always": ToolFilter(None, False)}),
        ({"allowed_tools": ["a", "b"], "require_approval": "never"}, {"allowed": ToolFilter(("a", "b"))}),
        ({"allowed_tools": [], "require_approval": "never"}, {"allowed": ToolFilter(())}),
        (
            {"allowed_tools": {"tool_names": ["a"], "read_only": True}, "require_approval": "never"},
            {"allowed": ToolFilter(("a",), True)},
        ),
        ({"allowed_callers": ["direct", "programmatic"], "defer_loading": False}, {"asks": True}),
    ],
)
def test_filters_and_approvals_are_read(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    wire = dialect()
    assert update(wire, tools=[THEIRS | fields])["type"] == "session.updated"
    assert servers_of(wire) == (NamedServer("theirs", URL, **expected),)


def test_the_operators_servers_need_no_approval_unless_the_client_wants_one() -> None:
    wire = dialect()
    update(wire, tools=[OURS])
    assert servers_of(wire) == (NamedServer("ours"),)
    update(wire, tools=[OURS | {"require_approval": "always"}])
    assert servers_of(wire) == (NamedServer("ours", asks=True),)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([FUNCTION, {"type": "mcp"}], "session.tools[1].server_label"),
        ([{"type": "mcp", "server_label": "none"}], "session.tools[0].server_label"),
        ([THEIRS, THEIRS], "session.tools[1].server_label"),
        ([OURS | {"connector_id": "connector_gmail"}], "session.tools[0].connector_id"),
        ([OURS | {"tunnel_id": "t"}], "session.tools[0].tunnel_id"),
        ([OURS | {"defer_loading": True}], "session.tools[0].defer_loading"),
        ([OURS | {"allowed_callers": ["programmatic"]}], "session.tools[0].allowed_callers"),
        ([OURS | {"require_approval": "sometimes"}], "session.tools[0].require_approval"),
        ([OURS | {"require_approval": {"sometimes": {}}}], "session.tools[0].require_approval.sometimes"),
        ([OURS | {"allowed_tools": [1]}], "session.tools[0].allowed_tools[0]"),
        ([OURS | {"headers": {"X": 1}}], "session.tools[0].headers[...]"),
        ([OURS | {"sever_url": "x"}], "session.tools[0].sever_url"),
        ([{"type": "web_search"}], "session.tools[0].type"),
        (
            [THEIRS | {"server_label": f"s{i}"} for i in range(MAX_SERVERS + 1)],
            f"session.tools[{MAX_SERVERS}].server_label",
        ),
    ],
)
def test_invalid_servers_are_refused_and_change_nothing(tools: list[Any], param: str) -> None:
    wire = dialect()
    update(wire, tools=[THEIRS | {"headers": {"X-Key": "t0ken"}}])
    before = servers_of(wire)
    error = update(wire, tools=tools)["error"]
    assert error["param"] == param, error
    update(wire)
    assert servers_of(wire) == before


def test_a_server_without_tool_servers_and_a_beta_session_refuse_them() -> None:
    wire = dialect(check_server=no_servers)
    assert update(wire, tools=[OURS])["error"]["param"] == "session.tools[0].server_label"
    beta = dialect(beta=True)
    beta.receive(json.dumps({"type": "session.update", "session": {"tools": [OURS]}}))
    (frame,) = [json.loads(f.encode()) for f in beta.frames()]
    assert frame["error"]["param"] == "session.tools[0].type"
    assert not beta.commands()


def test_a_response_names_servers_of_the_session_or_of_the_operator() -> None:
    wire = dialect()

    def create(*tools: Any) -> CreateResponse | str:
        wire.receive(json.dumps({"type": "response.create", "response": {"tools": tools}}))
        if frames := [json.loads(f.encode()) for f in wire.frames()]:
            return str(frames[0]["error"]["param"])
        (command,) = wire.commands()
        assert isinstance(command, CreateResponse)
        return command

    assert create({"type": "mcp", "server_label": "theirs"}) == "response.tools[0].server_label"
    update(wire, tools=[THEIRS])
    wire.commands()
    made = create(FUNCTION, {"type": "mcp", "server_label": "theirs", "allowed_tools": ["a"]}, OURS)
    assert isinstance(made, CreateResponse)
    assert made.tools == (Tool("f"),)
    assert made.servers == (NamedServer("theirs", allowed=ToolFilter(("a",))), NamedServer("ours"))
    assert create(THEIRS) == "response.tools[0].server_url"


def test_the_answer_to_an_approval_request_is_an_item() -> None:
    wire = dialect()
    item = {"type": "mcp_approval_response", "id": "a", "approval_request_id": "r", "approve": False, "reason": "No."}
    wire.receive(json.dumps({"type": "conversation.item.create", "item": item}))
    (command,) = wire.commands()
    assert isinstance(command, CreateItem)
    assert command.item == Item("a", "approval", "system", approval_id="r", approves=False, output="No.")
    assert sent(wire, ItemAdded(command.item, None))["item"] == item


def test_the_events_of_listing_and_of_approvals_have_openais_form() -> None:
    wire = dialect()
    tool = Tool("add", "Adds.", {"type": "object"}, "ours", read_only=True)
    listing = Item("i", "tool_list", "system", "in_progress", server="ours")
    assert sent(wire, ItemAdded(listing, None))["item"] == {
        "id": "i",
        "type": "mcp_list_tools",
        "server_label": "ours",
        "tools": [],
    }
    assert sent(wire, ToolListBegan("i"))["type"] == "mcp_list_tools.in_progress"
    assert sent(wire, ToolListEnded("i", failed=False))["type"] == "mcp_list_tools.completed"
    assert sent(wire, ToolListEnded("i", failed=True)) | {"event_id": ""} == {
        "type": "mcp_list_tools.failed",
        "event_id": "",
        "item_id": "i",
    }
    listing.tools = (tool,)
    for event in (ItemDone(listing, None), ItemRetrieved(listing)):
        assert sent(wire, event)["item"]["tools"] == [
            {
                "name": "add",
                "description": "Adds.",
                "input_schema": {"type": "object"},
                "annotations": {"readOnlyHint": True},
            }
        ]
    request = Item("r", "function_call", "assistant", "in_progress", name="ours__add", arguments="{}", server="ours")
    request.needs_approval = True
    shown = {"id": "r", "type": "mcp_approval_request", "server_label": "ours", "name": "add", "arguments": "{}"}
    for item_event in (
        OutputItemAdded("resp", 0, request, None),
        ItemDone(request, None),
        OutputItemDone("resp", 0, request, None),
    ):
        assert sent(wire, item_event)["item"] == shown
    response = Response("resp", False, None, None, status="completed", output=[request])
    wire.send(ResponseDone(response))
    done, _ = [json.loads(f.encode()) for f in wire.frames()]
    EVENT.validate_python(done)
    assert done["response"]["output"] == [shown]
    call = Item("c", "function_call", "assistant", "in_progress", name="ours__add", server="ours", approval_id="r")
    assert sent(wire, ItemAdded(call, "r"))["item"]["approval_request_id"] == "r"


def test_a_session_with_servers_is_restored_without_their_headers() -> None:
    wire, other = dialect(), dialect()
    update(wire, tools=[THEIRS | {"headers": {"X-Key": "t0ken"}}])
    other.wire.restore("sess-2", wire.wire.snapshot())
    config = other.wire.configured().config
    assert config.servers == (NamedServer("theirs", URL, asks=True),)
