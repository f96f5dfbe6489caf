"""Messages about a connection rather than its session: acknowledging frames, resuming, being replaced.

docs/wire/index.md describes them under "Resume". All dialects that can be resumed share them; the server reads them
before a frame reaches the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import decode
from antiphon.protocols.wire import ErrorBody, Frame, NewId, message

# A longer frame is not searched for one: these messages have a few short fields, appends of audio are long.
MAX_CONTROL_BYTES = 4096
SESSION_ELSEWHERE = "session_elsewhere"
CONTROL_TYPES = ("session.event_ack", "session.resume", "session.end")


class SessionResume(msgspec.Struct, tag_field="type", tag="session.resume"):
    """The client wants to go on with a session. The fields are as they were sent: `resume_from` checks them."""

    session_id: object = UNSET
    resume_token: object = UNSET
    last_received_server_event_seq: object = 0
    event_id: object = None


class EventAck(msgspec.Struct, tag_field="type", tag="session.event_ack"):
    """The client has all events up to `server_event_seq`, which is checked where it is used."""

    server_event_seq: object = None
    event_id: object = None


class SessionEnd(msgspec.Struct, tag_field="type", tag="session.end"):
    """The client will not come back: the session ends with this connection, as one without a token does."""

    event_id: object = None


# How a session was taken up: where it was, from the connection of the client itself or by way of another host; or by
# another host, to which its own has given it, or which has claimed it after that one's death.
HowResumed = Literal["attached", "relayed", "handed_over", "claimed"]
Control = SessionResume | EventAck | SessionEnd


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A `session.resume` whose fields have the right types; neither the session nor the token has been looked up.

    `last_received` is the `server_event_seq` of the last event that the client has, 0 if it has none.
    """

    session_id: str
    token: str
    last_received: int


def control(data: str | bytes) -> Control | None:
    """The message where it is a `session.resume` or `session.event_ack`; None for every other frame, whatever is wrong
    with it.

    Frames without either name in their text are not decoded, which is nearly all of them.
    """
    if len(data) > MAX_CONTROL_BYTES:
        return None
    text = data if isinstance(data, str) else data.decode(errors="replace")
    if not any(name in text for name in CONTROL_TYPES):
        return None
    try:
        found: Control = decode(data, Control)
    except RemoteProtocolError:
        return None
    return found


def resume_from(asked: SessionResume) -> ResumeRequest:
    """Check the fields of a `session.resume`. Raises RemoteProtocolError (`bad_event`) that names the field."""
    last = asked.last_received_server_event_seq
    if not isinstance(last, int) or isinstance(last, bool) or last < 0:
        raise RemoteProtocolError("bad_event", "A number of an event from 0 on.", "last_received_server_event_seq")
    return ResumeRequest(_text(asked.session_id, "session_id"), _text(asked.resume_token, "resume_token"), last)


def session_elsewhere() -> RemoteProtocolError:
    """The refusal of a session that another host has. It is retryable: that host may be about to be known as dead."""
    return RemoteProtocolError(
        SESSION_ELSEWHERE, "Another server has this session, or was faster to restore it.", "session_id"
    )


def _text(value: object, param: str) -> str:
    if value is UNSET:
        raise RemoteProtocolError("bad_event", f"Missing required parameter: '{param}'.", param)
    if not isinstance(value, str):
        raise RemoteProtocolError("bad_event", f"Invalid type for '{param}': expected str.", param)
    return value


def resumed_frame(new_id: NewId, session_id: str, session: object, **facts: Any) -> Frame:
    """The first frame to a client that resumed: `session` is the session as it is now.

    `facts` are the further fields: the new token, and how many messages and how much audio the server has received.
    """
    fields = {"type": "session.resumed", "event_id": new_id("event_"), "session_id": session_id, "session": session}
    return Frame(fields | facts, numbered=False)


def replaced_frame(new_id: NewId, session_id: str) -> Frame:
    """The last frame to a connection whose session another connection has resumed; the server then closes it."""
    fields = {"type": "session.replaced", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def moving_frame(new_id: NewId, session_id: str) -> Frame:
    """The last frame to a connection whose session another host may go on with; the server then closes it with 1012."""
    fields = {"type": "session.moving", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def state_degraded_frame(new_id: NewId, session_id: str, *, degraded: bool) -> Frame:
    """What the client is told when its conversation cannot be stored any more, and when it is stored again."""
    return message(type="session.state_degraded", event_id=new_id("event_"), session_id=session_id, degraded=degraded)


def resync_frame(new_id: NewId, session_id: str, reason: str) -> Frame:
    """The answer to a resume that came too late, with the `reason` of a JournalGap: the client has to begin anew."""
    return message(type="session.resync_required", event_id=new_id("event_"), session_id=session_id, reason=reason)


def refused_frame(
    new_id: NewId, error: RemoteProtocolError, event_id: str | None = None, *, retryable: bool = False
) -> Frame:
    """An error about the connection. `event_id` is that of the client's message at fault, if it had one.

    `retryable`: the same may be accepted later, when there is room.
    """
    kind = "rate_limit_error" if retryable else "invalid_request_error"
    shown = ErrorBody(kind, error.code, error.message, retryable, error.param or None, event_id or None)
    return message(type="error", event_id=new_id("event_"), error=shown)
