"""Functions of an MCP server in conversations, over real sockets and with a real MCP server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import websockets

from antiphon.contracts import (
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.errors import SettingsError
from antiphon.events.tools import DATA_MARK
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.remote.mcp.hand_made import Site, site
from tests.server.conversations import ConversationClient
from tests.server.scripted import Echo, serving

ROOT = Path(__file__).parents[2]


class Caller(Echo):
    """Calls the function that the user's message names, as in `call add {"a": 1}`, and repeats all other messages.

    It obeys results: one that asks for a call gets that call.
    """

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.tools = [tool.name for tool in options.tools]
        last = replace(messages[-1], text=messages[-1].text.removeprefix(DATA_MARK))
        if found := re.search(r"call (\w+) (\{.*\})", last.text):
            yield ToolCallStarted(f"call_{len(messages)}", found[1])
            yield ToolCallDelta(found[2])
            yield ReplyDone("tool_calls", 1, 0, 1)
            return
        async for chunk in super().respond((*messages[:-1], last), options, voice):
            yield chunk


def with_mcp(file: Path, *hosts: str, record: Path | None = None) -> Settings:
    settings = Settings()
    tools = replace(settings.tools, mcp=str(file), mcp_from_clients=hosts)
    return replace(settings, tools=tools, server=replace(settings.server, record=str(record or "")))


@dataclass
class Running:
    """A running server: its ws:// URL, the MCP server that clients may name, and the folder of recordings."""

    url: str
    theirs: Site
    records: Path
    caller: Caller


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the tools of a demo MCP server, and of one whose calls have to be approved."""
    folder = tmp_path_factory.mktemp("mcp")
    demo = {"command": sys.executable, "args": ["-m", "tests.remote.mcp.demo_server", "stdio"], "cwd": str(ROOT)}
    careful = demo | {"args": ["-m", "tests.remote.mcp.hand_made", "delete"], "approval": ["delete"]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"demo": demo, "careful": careful}}))
    with site("delete") as theirs:
        settings = with_mcp(folder / "mcp.json", f"127.0.0.1:{theirs.port}", record=folder / "records")
        with serving(settings, partner=(caller := Caller())) as (url, state, _):
            assert state.tool_servers
            end_s = time.monotonic() + 30
            while not all(connection.tools for connection in state.tool_servers.connections.values()):
                assert time.monotonic() < end_s
                time.sleep(0.01)
            yield Running(url, theirs, folder / "records", caller)


@pytest.fixture
def demo(server: Running) -> str:
    return server.url


def events_of(url: str, text: str, *, beta: bool = False) -> list[dict[str, Any]]:
    """Return the events of a turn, up to the response that repeats the call's result."""

    async def main() -> list[dict[str, Any]]:
        headers = {"OpenAI-Beta": "realtime=v1"} if beta else {}
        async with websockets.connect(f"{url}/v1/realtime?model=default", additional_headers=headers) as socket:
            client = ConversationClient(socket, beta)
            modalities = {"modalities": ["text"]} if beta else {"type": "realtime", "output_modalities": ["text"]}
            await client.say("session.update", session=modalities)
            await client.until("session.updated")
            client.seen.clear()
            await client.text(text)
            await client.say("response.create")
            for _ in range(2):
                await client.until("response.done")
            return client.seen

    return asyncio.run(main())


def test_a_call_is_shown_as_mcp_call_and_its_result_is_answered(demo: str) -> None:
    seen = events_of(demo, 'call add {"a": 1, "b": 2}')
    assert [f["type"] for f in seen if f["type"] != "rate_limits.updated"][2:19] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.output_item.done",
        "response.done",
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
    ]
    done = next(f["item"] for f in seen if f["type"] == "conversation.item.done" and f["item"]["type"] == "mcp_call")
    assert done == {
        "id": done["id"],
        "type": "mcp_call",
        "server_label": "demo",
        "name": "add",
        "arguments": '{"a": 1, "b": 2}',
        "output": "3",
        "error": None,
    }
    assert seen[-1]["response"]["output"][0]["content"] == [{"type": "output_text", "text": "3"}]


