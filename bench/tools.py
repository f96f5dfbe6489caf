"""Calls of an MCP server's tool: by the library alone, by this server's client, and within conversations.

    python -m bench.tools [--sections client,session] [--calls 200] [--sessions 1,8]

The MCP server is a process of this benchmark, whose tool returns at once. Its time for a call is what the MCP library
alone takes. What this server adds is the rest: in `client`, of a call of its client, in turns with the library; in
`session`, from `response.mcp_call.in_progress` to `.completed`, as a client over a WebSocket has them. The language
model is another process, which calls the tool once in each turn, and repeats the result.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from bench.common import HERE, Server, beside, measured, numbers, options, percentile, server, show, together
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from websockets.asyncio.client import connect

from antiphon.events.tools import Tool
from antiphon.remote.allowed_hosts import AllowedHosts
from antiphon.remote.mcp.config import McpServer
from antiphon.remote.mcp.servers import McpServers

WARM_UP = 5
STDIO = (sys.executable, "-m", "bench.tools", "--serve", "stdio")
# MCP servers that are started here get few variables of the environment.
ENV = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


# --- the other processes ----------------------------------------------------------------------------------------------


def serve_tool(transport: str) -> None:
    """Serve a tool that returns at once, over standard input and output, or over HTTP at a port that is printed."""
    tools = MCPServer("bench", log_level="ERROR")

    @tools.tool()
    def repeat(text: str) -> str:
        """Repeat a text."""
        return text

    if transport == "stdio":
        tools.run()
        return
    port = free_port()
    print(port, flush=True)
    tools.run(transport="streamable-http", port=port)


def serve_model() -> None:
    """Serve a language model that calls the tool for each message of a user, and repeats its result."""
    function = {"name": "repeat", "arguments": '{"text": "x"}'}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "calls", "object": "model", "owned_by": "bench"}]})

    async def chat(request: Request) -> StreamingResponse:
        last = (await request.json())["messages"][-1]
        is_result = last["role"] == "tool"
        delta = {"content": last["content"]} if is_result else {"tool_calls": [call]}
        reason = "stop" if is_result else "tool_calls"

        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"
            yield f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': reason}]})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    port = free_port()
    print(port, flush=True)
    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="error")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# --- the client alone -------------------------------------------------------------------------------------------------


async def take(_: Sequence[Tool]) -> None:
    """Accept all schemas."""


@asynccontextmanager
async def ours(given: McpServer) -> AsyncGenerator[McpServers, None]:
    servers = McpServers({"bench": given}, take, AllowedHosts((), "--mcp-from-clients"))
    task = asyncio.create_task(servers.run())
    try:
        assert await servers.connections["bench"].listed()
        yield servers
    finally:
        task.cancel()
        await asyncio.wait([task])


async def timed_ms(call: Any) -> float:
    begun = time.perf_counter()
    await call()
    return (time.perf_counter() - begun) * 1000


async def beside_library(library: Any, given: McpServer, calls: int) -> dict[str, float]:
    """Return the milliseconds of calls by the library alone and by this server's client, made in turns."""
    arguments = {"text": "x"}
    alone, own = list[float](), list[float]()
    async with Client(library) as client, ours(given) as servers:
        for _ in range(WARM_UP + calls):
            alone.append(await timed_ms(lambda: client.call_tool("repeat", arguments)))
            own.append(await timed_ms(lambda: servers.call("bench", "repeat", '{"text": "x"}')))
    return figures(alone[WARM_UP:], "alone") | figures(own[WARM_UP:], "own")


def figures(values: Sequence[float], name: str) -> dict[str, float]:
    return {f"{name}_{q}_ms": round(percentile(values, q), 2) for q in (50, 95)}


def client_section(calls: int) -> dict[str, Any]:
    found = {}
    with tool_over_http() as url:
        command, *arguments = STDIO
        program = StdioServerParameters(command=command, args=arguments, env=ENV, cwd=str(HERE.parent))
        local = McpServer(command, tuple(arguments), ENV, str(HERE.parent))
        for name, library, given in (("stdio", program, local), ("http", url, McpServer(url=url))):
            found[name] = asyncio.run(beside_library(library, given, calls))
            found[name]["added_50_ms"] = round(found[name]["own_50_ms"] - found[name]["alone_50_ms"], 2)
    show("one call", found)
    return found


@contextmanager
def tool_over_http() -> Iterator[str]:
    """Serve the tool over HTTP. Yields its URL when it accepts connections."""
    with beside("bench.tools", "--serve", "http") as (port, _):
        for _ in range(200):
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"


# --- within conversations ---------------------------------------------------------------------------------------------


async def conversation(srv: Server, calls: int, _: int) -> tuple[list[float], list[float]]:
    """Make calls in a conversation. Return the milliseconds of each, and those from its end to the next response."""
    took, waited = list[float](), list[float]()
    async with connect(f"{srv.ws}/v1/realtime?model=default") as socket:

        async def say(kind: str, **fields: Any) -> None:
            await socket.send(json.dumps({"type": kind} | fields))

        async def until(kind: str) -> float:
            while json.loads(await socket.recv())["type"] != kind:
                pass
            return time.perf_counter()

        await say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        await until("session.updated")
        for _ in range(WARM_UP + calls):
            content = [{"type": "input_text", "text": "Repeat x."}]
            await say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            await say("response.create")
            began_s = await until("response.mcp_call.in_progress")
            ended_s = await until("response.mcp_call.completed")
            took.append((ended_s - began_s) * 1000)
            waited.append((await until("response.created") - ended_s) * 1000)
            await until("response.done")
    return took[WARM_UP:], waited[WARM_UP:]


def session_section(calls: int, sessions: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    command, *arguments = STDIO
    with tempfile.TemporaryDirectory() as folder, tool_over_http() as url, model() as address:
        kinds = {
            "stdio": {"command": command, "args": arguments, "env": ENV, "cwd": str(HERE.parent)},
            "http": {"url": url},
        }
        for kind, given in kinds.items():
            file = Path(folder) / f"{kind}.json"
            file.write_text(json.dumps({"mcpServers": {"bench": given}}))
            with server("--language-model", address, "--synthesizer", "none", "--mcp", str(file)) as srv:
                while not srv.metric('antiphon_tools{server="bench"}'):
                    time.sleep(0.1)
                for count in sessions:
                    made = asyncio.run(together(count, partial(conversation, srv, calls)))
                    took = [ms for each, _ in made for ms in each]
                    waited = [ms for _, each in made for ms in each]
                    found[f"{kind}, {count}"] = figures(took, "call") | figures(waited, "next")
    show("calls in conversations, by the number of sessions", found)
    return found


@contextmanager
def model() -> Iterator[str]:
    with beside("bench.tools", "--serve", "model") as (port, _):
        yield f"http://127.0.0.1:{port}/v1#calls"


def main() -> None:
    parser = options("bench.tools", __doc__, ("client", "session"))
    parser.add_argument("--calls", type=int, default=200, help="calls of each kind [%(default)s]")
    parser.add_argument("--sessions", type=numbers, default=[1, 8], help="conversations at once [1,8]")
    parser.add_argument("--serve", choices=("stdio", "http", "model"), help="one of the other processes")
    asked = parser.parse_args()
    if asked.serve == "model":
        serve_model()
    elif asked.serve:
        serve_tool(asked.serve)
    else:
        measured(
            "tools",
            asked.sections,
            {
                "client": partial(client_section, asked.calls),
                "session": partial(session_section, asked.calls, asked.sessions),
            },
            calls=asked.calls,
        )


if __name__ == "__main__":
    main()
