"""The file that lists the MCP servers (`--mcp`), in the form that MCP clients share: an object `mcpServers`.

{"mcpServers": {"files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/data"]},
                "home": {"url": "https://host/mcp", "headers": {"Authorization": "Bearer ${HOME_TOKEN}"}}}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from antiphon.errors import SettingsError

# `${NAME}` in a value stands for an environment variable, so that the file need not contain keys.
_VARIABLE = re.compile(r"\$\{(\w+)\}")
# The label becomes part of function names, which models and other servers restrict to these characters.
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,32}")
# The longest time in seconds that a call may take, if the file does not say otherwise.
TIMEOUT_S = 20.0


class McpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"timeout_s": "timeout"}):
    """One MCP server: a command that is started here and speaks over its standard input and output, or a URL."""

    # The program to start.
    command: str = ""
    # The arguments of the program.
    args: tuple[str, ...] = ()
    # Environment variables of the program, in addition to a few of the server's own, such as PATH.
    env: dict[str, str] = {}
    # The folder in which the program is started.
    cwd: str | None = None
    # The address of a server that speaks streamable HTTP.
    url: str = ""
    # Headers that are sent with each request to the URL, such as Authorization.
    headers: dict[str, str] = {}
    # The kind of server, which other MCP clients require. It has to fit.
    type: str = ""
    # The names of the tools that may be used; None: all.
    tools: tuple[str, ...] | None = None
    # The names of the tools whose calls a client has to approve; or whether it has to approve all.
    approval: bool | tuple[str, ...] = False
    # The longest time in seconds that a call may take.
    timeout_s: float = TIMEOUT_S


class _File(msgspec.Struct):
    # The name is that of the file's object.
    mcpServers: dict[str, McpServer]


def read_mcp_file(file: Path, environment: Mapping[str, str]) -> dict[str, McpServer]:
    """Return the servers of an `mcpServers` file by their labels. Raises SettingsError, which names the file and key.

    `environment`: the values of `${NAME}` in the file.
    """
    flag = f"--mcp {file}"
    try:
        data = msgspec.json.decode(file.expanduser().read_bytes())
        read = msgspec.convert(_with_variables(data, environment), _File)
    except OSError as error:
        raise SettingsError(f"{flag}: {error.strerror or error}") from None
    except KeyError as error:
        raise SettingsError(f"{flag}: the environment variable {error.args[0]} is not set") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{flag}: {error}") from None
    for label, server in read.mcpServers.items():
        if problem := _problem(label, server):
            raise SettingsError(f"{flag}: {label}: {problem}")
    return read.mcpServers


def is_label(label: str) -> bool:
    """Return whether a text may be the label of a server."""
    return bool(_LABEL.fullmatch(label)) and "__" not in label


def _problem(label: str, server: McpServer) -> str:
    if not is_label(label):
        return "a name has up to 32 letters, digits, - and single _"
    if bool(server.command) == bool(server.url):
        return "expected either `command` or `url`"
    if server.url and not re.match(r"https?://[^/\s]", server.url):
        return f"{server.url} is no http:// or https:// address"
    if server.type not in ("", "stdio" if server.command else "http", "streamable-http" if server.url else ""):
        return f"type {server.type!r} is not supported: a `command` is of type stdio, and a `url` of type http"
    if not 0 < server.timeout_s <= 600:
        return "`timeout` is a number of seconds up to 600"
    return ""


def _with_variables(value: Any, environment: Mapping[str, str]) -> Any:
    """Replace `${NAME}` in all texts of a JSON value. Raises KeyError for a variable that is not set."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: environment[found[1]], value)
    if isinstance(value, list):
        return [_with_variables(each, environment) for each in value]
    if isinstance(value, dict):
        return {name: _with_variables(each, environment) for name, each in value.items()}
    return value
