"""The MCP servers that `--mcp` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from antiphon.engine.schemas import check_schemas
from antiphon.events.tools import Tool
from antiphon.extras import missing_packages, require_extra
from antiphon.remote.mcp.config import read_mcp_file
from antiphon.remote.mcp.servers import McpServers
from antiphon.settings import Settings
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread


def open_mcp(settings: Settings) -> McpServers | None:
    """Return the servers of `--mcp`, not connected yet; None without it. Raises SettingsError if the file is invalid,
    or if the extra is not installed.
    """
    file = settings.tools.mcp
    if not file:
        return None
    require_extra("mcp", "--mcp")
    return McpServers(read_mcp_file(Path(file), os.environ), _check)


async def _check(tools: Sequence[Tool]) -> None:
    # Without the extra, no model that is loaded here constrains its calls.
    if not missing_packages("talk"):
        schemas = [tool.parameters for tool in tools]
        await in_thread(partial(check_schemas, schemas, together=True), places=GRAMMAR_THREADS)
