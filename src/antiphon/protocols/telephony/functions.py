"""The functions that a model may call on the telephone, and how a call is described to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value, decode
from antiphon.protocols.telephony.stream import Call

HANG_UP, SEND_DIGITS, TRANSFER = "hang_up", "send_digits", "transfer"
# Most keys that one call of `send_digits` may send.
MAX_DIGITS = 64


class _Digits(msgspec.Struct):
    digits: str


class _Transfer(msgspec.Struct):
    to: str


# The functions, as tools of a session.
TOOLS = msgspec.Raw(
    b'[{"type": "function", "name": "hang_up", "description": "End the telephone call. Say goodbye first.", '
    b'"parameters": {"type": "object", "properties": {}, "required": []}}, '
    b'{"type": "function", "name": "send_digits", '
    b'"description": "Press keys of the telephone, for a menu of the other side.", '
    b'"parameters": {"type": "object", "properties": {"digits": {"type": "string"}}, '
    b'"required": ["digits"]}}]'
)


_TRANSFER_TOOL = (
    b'{"type": "function", "name": "transfer", '
    b'"description": "Transfer the telephone call to somebody else, and leave it. Tell the caller first.", '
    b'"parameters": {"type": "object", "properties": {"to": {"type": "string", "enum": %b}}, "required": ["to"]}}'
)


def digits_in(arguments: str) -> str:
    """Return the keys in the arguments of `send_digits`. Raises RemoteProtocolError for other arguments."""
    digits = decode(arguments, _Digits).digits.upper().replace(" ", "").replace("-", "")
    if not 0 < len(digits) <= MAX_DIGITS or set(digits) - set("0123456789ABCD*#"):
        raise RemoteProtocolError("invalid_value", f"'digits' are 1 to {MAX_DIGITS} of 0-9, A-D, * and #.", "digits")
    return digits


def transfer_in(arguments: str, targets: Mapping[str, str]) -> str:
    """Return the target that the arguments of `transfer` name. Raises RemoteProtocolError for other arguments."""
    target = targets.get(decode(arguments, _Transfer).to, "")
    if not target:
        raise RemoteProtocolError("invalid_value", f"'to' is one of these names: {', '.join(targets)}.", "to")
    return target


def _transfer_tool(names: Sequence[str]) -> msgspec.Raw:
    return msgspec.Raw(_TRANSFER_TOOL % msgspec.json.encode(list(names)))


def session_of(configured: msgspec.Raw, call: Call, instructions: str, transfers: Sequence[str] = ()) -> msgspec.Raw:
    """Return the session of a call, with the fields of a `session.update`: the configured one, with the functions.

    `configured`: the session of a client secret; null if there is none. `instructions`: those of a session that has
    none. The instructions then say who calls. `transfers`: the names of those to whom the call may be transferred. A
    tool with the name of a function replaces its description. Raises RemoteProtocolError if it is not JSON.
    """
    session = any_value(configured) or {}
    own = session.get("tools") or []
    names = {tool.get("name") for tool in own if isinstance(tool, dict)}
    offered = [*any_value(TOOLS), *([any_value(_transfer_tool(transfers))] if transfers else [])]
    tools = [*own, *(tool for tool in offered if tool["name"] not in names)]
    text = " ".join(filter(None, (session.get("instructions") or instructions, described(call))))
    update = {"type": "realtime", **session, "instructions": text, "tools": tools}
    return msgspec.Raw(msgspec.json.encode(update))


def described(call: Call) -> str:
    """Return what the instructions say about a call: the numbers and the parameters; "" if none is known.

    It is JSON, so that no text of a caller reads like an instruction.
    """
    known = {"from": call.caller, "to": call.called, **call.parameters}
    known = {name: value for name, value in known.items() if value}
    return f"Facts about this call: {msgspec.json.encode(known).decode()}" if known else ""
