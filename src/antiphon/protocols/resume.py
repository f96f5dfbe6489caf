"""Messages about a connection, not its session: acknowledging frames, resuming, being replaced.

docs/wire/index.md describes them under "Resume". All resumable dialects share them. The server reads them before a
frame reaches the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import decode
from antiphon.protocols.wire import ErrorBody, Frame, NewId, message

# Longer frames are not searched for control messages, which have a few short fields. Appends of audio are longer.
MAX_CONTROL_BYTES = 4096
SESSION_ELSEWHERE = "session_elsewhere"
CONTROL_TYPES = ("session.event_ack", "session.resume", "session.end")


class SessionResume(msgspec.Struct, tag_field="type", tag="session.resume"):
    """A request to resume a session. The fields are unchecked; `resume_from` checks them."""

    session_id: object = UNSET
    resume_token: object = UNSET
    last_received_server_event_seq: object = 0
    event_id: object = None


class EventAck(msgspec.Struct, tag_field="type", tag="session.event_ack"):
    """Acknowledges all events up to `server_event_seq`, which is checked by its user."""

    server_event_seq: object = None
    event_id: object = None


class SessionEnd(msgspec.Struct, tag_field="type", tag="session.end"):
    """The client will not resume: the session ends with this connection, like a session without a token."""

    event_id: object = None


# How a session was resumed. On the host that had it: over the client's own connection, or relayed by another host. On
# another host: handed over by the previous host, or claimed after the previous host died.
HowResumed = Literal["attached", "relayed", "handed_over", "claimed"]
Control = SessionResume | EventAck | SessionEnd


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A `session.resume` whose fields have the right types. Neither the session nor the token has been looked up.

    `last_received` is the `server_event_seq` of the last event that the client has, 0 for none.
    """

    session_id: str
    token: str
    last_received: int


def control(data: str | bytes) -> Control | None:
    """Return the message if it is a control message: one of CONTROL_TYPES. None for any other or invalid frame.

    Most frames contain none of these names and are not decoded.
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
        raise RemoteProtocolError(
            "bad_event", "Expected the number of an event, 0 or more.", "last_received_server_event_seq"
        )
    return ResumeRequest(_text(asked.session_id, "session_id"), _text(asked.resume_token, "resume_token"), last)


def session_elsewhere() -> RemoteProtocolError:
    """Return the error for a session owned by another host. It is retryable, as that host may be found dead soon."""
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
    """Return the first frame to a client that resumed. `session` is the session as it is now.

    `facts` are further fields: the new token, and the number of messages and the amount of audio the server has
    received.
    """
    fields = {"type": "session.resumed", "event_id": new_id("event_"), "session_id": session_id, "session": session}
    return Frame(fields | facts, numbered=False)


def replaced_frame(new_id: NewId, session_id: str) -> Frame:
    """Return the last frame to a connection whose session another one has resumed. The server then closes it."""
    fields = {"type": "session.replaced", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def moving_frame(new_id: NewId, session_id: str) -> Frame:
    """Return the last frame to a connection whose session may move to another host. It is then closed with 1012."""
    fields = {"type": "session.moving", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def state_degraded_frame(new_id: NewId, session_id: str, *, degraded: bool) -> Frame:
    """Return the frame that says whether the conversation can (`degraded` false) or cannot be stored at present."""
    return message(type="session.state_degraded", event_id=new_id("event_"), session_id=session_id, degraded=degraded)


def resync_frame(new_id: NewId, session_id: str, reason: str) -> Frame:
    """Return the answer to a resume that came too late. `reason` is that of the JournalGap. The client starts over."""
    return message(type="session.resync_required", event_id=new_id("event_"), session_id=session_id, reason=reason)


def refused_frame(
    new_id: NewId, error: RemoteProtocolError, event_id: str | None = None, *, retryable: bool = False
) -> Frame:
    """Return an error about the connection. `event_id` is the client's id of the message at fault, if it had one.

    `retryable`: the same message may be accepted later, when the server has capacity.
    """
    kind = "rate_limit_error" if retryable else "invalid_request_error"
    shown = ErrorBody(kind, error.code, error.message, retryable, error.param or None, event_id or None)
    return message(type="error", event_id=new_id("event_"), error=shown)
