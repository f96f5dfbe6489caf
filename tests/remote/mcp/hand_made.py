"""MCP servers that break the rules, written by hand: python -m tests.remote.mcp.hand_made MODE, or `site` over HTTP.

The modes are the functions of `answers`; in other modes the server is plain, with the tool `echo`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}}


def tool(name: str, schema: Any = OBJECT, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema} | fields


def tools_of(mode: str, cursor: str | None) -> dict[str, Any]:
    """Return a page of the list of tools."""
    match mode:
        case "many":
            at = int(cursor or 0)
            page = {"tools": [tool(f"tool_{number}") for number in range(at, at + 100)]}
            return page | ({"nextCursor": str(at + 100)} if at < 400 else {})
        case "endless":
            return {"tools": [tool("echo")], "nextCursor": "again"}
        case "schemas":
            return {"tools": [tool("echo"), tool("wrong", {"type": "object", "properties": {"a": {"type": 5}}})]}
        case "no_schema":
            return {"tools": [tool("echo"), tool("none", None)]}
        case "twice":
            return {"tools": [tool("echo"), tool("echo", description="The other one.")]}
        case "delete":
            return {"tools": [tool("echo", annotations={"readOnlyHint": True}), tool("delete")]}
    return {"tools": [tool("echo")]}


def called(mode: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    match mode:
        case "empty":
            return {"content": []}
        case "picture":
            image = {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}
            return {"content": [{"type": "text", "text": "A picture."}, image]}
        case "large":
            return {"content": [{"type": "text", "text": "a" * 5_000_000}]}
        case "wrong_form":
            return {"content": "not a list"}
    return {"content": [{"type": "text", "text": f"{params['name']} {json.dumps(params.get('arguments'))}"}]}


def answer(mode: str, message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message, if it gets one."""
    number, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if number is None or mode == "silent":
        return None
    if mode == "error_at_once":
        return {"jsonrpc": "2.0", "id": number, "error": {"code": -32000, "message": "It is broken."}}
    if method == "initialize":
        info = {"name": "hand-made", "version": "1"}
        version = params.get("protocolVersion", "2025-06-18")
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        result = tools_of(mode, params.get("cursor"))
    elif method == "tools/call":
        if mode == "hanging":
            return None
        if mode == "other_id":
            number += 1000
        if mode == "error":
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32000, "message": "It is broken."}}
        result = called(mode, params)
    else:
        return {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "Method not found"}}
    return {"jsonrpc": "2.0", "id": number, "result": result}


@dataclass
class Site:
    """A server over HTTP. `requests` has the path and the headers of each request."""

    mode: str
    port: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    # The address to which it redirects, if any.
    redirects_to: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"


@contextmanager
def site(mode: str = "plain") -> Iterator[Site]:
    """Run a server over HTTP while the block runs."""
    made = Site(mode)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            made.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            body = self.rfile.read(int(self.headers["content-length"]))
            if made.redirects_to:
                self.respond(307, b"", location=made.redirects_to)
            elif given := answer(made.mode, json.loads(body)):
                self.respond(200, json.dumps(given).encode(), content_type="application/json")
            else:
                self.respond(202, b"")

        def do_GET(self) -> None:
            self.respond(405, b"")

        def do_DELETE(self) -> None:
            self.respond(405, b"")

        def respond(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    for line in sys.stdin:
        if found := answer(sys.argv[1], json.loads(line)):
            print(json.dumps(found), flush=True)
