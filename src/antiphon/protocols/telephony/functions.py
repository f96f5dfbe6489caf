"""The functions that a model may call on the telephone, and how a call is described to the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import TELEPHONE, Tool
from antiphon.protocols.fields import any_value, decode
from antiphon.protocols.telephony.stream import Call

# The label of the functions, as that of a tool server.
LABEL = TELEPHONE
_DIGITS_SCHEMA = {"type": "object", "properties": {"digits": {"type": "string"}}, "required": ["digits"]}
HANG_UP = Tool("hang_up", "End the telephone call. Say goodbye first.", {"type": "object", "properties": {}}, LABEL)
SEND_DIGITS = Tool("send_digits", "Press keys of the telephone, for a menu of the other side.", _DIGITS_SCHEMA, LABEL)
TRANSFER = "transfer"
# Most keys that one call of `send_digits` may send.
MAX_DIGITS = 64
# Matches a number as it is written, and the address of SIP.
_NUMBER = re.compile(r"(?:tel:)?(\+?[0-9][0-9 ()./-]{1,30})")
_SIP = re.compile(r"sips?:[^\s<>\"]{1,200}")


class _Digits(msgspec.Struct):
    digits: str


class _Transfer(msgspec.Struct):
    to: str


def digits_in(arguments: str) -> str:
    """Return the keys in the arguments of `send_digits`. Raises RemoteProtocolError for other arguments."""
    digits = decode(arguments, _Digits).digits.upper().replace(" ", "").replace("-", "")
    if not 0 < len(digits) <= MAX_DIGITS or set(digits) - set("0123456789ABCD*#"):
        raise RemoteProtocolError("invalid_value", f"'digits' are 1 to {MAX_DIGITS} of 0-9, A-D, * and #.", "digits")
    return digits


def transfer_tool(names: Sequence[str]) -> Tool:
    """Return the function `transfer` to the targets with these names."""
    schema = {"type": "object", "properties": {"to": {"type": "string", "enum": list(names)}}, "required": ["to"]}
    return Tool(TRANSFER, "Connect the caller with somebody else, and leave. Tell the caller first.", schema, LABEL)


def transfer_in(arguments: str, transfers: Mapping[str, str]) -> str:
    """Return the target that the arguments of `transfer` name. Raises RemoteProtocolError for other arguments."""
    target = transfers.get(decode(arguments, _Transfer).to, "")
    if not target:
        raise RemoteProtocolError("invalid_value", f"'to' is one of: {', '.join(transfers)}.", "to")
    return target


def target_of(text: str, param: str) -> str:
    """Return a telephone number without spaces and signs between its digits, or an address of SIP as it is.

    Raises RemoteProtocolError (`invalid_value`) for another text.
    """
    if _SIP.fullmatch(text):
        return text
    if found := _NUMBER.fullmatch(text.strip()):
        return re.sub(r"[^0-9+]", "", found[1])
    raise RemoteProtocolError(
        "invalid_value", f"'{param}' is no telephone number, as +4930123456, and no SIP URI.", param
    )


def session_of(configured: msgspec.Raw, call: Call, instructions: str) -> msgspec.Raw:
    """Return the session of a call, with the fields of a `session.update`: the configured one, which says who calls.

    `configured`: the session of a client secret; null if there is none. `instructions`: those of a session that has
    none. Raises RemoteProtocolError if it is not JSON.
    """
    session = any_value(configured) or {}
    text = " ".join(filter(None, (session.get("instructions") or instructions, described(call))))
    return msgspec.Raw(msgspec.json.encode({"type": "realtime", **session, "instructions": text}))


def described(call: Call) -> str:
    """Return what the instructions say about a call: the numbers and the parameters; "" if none is known.

    It is JSON, so that no text of a caller reads like an instruction.
    """
    direction = {"direction": "you have called"} if call.is_outgoing else {}
    known = {**direction, "from": call.caller, "to": call.called, **call.parameters}
    known = {name: value for name, value in known.items() if value}
    return f"Facts about this call: {msgspec.json.encode(known).decode()}" if known else ""
