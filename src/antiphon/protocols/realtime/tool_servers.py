"""Tool servers in a session's `tools`, as in OpenAI's Realtime API: tools of the type `mcp`.

docs/wire/openai-realtime.md describes them. The functions raise RemoteProtocolError with the path of the field at
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import NamedServer, ToolFilter
from antiphon.protocols.fields import Text, any_value, decode, decode_named

# Checks a server that a client names. The second argument is the path of its tool. Raises RemoteProtocolError if the
# operator has no server of this name, or does not allow its URL.
CheckServer = Callable[[NamedServer, str], None]
# Maximum number of servers that a session may name.
MAX_SERVERS = 8
# The fields of a tool that are not shown and not stored.
SECRETS = ("authorization", "headers")


class ToolType(msgspec.Struct):
    """The type of a tool. It decides how the other fields are read."""

    type: Text = "function"


class FilterFields(msgspec.Struct, forbid_unknown_fields=True):
    """Some tools of a server, as a client names them."""

    tool_names: list[Text] | None = None
    read_only: bool | None = None


class ApprovalRules(msgspec.Struct, forbid_unknown_fields=True):
    """The object form of `require_approval`: the tools whose calls have to be approved, and those whose do not."""

    always: FilterFields | None = None
    never: FilterFields | None = None


class ServerFields(msgspec.Struct):
    """A tool of the type `mcp`, as a client sends it."""

    # The server's name in the session, or in the operator's settings.
    server_label: Text
    # Missing: the operator's server with this label.
    server_url: Text | None = None
    # Sent to the server as a bearer token.
    authorization: Text | None = None
    # Sent to the server with each request.
    headers: dict[Text, Text] | None = None
    # The tools that the model may call; null: all.
    allowed_tools: list[Text] | FilterFields | None = None
    # The tools whose calls have to be approved: `always`, `never`, or some. Missing: those of a server at a URL.
    require_approval: Text | ApprovalRules | None = None
    # Accepted, but has no effect.
    server_description: Text | None = None
    # Refused unless null or false: a hosted service has them.
    connector_id: msgspec.Raw = msgspec.Raw(b"null")
    # See `connector_id`.
    tunnel_id: msgspec.Raw = msgspec.Raw(b"null")
    # See `connector_id`.
    defer_loading: msgspec.Raw = msgspec.Raw(b"null")
    # Has to contain `direct`.
    allowed_callers: list[Text] | None = None


def no_servers(server: NamedServer, param: str) -> None:
    """Raise RemoteProtocolError: a CheckServer for a server without tool servers."""
    message = "This server has no tool servers, and connects to none that a client names."
    raise RemoteProtocolError("invalid_value", message, f"{param}.server_label")


def names_server(tool: msgspec.Raw, where: str = "tools") -> bool:
    """Return whether a tool names a tool server. `where` is the path of the tool."""
    return decode(tool, ToolType, where).type == "mcp"


def servers_from(
    tools: Sequence[msgspec.Raw],
    param: str,
    headers: Mapping[str, Mapping[str, str]] | None,
    check: CheckServer | None = None,
) -> tuple[NamedServer, ...]:
    """Read the tool servers in a list of tools. `headers`: the headers of each, by its label, see `headers_of`. None:
    the list is for one response, which uses the servers of the session and connects to no others.
    """
    servers: dict[str, NamedServer] = {}
    for i, raw in enumerate(tools):
        where = f"{param}[{i}]"
        if not names_server(raw, where):
            continue
        given = decode_named(raw, ServerFields, where)
        for name in ("server_url", *SECRETS) if headers is None else ():
            if getattr(given, name) is not None:
                message = f"A response uses the tool servers of the session: give '{name}' in 'session.tools'."
                raise RemoteProtocolError("invalid_value", message, f"{where}.{name}")
        server = _server(given, where, headers or {})
        if check:
            check(server, where)
        if server.label in servers or len(servers) == MAX_SERVERS:
            message = f"A session may name {MAX_SERVERS} tool servers, each with a label of its own."
            raise RemoteProtocolError("invalid_value", message, f"{where}.server_label")
        servers[server.label] = server
    return tuple(servers.values())


def headers_of(tools: Sequence[msgspec.Raw], param: str) -> dict[str, dict[str, str]]:
    """Return the headers for each tool server in a list of tools, by its label."""
    found: dict[str, dict[str, str]] = {}
    for i, raw in enumerate(tools):
        if names_server(raw, f"{param}[{i}]"):
            given = decode_named(raw, ServerFields, f"{param}[{i}]")
            found[given.server_label] = dict(given.headers or {})
            if given.authorization:
                found[given.server_label]["Authorization"] = f"Bearer {given.authorization}"
    return found


def shown_tool(tool: msgspec.Raw) -> msgspec.Raw:
    """Return a tool as the client sees it: without the headers for a tool server."""
    if not names_server(tool):
        return tool.copy()
    shown = {name: value for name, value in any_value(tool).items() if name not in SECRETS}
    return msgspec.Raw(msgspec.json.encode(shown))


def _server(given: ServerFields, where: str, headers: Mapping[str, Mapping[str, str]]) -> NamedServer:
    for name in ("connector_id", "tunnel_id", "defer_loading"):
        if any_value(getattr(given, name), f"{where}.{name}") not in (None, False):
            raise RemoteProtocolError("invalid_value", f"'{name}' is not supported.", f"{where}.{name}")
    if given.allowed_callers is not None and "direct" not in given.allowed_callers:
        raise RemoteProtocolError("invalid_value", "Supported values are: 'direct'.", f"{where}.allowed_callers")
    allowed = given.allowed_tools
    if isinstance(allowed, list):
        allowed = FilterFields(allowed)
    asked = given.require_approval
    if isinstance(asked, str) and asked not in ("always", "never"):
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value: '{asked}'. Supported values are: 'always', 'never'.",
            f"{where}.require_approval",
        )  # fmt: skip
    rules = asked if isinstance(asked, ApprovalRules) else ApprovalRules()
    return NamedServer(
        given.server_label,
        given.server_url or "",
        headers.get(given.server_label, {}),
        _filter(allowed) if allowed else ToolFilter(),
        _filter(rules.always) if rules.always else None,
        _filter(rules.never) if rules.never else None,
        asks=asked not in ("never", None) or (asked is None and bool(given.server_url)),
    )


def _filter(given: FilterFields) -> ToolFilter:
    return ToolFilter(None if given.tool_names is None else tuple(given.tool_names), given.read_only)
