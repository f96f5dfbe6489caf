"""The `traceparent` (W3C Trace Context) of the running task's turn, sent with requests to other servers."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT = "traceparent"
_VALID = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(slots=True)
class CurrentTurn:
    """The open turn of one session. `traceparent`: "" if no turn is open."""

    traceparent: str = ""


_current: ContextVar[CurrentTurn] = ContextVar("turn")


def follow_session() -> CurrentTurn:
    """Return the CurrentTurn of this task and of the tasks that it creates. The session's owner keeps it up to date."""
    found = CurrentTurn()
    _current.set(found)
    return found


def current_traceparent() -> str:
    """Return the `traceparent` of the turn that this task works for; "" outside of a turn."""
    found = _current.get(None)
    return found.traceparent if found else ""


def trace_headers() -> dict[str, str]:
    """Return the header that tells another server for which turn it is called; empty outside of a turn."""
    found = current_traceparent()
    return {TRACEPARENT: found} if found else {}


def valid_traceparent(text: str) -> str:
    """Return a header's value if it is a valid one of version 00, else ""."""
    return text if _VALID.fullmatch(text) else ""
