"""The MCP servers that others publish as examples, as real processes: packages of npm and PyPI, unmodified."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import websockets

from tests.clients.run import environment
from tests.server.conversations import ConversationClient
from tests.server.scripted import serving
from tests.server.test_mcp import Caller, with_mcp

pytestmark = pytest.mark.heavy
HERE = Path(__file__).parents[1] / "remote" / "mcp"
EVERYTHING, FILES = "@modelcontextprotocol/server-everything", "@modelcontextprotocol/server-filesystem"
START_S = 120


@dataclass
class Running:
    """A server with the tools of four MCP servers."""

    ws: str
    folder: Path
    tools: Any


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "shop.txt").write_text("Open from nine to five.")
    python = str(environment("reference", HERE))
    servers: dict[str, dict[str, Any]] = {
        "everything": {"command": "npx", "args": ["-y", EVERYTHING, "stdio"], "timeout": 60},
        "files": {"command": "npx", "args": ["-y", FILES, str(folder)]},
        "fetch": {"command": python, "args": ["-m", "mcp_server_fetch", "--ignore-robots-txt"]},
        "time": {"command": python, "args": ["-m", "mcp_server_time"]},
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    with serving(with_mcp(folder / "mcp.json"), partner=Caller()) as (ws, state, _):
        assert state.tool_servers
        connections = state.tool_servers.connections
        end_s = time.monotonic() + START_S
        while any(connection.problem for connection in connections.values()):
            assert time.monotonic() < end_s, {label: c.problem for label, c in connections.items()}
            time.sleep(0.1)
        yield Running(ws, folder, state.tool_servers)


def called(running: Running, name: str, **arguments: Any) -> dict[str, Any]:
    """Have the model call a tool. Return the `mcp_call` with its result."""

    async def main() -> dict[str, Any]:
        async with websockets.connect(f"{running.ws}/v1/realtime?model=default", max_size=None) as socket:
            client = ConversationClient(socket)
            await client.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            await ask(client, name, arguments)
            while True:
                item = (await client.until("conversation.item.done"))["item"]
                if item["type"] == "mcp_call":
                    await client.until("response.done")
                    return dict(item)

    return asyncio.run(main())


async def ask(client: ConversationClient, name: str, arguments: dict[str, Any]) -> None:
    await client.text(f"call {name} {json.dumps(arguments)}")
    await client.say("response.create")


def test_files_are_read_and_others_are_refused(running: Running) -> None:
    found = called(running, "read_text_file", path=str(running.folder / "shop.txt"))
    assert found["output"] == "Open from nine to five."
    refused = called(running, "read_text_file", path="/etc/passwd")
    assert refused["error"]["type"] == "tool_execution_error"
    assert "denied" in refused["error"]["message"]


def test_the_time_of_another_place(running: Running) -> None:
    found = called(running, "convert_time", source_timezone="Europe/Berlin", time="12:00", target_timezone="Asia/Tokyo")
    assert "+7.0h" in found["output"] or "+8.0h" in found["output"]


def test_a_page_is_fetched(running: Running) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body><h1>Hours</h1><p>Open from nine to five.</p></body></html>")

        def log_message(self, format: str, *args: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        found = called(running, "fetch", url=f"http://127.0.0.1:{site.server_address[1]}/")
        site.shutdown()
    assert "Open from nine to five." in found["output"]


def test_an_image_is_mentioned_and_a_sum_is_right(running: Running) -> None:
    assert "image" in called(running, "get-tiny-image")["output"]
    assert "12" in called(running, "get-sum", a=5, b=7)["output"]


def test_a_call_of_thirty_seconds_while_the_user_asks_other_things(running: Running) -> None:
    async def main() -> tuple[float, int, dict[str, Any]]:
        async with websockets.connect(f"{running.ws}/v1/realtime?model=default", max_size=None) as socket:
            client = ConversationClient(socket)
            await client.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            began_s = time.monotonic()
            await ask(client, "trigger-long-running-operation", {"duration": 30, "steps": 3})
            await client.until("response.mcp_call.in_progress")
            answered = 0
            while time.monotonic() - began_s < 25:
                await client.text(f"Question {answered}.")
                await client.say("response.create")
                done = await client.until("response.done")
                assert f"Question {answered}." in json.dumps(done)
                answered += 1
                await asyncio.sleep(2)
            await client.until("response.mcp_call.completed")
            took_s = time.monotonic() - began_s
            return took_s, answered, await client.until("response.done")

    took_s, answered, last = asyncio.run(main())
    assert took_s >= 29
    assert answered >= 8
    assert "completed" in json.dumps(last["response"]["output"])


def test_a_server_that_dies_in_a_call_fails_it_and_is_started_again(running: Running) -> None:
    async def main() -> dict[str, Any]:
        async with websockets.connect(f"{running.ws}/v1/realtime?model=default", max_size=None) as socket:
            client = ConversationClient(socket)
            await client.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            await ask(client, "trigger-long-running-operation", {"duration": 50, "steps": 5})
            await client.until("response.mcp_call.in_progress")
            for child in psutil.Process().children(recursive=True):
                if "server-everything" in " ".join(child.cmdline()):
                    child.kill()
            await client.until("response.mcp_call.failed")
            await client.until("conversation.item.done")
            return dict(client.seen[-1]["item"])

    assert asyncio.run(main())["error"]["type"] in ("protocol_error", "http_error")
    connection = running.tools.connections["everything"]
    end_s = time.monotonic() + START_S
    while connection.problem or not connection.tools:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert "Echo: Hello" in called(running, "echo", message="Hello")["output"]
