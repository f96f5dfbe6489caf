"""Functions of an MCP server in conversations, over real sockets and with a real MCP server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
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
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.server.conversations import ConversationClient
from tests.server.scripted import Echo, serving

ROOT = Path(__file__).parents[2]


class Caller(Echo):
    """Calls the function that the user's message names, as in `call add {"a": 1}`, and repeats all other messages."""

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        last = messages[-1]
        if last.role == "user" and last.text.startswith("call "):
            _, name, arguments = last.text.split(" ", 2)
            yield ToolCallStarted("call_1", name)
            yield ToolCallDelta(arguments)
            yield ReplyDone("tool_calls", 1, 0, 1)
            return
        async for chunk in super().respond(messages, options, voice):
            yield chunk


def with_mcp(file: Path) -> Settings:
    settings = Settings()
    return replace(settings, tools=replace(settings.tools, mcp=str(file)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the ws:// URL of a server with the tools of a demo MCP server."""
    server = {"command": sys.executable, "args": ["-m", "tests.remote.mcp.demo_server", "stdio"], "cwd": str(ROOT)}
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"demo": server}}))
    with serving(with_mcp(file), partner=Caller()) as (url, state, _):
        assert state.tool_servers
        end_s = time.monotonic() + 30
        while not state.tool_servers.tools:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        yield url


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


def test_a_wrong_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--mcp"):
        ServerState(with_mcp(tmp_path / "none.json"), Metrics())
