"""The file of `--mcp`: what it may contain, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import SettingsError
from antiphon.remote.mcp.config import TIMEOUT_S, McpServer, read_mcp_file


def written(folder: Path, data: Any) -> Path:
    file = folder / "mcp.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_the_form_that_mcp_clients_share_is_read(tmp_path: Path) -> None:
    servers = {
        "files": {"command": "npx", "args": ["-y", "server", "/data"], "env": {"A": "b"}, "type": "stdio"},
        "home": {
            "url": "https://host/mcp",
            "headers": {"Authorization": "Bearer ${TOKEN}"},
            "tools": ["on"],
            "timeout": 5,
        },
    }
    read = read_mcp_file(written(tmp_path, {"mcpServers": servers}), {"TOKEN": "secret"})
    assert read == {
        "files": McpServer("npx", ("-y", "server", "/data"), {"A": "b"}, type="stdio"),
        "home": McpServer(
            url="https://host/mcp", headers={"Authorization": "Bearer secret"}, tools=("on",), timeout_s=5
        ),
    }
    assert read["files"].timeout_s == TIMEOUT_S


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "Input data was truncated"),
        ({}, "missing required field `mcpServers`"),
        ({"mcpServers": {"a": {"comand": "x"}}}, "unknown field `comand`"),
        ({"mcpServers": {"a": {}}}, "a: expected either `command` or `url`"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://y"}}}, "a: expected either `command` or `url`"),
        ({"mcpServers": {"a": {"url": "file:///etc"}}}, "no http:// or https:// address"),
        ({"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}, "type 'sse' is not supported"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "a b: a name has up to 32 letters"),
        ({"mcpServers": {"a__b": {"command": "x"}}}, "a__b: a name has up to 32 letters"),
        ({"mcpServers": {"a": {"command": "x", "timeout": 0}}}, "`timeout` is a number of seconds up to 600"),
        ({"mcpServers": {"a": {"command": "x", "env": {"K": "${NONE}"}}}}, "environment variable NONE is not set"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, data: Any, says: str) -> None:
    file = written(tmp_path, data)
    with pytest.raises(SettingsError, match=f"--mcp {file}") as refused:
        read_mcp_file(file, {})
    assert says in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_mcp_file(tmp_path / "none.json", {})