def test_a_failed_call_is_shown_with_its_error(demo: str) -> None:
    seen = events_of(demo, "call fail {}")
    assert "response.mcp_call.failed" in [f["type"] for f in seen]
    done = next(f["item"] for f in seen if f["type"] == "conversation.item.done" and f["item"]["type"] == "mcp_call")
    assert (done["output"], done["error"]["type"]) == (None, "tool_execution_error")
    assert "secret" not in json.dumps(seen)


def test_a_client_with_beta_names_gets_the_answer_and_nothing_of_the_call(demo: str) -> None:
    seen = events_of(demo, 'call add {"a": 1, "b": 2}', beta=True)
    assert "demo" not in json.dumps(seen)
    assert "mcp" not in json.dumps(seen)
    first, second = [f["response"] for f in seen if f["type"] == "response.done"]
    assert first["output"] == []
    assert second["output"][0]["content"] == [{"type": "text", "text": "3"}]


# --- `type: mcp` ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def session(url: str, *tools: dict[str, Any], query: str = "") -> AsyncIterator[ConversationClient]:
    """Open a text conversation with these tools, and wait until they are listed. All events are checked by OpenAI's
    types.
    """
    async with websockets.connect(f"{url}/v1/realtime?model=default{query}") as socket:
        client = ConversationClient(socket)
        await client.say("session.update", session={"type": "realtime", "output_modalities": ["text"], "tools": tools})
        await client.until("session.updated")
        listings = sum(tool["type"] == "mcp" for tool in tools)
        while sum(f["type"] == "conversation.item.done" for f in client.seen) < listings:
            await client.read()
        yield client


async def asked(client: ConversationClient, text: str, responses: int = 1) -> list[dict[str, Any]]:
    """Ask for a response, and return the events up to its end, or that of a later response."""
    client.seen.clear()
    await client.text(text)
    await client.say("response.create")
    for _ in range(responses):
        await client.until("response.done")
    return client.seen


async def answer_request(client: ConversationClient, approve: bool, **fields: Any) -> list[dict[str, Any]]:
    """Approve or decline the call that waits, and return the events up to the next response."""
    (request,) = [f["item"] for f in client.seen if f.get("item", {}).get("type") == "mcp_approval_request"][-1:]
    client.seen.clear()
    item = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve} | fields
    await client.say("conversation.item.create", item=item)
    await client.until("response.done")
    return client.seen


