"""The contract of tool servers: functions that the server's operator has added to all conversations."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.tools import Tool, ToolResult


class ToolServers(Protocol):
    """The tool servers of one process. All sessions share them. Used in one event loop."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the servers offer now, each with the label of its server. It changes when a server changes
        its list, is lost, or is reached again.
        """
        ...

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result, for a limited time. If the caller is cancelled, so is the call, where
        the server can cancel calls. Raises nothing: a failed call has a result that says so.

        `server` is the label of the tool's server. `arguments` is JSON text, as a model wrote it.
        """
        ...
