"""An MCP server for tests: python -m tests.remote.mcp.demo_server [stdio | PORT] [NOTES].

It writes the names of the calls that were cancelled into the file NOTES.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("demo")
NOTES = Path(sys.argv[2]) if len(sys.argv) > 2 else None


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        if NOTES:
            NOTES.write_text("wait")
        raise
    return "waited"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("a secret of the server")


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(1)


@server.tool()
def recite(characters: int) -> str:
    """Recite a long text."""
    return "a" * characters


@server.tool()
def paint() -> Image:
    """Paint."""
    return Image(data=b"\x89PNG\r\n\x1a\n", format="png")


@server.tool()
def nothing() -> None:
    """Do nothing."""


@server.tool()
async def rename(ctx: Context) -> str:
    """Rename the tool `add` to `sum`."""
    server.remove_tool("add")
    server.add_tool(add, "sum")
    await ctx.notify_tools_changed()
    return "renamed"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
