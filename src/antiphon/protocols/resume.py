"""Messages about a connection instead of its session: acknowledging frames, resuming, and being replaced.

docs/wire/index.md describes them under "Resume". All resumable dialects share them. The server handles them itself,
before the dialect reads the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import decode
from antiphon.protocols.wire import ErrorBody, Frame, NewId, message

# Maximum size of a control message, which has only a few short fields. Longer frames, such as audio, are not searched.
MAX_CONTROL_BYTES = 4096
# The field of an event, and of a `session.resume`, with the words that a client keeps. Its maximum number of characters
# leaves room for the other fields of a control message.
RESUME_WORDS, MAX_RESUME_WORDS = "resume_words", 3000
SESSION_ELSEWHERE, MODEL_NOT_LOADED = "session_elsewhere", "model_not_loaded"
# Codes of refusals after which another attempt, possibly at another host, may succeed.
RETRYABLE = frozenset({SESSION_ELSEWHERE, MODEL_NOT_LOADED})
CONTROL_TYPES = ("session.event_ack", "session.resume", "session.end")


class SessionResume(msgspec.Struct, tag_field="type", tag="session.resume"):
    """A request to resume a session. The fields are not checked yet: `resume_from` checks them."""

    session_id: object = UNSET
    resume_token: object = UNSET
    last_received_server_event_seq: object = 0
    resume_words: object = ""
    event_id: object = None


class EventAck(msgspec.Struct, tag_field="type", tag="session.event_ack"):
    """Acknowledges all events up to `server_event_seq`. The receiver checks that number."""

    server_event_seq: object = None
    event_id: object = None


class SessionEnd(msgspec.Struct, tag_field="type", tag="session.end"):
    """States that the client will not resume. The session then ends with this connection, as if it had no token."""

    event_id: object = None


# How a session was resumed. The same host continues it, over the client's connection (`attached`) or over another host
# (`relayed`). Or a new host continues it: the old host gave it away (`handed_over`), or died (`claimed`).
HowResumed = Literal["attached", "relayed", "handed_over", "claimed"]
Control = SessionResume | EventAck | SessionEnd


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The server stops, and ends its sessions within `within_s` seconds."""

    within_s: float


# What the server reports to a client about its connection. Another connection has resumed the session (`replaced`).
# Another host may continue the session, so that the connection is closed (`moving`). The conversation cannot be stored
# at present (`degraded`), or can be stored again (`stored`).
Notice = Literal["replaced", "moving", "degraded", "stored"] | DrainNotice


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A `session.resume` whose fields have the right types. Its session and token have not been looked up yet.

    `last_received` is the `server_event_seq` of the last event that the client received; 0 if there is none. `words` is
    the newest `resume_words` of an event; "" if there is none.
    """

    session_id: str
    token: str
    last_received: int
    words: str = ""


def control(data: str | bytes) -> Control | None:
    """Return the message if it is a control message, one of CONTROL_TYPES. Otherwise return None.

    Most frames do not contain the name of such a message, and are not decoded.
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
    """Check the fields of a `session.resume`. Raises RemoteProtocolError (`bad_event`) with the name of the field."""
    last = asked.last_received_server_event_seq
    if not isinstance(last, int) or isinstance(last, bool) or last < 0:
        raise RemoteProtocolError(
            "bad_event", "Expected the number of an event, 0 or more.", "last_received_server_event_seq"
        )
    session_id, token = _text(asked.session_id, "session_id"), _text(asked.resume_token, "resume_token")
    return ResumeRequest(session_id, token, last, _text(asked.resume_words, RESUME_WORDS))


def session_elsewhere() -> RemoteProtocolError:
    """Return the error for a session of another host. It is retryable: that host may turn out to be dead."""
    return RemoteProtocolError(
        SESSION_ELSEWHERE, "Another server has this session, or was faster to restore it.", "session_id"
    )


def model_not_loaded(model: str) -> RemoteProtocolError:
    """Return the error for a session that began with a model which this host has not loaded. It is retryable."""
    return RemoteProtocolError(
        MODEL_NOT_LOADED, f"This server has not loaded `{model}`, with which the session began.", "session_id"
    )


def _text(value: object, param: str) -> str:
    if value is UNSET:
        raise RemoteProtocolError("bad_event", f"Missing required parameter: '{param}'.", param)
    if not isinstance(value, str):
        raise RemoteProtocolError("bad_event", f"Invalid type for '{param}': expected str.", param)
    return value


def resumed_frame(new_id: NewId, session_id: str, session: object, **facts: Any) -> Frame:
    """Return the first frame to a client that resumed. `session` is the current state of the session.

    `facts` are additional fields: the new token, and how many messages and how much audio the server has received.
    """
    fields = {"type": "session.resumed", "event_id": new_id("event_"), "session_id": session_id, "session": session}
    return Frame(fields | facts, numbered=False)


def replaced_frame(new_id: NewId, session_id: str) -> Frame:
    """Return the last frame to a connection whose session another connection has resumed. The server then closes it."""
    fields = {"type": "session.replaced", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def moving_frame(new_id: NewId, session_id: str) -> Frame:
    """Return the last frame to a connection whose session may move to another host. It is then closed (1012)."""
    fields = {"type": "session.moving", "event_id": new_id("event_"), "session_id": session_id}
    return Frame(fields, numbered=False)


def state_degraded_frame(new_id: NewId, session_id: str, *, degraded: bool) -> Frame:
    """Return the frame that reports whether the conversation can be stored at present. `degraded`: it cannot."""
    return message(type="session.state_degraded", event_id=new_id("event_"), session_id=session_id, degraded=degraded)


def notice_frames(new_id: NewId, session_id: str, notice: Notice) -> list[Frame]:
    """Return the frames that report `notice` to a client. A drain has no frame in most dialects."""
    match notice:
        case DrainNotice():
            return []
        case "replaced":
            return [replaced_frame(new_id, session_id)]
        case "moving":
            return [moving_frame(new_id, session_id)]
        case _:
            return [state_degraded_frame(new_id, session_id, degraded=notice == "degraded")]


def resync_frame(new_id: NewId, session_id: str, reason: str) -> Frame:
    """Return the answer to a resume that is too late, so the client has to start over. `reason`: see JournalGap."""
    return message(type="session.resync_required", event_id=new_id("event_"), session_id=session_id, reason=reason)


def refused_frame(
    new_id: NewId, error: RemoteProtocolError, event_id: str | None = None, *, retryable: bool = False
) -> Frame:
    """Return an error about the connection. `event_id` is the id that the client gave to the message at fault, if any.

    `retryable`: the same message may succeed later, when the server has capacity.
    """
    kind = "rate_limit_error" if retryable else "invalid_request_error"
    shown = ErrorBody(kind, error.code, error.message, retryable, error.param or None, event_id or None)
    return message(type="error", event_id=new_id("event_"), error=shown)
