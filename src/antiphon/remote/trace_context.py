"""The turn that the running task works for, for whoever calls another server: its `traceparent` (W3C Trace Context)."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT = "traceparent"
_VALID = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(slots=True)
class CurrentTurn:
    """The turn of one session that is under way. `traceparent`: "" while there is none."""

    traceparent: str = ""


_current: ContextVar[CurrentTurn] = ContextVar("turn")


def follow_session() -> CurrentTurn:
    """Return what this task, and those that it begins, look up; the session's owner keeps it up to date."""
    found = CurrentTurn()
    _current.set(found)
    return found


def current_traceparent() -> str:
    """Return the `traceparent` of the turn that this task works for; "" for none."""
    found = _current.get(None)
    return found.traceparent if found else ""


def trace_headers() -> dict[str, str]:
    """Return the header that says for which turn another server is asked; none outside of a turn."""
    found = current_traceparent()
    return {TRACEPARENT: found} if found else {}


def valid_traceparent(text: str) -> str:
    """Return a header's value where it is one of version 00, else ""."""
    return text if _VALID.fullmatch(text) else ""
