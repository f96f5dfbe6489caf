"""The MCP servers that `--mcp` names, and those that clients may name (`--mcp-from-clients`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from antiphon.engine.schemas import check_schemas
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import NamedServer, Tool
from antiphon.extras import missing_packages, require_extra
from antiphon.remote.allowed_hosts import AllowedHosts
from antiphon.remote.mcp.config import is_label, read_mcp_file
from antiphon.remote.mcp.servers import McpServers
from antiphon.settings import Settings
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread

FLAG, CLIENTS_FLAG = "--mcp", "--mcp-from-clients"
# Imported at the start, because imports take up to a second. The MCP library itself imports the second one only when
# the first result arrives, in the event loop.
LIBRARIES = ("mcp.client", "jsonschema")


def open_mcp(settings: Settings) -> McpServers | None:
    """Return the servers of `--mcp`, not connected yet; None without it, unless clients may name servers.

    Raises SettingsError if the file or a host is invalid, or if the extra is not installed.
    """
    tools = settings.tools
    if not (tools.mcp or tools.mcp_from_clients):
        return None
    require_extra("mcp", FLAG if tools.mcp else CLIENTS_FLAG)
    for name in LIBRARIES:
        import_module(name)
    servers = read_mcp_file(Path(tools.mcp), os.environ) if tools.mcp else {}
    return McpServers(servers, _check, AllowedHosts(tools.mcp_from_clients, CLIENTS_FLAG))


def check_server(servers: McpServers | None, server: NamedServer, param: str) -> None:
    """Raise RemoteProtocolError if a client may not name a tool server. `param`: the path of its tool."""
    own = servers.connections if servers else {}
    if not is_label(server.label):
        what = "a label has up to 32 letters, digits, - and single _"
    elif server.url and not (servers and servers.hosts):
        what = f"this server connects to none of a client's, unless it is started with {CLIENTS_FLAG}"
        raise RemoteProtocolError("invalid_value", f"Invalid value: {what}.", f"{param}.server_url")
    elif server.url and server.label in own:
        what = f"'{server.label}' is a tool server of this server's: choose another label, or leave `server_url` out"
    elif server.url and servers:
        servers.hosts.check(server.url, f"{param}.server_url")
        return
    elif server.label not in own:
        what = f"this server has no tool server '{server.label}'"
    else:
        return
    raise RemoteProtocolError("invalid_value", f"Invalid value: {what}.", f"{param}.server_label")


async def _check(tools: Sequence[Tool]) -> None:
    # Without the extra, no model that is loaded here constrains its calls.
    if not missing_packages("talk"):
        schemas = [tool.parameters for tool in tools]
        await in_thread(partial(check_schemas, schemas, together=True), places=GRAMMAR_THREADS)