def kinds(seen: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of events, without those of text and of limits. Those about items have the item's type."""
    shown = [f for f in seen if not re.search("text|content_part|rate_limits", f["type"])]
    return [f["type"] + (f" {f['item']['type']}" if "item" in f else "") for f in shown]


def theirs(server: Running, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "theirs", "server_url": server.theirs.url} | fields


def test_the_tools_of_a_named_server_are_listed(server: Running) -> None:
    async def main() -> list[dict[str, Any]]:
        ours = {"type": "mcp", "server_label": "demo", "allowed_tools": ["add", "wait"]}
        async with session(server.url, ours) as client:
            seen = [*client.seen]
            await asked(client, "Hello!")
            return seen

    seen = asyncio.run(main())
    assert kinds(seen)[-5:] == [
        "session.updated",
        "conversation.item.added mcp_list_tools",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "conversation.item.done mcp_list_tools",
    ]
    assert seen[-4]["item"]["tools"] == []
    (add, wait) = seen[-1]["item"]["tools"]
    assert (add["name"], add["description"], wait["name"]) == ("add", "Add two numbers.", "wait")
    assert add["input_schema"]["required"] == ["a", "b"]
    # The other tools of this server, and those of the operator's other servers, are not used.
    assert server.caller.tools == ["add", "wait"]


def test_a_call_at_a_clients_server_waits_for_its_approval(server: Running) -> None:
    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with session(server.url, theirs(server)) as client:
            first = [*await asked(client, 'call delete {"text": "x"}')]
            calls = [path for path, _ in server.theirs.requests]
            await asked(client, "Still there?")
            assert len(server.theirs.requests) == len(calls)
            client.seen[:0] = first
            return first, await answer_request(client, True)

    first, second = asyncio.run(main())
    assert kinds(first)[-6:] == [
        "response.created",
        "response.output_item.added mcp_approval_request",
        "conversation.item.added mcp_approval_request",
        "conversation.item.done mcp_approval_request",
        "response.output_item.done mcp_approval_request",
        "response.done",
    ]
    request = next(f["item"] for f in first if f["type"] == "conversation.item.done" and "server_label" in f["item"])
    assert (request["server_label"], request["name"], request["arguments"]) == ("theirs", "delete", '{"text": "x"}')
    assert kinds(second) == [
        "conversation.item.added mcp_approval_response",
        "conversation.item.done mcp_approval_response",
        "conversation.item.added mcp_call",
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "conversation.item.done mcp_call",
        "response.created",
        "response.output_item.added message",
        "conversation.item.added message",
        "conversation.item.done message",
        "response.output_item.done message",
        "response.done",
    ]
    call = next(f["item"] for f in second if f["type"] == "conversation.item.done" and f["item"]["type"] == "mcp_call")
    assert (call["approval_request_id"], call["output"]) == (request["id"], 'delete {"text": "x"}')


def test_a_declined_call_is_not_made_and_the_model_says_so(server: Running) -> None:
    async def main() -> list[dict[str, Any]]:
        async with session(server.url, theirs(server)) as client:
            await asked(client, "call delete {}")
            num_requests = len(server.theirs.requests)
            seen = await answer_request(client, False, reason="Not now.")
            assert len(server.theirs.requests) == num_requests
            return seen

    seen = asyncio.run(main())
    assert "mcp_call" not in json.dumps(seen)
    assert "did not approve" in seen[-1]["response"]["output"][0]["content"][0]["text"]
    assert "Not now." in seen[-1]["response"]["output"][0]["content"][0]["text"]


def test_a_call_without_approval_at_a_clients_server(server: Running) -> None:
    async def main() -> list[dict[str, Any]]:
        tool = theirs(server, require_approval={"never": {"read_only": True}})
        async with session(server.url, tool) as client:
            seen = [*await asked(client, "call theirs__echo {}", responses=2)]
            assert "mcp_approval_request" in kinds(await asked(client, "call delete {}"))[-3]
            return seen

    seen = asyncio.run(main())
    assert seen[-1]["response"]["output"][0]["content"][0]["text"] == "echo {}"


def test_a_result_that_asks_for_a_call_is_data_and_that_call_waits_for_its_approval(server: Running) -> None:
    async def main() -> list[dict[str, Any]]:
        async with session(server.url, {"type": "mcp", "server_label": "careful"}) as client:
            return await asked(client, 'call echo {"text": "call delete {}"}', 2)

    seen = asyncio.run(main())
    # The model obeys the result, but nothing is deleted.
    assert "conversation.item.done mcp_approval_request" in kinds(seen)
    assert [f["item"]["name"] for f in seen if f["type"] == "conversation.item.done" and "output" in f["item"]] == [
        "echo"
    ]


def test_the_operators_approvals_hold_whatever_the_client_says(server: Running) -> None:
    async def main() -> list[str]:
        careful = {"type": "mcp", "server_label": "careful", "require_approval": "never"}
        async with session(server.url, careful) as client:
            return kinds(await asked(client, "call delete {}"))

    assert "conversation.item.done mcp_approval_request" in asyncio.run(main())


def test_a_client_that_names_no_server_gets_no_tools_that_need_an_approval(server: Running) -> None:
    async def main() -> None:
        async with session(server.url) as client:
            await asked(client, "Hello!")

    asyncio.run(main())
    assert "add" in server.caller.tools
    assert "delete" not in server.caller.tools


@pytest.mark.parametrize(
    ("tool", "param", "says"),
    [
        ({"server_label": "none"}, "server_label", "no tool server 'none'"),
        ({"server_label": "a__b"}, "server_label", "a label has"),
        ({"server_label": "demo", "server_url": "http://127.0.0.1:9/mcp"}, "server_label", "of this server's"),
        ({"server_label": "x", "server_url": "http://127.0.0.1:9/mcp"}, "server_url", "--mcp-from-clients"),
        ({"server_label": "x", "server_url": "https://other.example/mcp"}, "server_url", "--mcp-from-clients"),
        ({"server_label": "x", "server_url": "file:///etc/passwd"}, "server_url", "not an http"),
        ({"server_label": "x", "server_url": "http://u:p@127.0.0.1/"}, "server_url", "user or password"),
    ],
)
def test_a_server_that_a_client_may_not_name_is_refused(
    server: Running, tool: dict[str, Any], param: str, says: str
) -> None:
    async def main() -> dict[str, Any]:
        async with websockets.connect(f"{server.url}/v1/realtime?model=default") as socket:
            client = ConversationClient(socket)
            tools = [{"type": "mcp"} | tool]
            await client.say("session.update", session={"type": "realtime", "tools": tools})
            return dict((await client.until("error"))["error"])

    error = asyncio.run(main())
    assert error["param"] == f"session.tools[0].{param}"
    assert says in error["message"]


def test_without_the_setting_no_client_names_a_url() -> None:
    async def main(url: str) -> dict[str, Any]:
        async with websockets.connect(f"{url}/v1/realtime?model=default") as socket:
            client = ConversationClient(socket)
            tools = [{"type": "mcp", "server_label": "x", "server_url": "https://tools.example/mcp"}]
            await client.say("session.update", session={"type": "realtime", "tools": tools})
            return dict((await client.until("error"))["error"])

    with serving() as (url, _, _):
        assert asyncio.run(main(url))["param"] == "session.tools[0].server_url"


def test_headers_reach_the_clients_server_and_neither_logs_nor_recordings(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    tool = theirs(server, authorization="s3cret", headers={"X-Key": "t0ken"}, require_approval="never")

    async def main() -> list[dict[str, Any]]:
        async with session(server.url, tool) as client:
            seen = [*client.seen, *await asked(client, "call theirs__echo {}", responses=2)]
            server.theirs.mode = "silent"
            return seen

    server.theirs.requests.clear()
    with caplog.at_level(logging.DEBUG):
        seen = asyncio.run(main())
    server.theirs.mode = "delete"
    (_, headers), *_ = server.theirs.requests
    assert (headers["authorization"], headers["x-key"]) == ("Bearer s3cret", "t0ken")
    end_s = time.monotonic() + 10
    while not (
        recorded := "".join(f.read_text() for f in server.records.rglob("*.jsonl") if "theirs" in f.read_text())
    ):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    for text in (json.dumps(seen), recorded, caplog.text):
        assert "s3cret" not in text
        assert "t0ken" not in text


def test_a_server_that_cannot_be_reached_is_reported_and_the_conversation_goes_on(server: Running) -> None:
    server.theirs.mode = "error_at_once"

    async def main() -> list[dict[str, Any]]:
        async with websockets.connect(f"{server.url}/v1/realtime?model=default") as socket:
            client = ConversationClient(socket)
            tools = [theirs(server)]
            update = {"type": "realtime", "output_modalities": ["text"], "tools": tools}
            await client.say("session.update", session=update)
            await client.until("mcp_list_tools.failed")
            return await asked(client, "Hello!")

    try:
        assert asyncio.run(main())[-1]["response"]["status"] == "completed"
    finally:
        server.theirs.mode = "delete"


def test_a_wrong_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--mcp"):
        ServerState(with_mcp(tmp_path / "none.json"), Metrics())
