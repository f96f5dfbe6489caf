"""The functions of a telephone call as a tool server: hang up, send digits, transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from antiphon.contracts.language import ToolConnection
from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.tools import NamedServer, Tool, ToolResult
from antiphon.protocols.telephony.functions import (
    HANG_UP,
    LABEL,
    SEND_DIGITS,
    digits_in,
    transfer_in,
    transfer_tool,
)


class ControlledCall(Protocol):
    """What the functions need of the leg of a call."""

    @property
    def transfers(self) -> Mapping[str, str]:
        """The numbers or SIP URIs that the call may be transferred to, by name; {} if it cannot be transferred."""
        ...

    async def hang_up(self) -> None:
        """End the call when its last words were heard. Returns only if the caller interrupts them."""
        ...

    async def transfer_after_words(self, target: str) -> bool:
        """Transfer the call when the last words were heard. Returns False if the caller interrupts them.

        Raises RemoteProtocolError if the carrier refuses.
        """
        ...

    async def send_digits(self, digits: str) -> None:
        """Let the other side hear or get these keys, after the words before them."""
        ...


class CallTools:
    """The functions of one call, as `ToolServers` (contracts/language.py)."""

    def __init__(self, call: ControlledCall) -> None:
        self._call = call

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The functions that this call has."""
        transfers = self._call.transfers
        return (HANG_UP, SEND_DIGITS, *([transfer_tool([*transfers])] if transfers else ()))

    def connection(self, server: NamedServer) -> ToolConnection:
        """Never called: sessions name servers only where there are MCP servers, which connect to them."""
        raise LocalProtocolError(f"{LABEL} connects to no tool server, so not to {server.label}")

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Carry out a function and wait for its result, see ToolServers."""
        try:
            return await self._carry_out(name.removeprefix(f"{LABEL}__"), arguments)
        except RemoteProtocolError as error:
            return ToolResult(error.message, "tool_execution_error")

    async def _carry_out(self, name: str, arguments: str) -> ToolResult:
        match name:
            case HANG_UP.name:
                await self._call.hang_up()
                return ToolResult("not hung up: the caller went on")
            case SEND_DIGITS.name:
                await self._call.send_digits(digits_in(arguments))
                return ToolResult("sent")
            case "transfer" if transfers := self._call.transfers:
                is_done = await self._call.transfer_after_words(transfer_in(arguments, transfers))
                return ToolResult("transferred" if is_done else "not transferred: the caller went on")
            case _:
                return ToolResult(f"There is no function {name}.", "protocol_error")
