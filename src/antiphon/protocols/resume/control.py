"""Events about a connection and not its session: what a client that lost its connection says, and is told. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import require
from antiphon.protocols.wire import NewId, decode_event, frame

# Nothing about a connection is longer.
MAX_BYTES = 4096
CONTROLS = ("session.event_ack", "session.resume")


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What a client shows to take its session up again. `last_received`: the number of the last event it has."""

    session_id: str
    token: str
    last_received: int


def control(data: str | bytes) -> dict[str, Any] | None:
    """The event, if it is about the connection."""
    if len(data) > MAX_BYTES:
        return None
    text = data if isinstance(data, str) else data.decode(errors="replace")
    if not any(name in text for name in CONTROLS):
        return None
    try:
        event = decode_event(data)
    except RemoteProtocolError:
        return None
    return event if event.get("type") in CONTROLS else None


def resume_from(event: dict[str, Any]) -> ResumeRequest:
    """A `session.resume`. Raises RemoteProtocolError (bad_event)."""
    try:
        last = event.get("last_received_server_event_seq", 0)
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            raise RemoteProtocolError("bad_event", "A number of an event from 0 on.", "last_received_server_event_seq")
        return ResumeRequest(
            require(event, "session_id", str, "session_id"), require(event, "resume_token", str, "resume_token"), last
        )
    except RemoteProtocolError as error:
        raise RemoteProtocolError("bad_event", error.message, error.param) from None


def resumed_frame(new_id: NewId, session_id: str, session: dict[str, Any], **facts: Any) -> str:
    """The first frame after a resume. `facts`: the new token, and what the server has of the client's."""
    return frame(type="session.resumed", event_id=new_id("event_"), session_id=session_id, session=session, **facts)


def replaced_frame(new_id: NewId, session_id: str) -> str:
    """The last frame of a connection whose session goes on in another."""
    return frame(type="session.replaced", event_id=new_id("event_"), session_id=session_id)


def resync_frame(new_id: NewId, session_id: str, reason: str) -> str:
    """What the client lacks is gone: it has to begin anew."""
    return frame(type="session.resync_required", event_id=new_id("event_"), session_id=session_id, reason=reason)


def refused_frame(new_id: NewId, error: RemoteProtocolError, event_id: str | None = None, **more: Any) -> str:
    """An error of a connection that has no session."""
    body: dict[str, Any] = {"type": "invalid_request_error", "code": error.code, "message": error.message} | more
    body |= {"param": error.param} if error.param else {}
    body |= {"event_id": event_id} if event_id else {}
    return frame(type="error", event_id=new_id("event_"), error=body)
