"""The resuming side of one session: a door's, for a client that knows nothing of it, or a client's. Pure: frames in and
out.

It keeps the token, counts the host's events and keeps what its client has sent, so that another connection can go on
where the first one broke. The client gets the session's events as a host without resume would have sent them.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from antiphon.protocols.wire import JSON_ERRORS, decode_json

# What a client has sent is kept up to this size, in bytes of frames: two minutes of PCM at 24 kHz as base64.
MAX_KEPT_BYTES = 8 << 20
# Events of the host that may be unacknowledged; it keeps them for this door.
ACK_EVERY = 32
# The name of the number that the host writes last into each of its events.
SEQ = ',"server_event_seq":'
# What a host says of the connection and of its state. A client that knows nothing of resuming is not told.
OF_THE_DOOR = ('{"type":"session.moving"', '{"type":"session.state_degraded"', '{"type":"session.replaced"')
CREATED = '{"type":"session.created"'

ClientFrame = str | bytes


# Refusals that no other host, and no later try, would change.
FINAL_CODES = frozenset({"resync_required", "client_gap", "invalid_resume_token", "invalid_event_ack"})


class CannotResume(Exception):
    """The host refuses the resume, or lacks what would have to be sent again: `code` and `reason`, in the host's words
    or ours. `is_final`: neither another host nor a later try would change it.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason

    @property
    def is_final(self) -> bool:
        return self.code in FINAL_CODES


class HeldSession:
    """The resuming side of one session.

    `session_id` is "" until the host has said it. `unsent_bytes`: the size of the client's frames that the present
    connection to a host has not had.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self.session_id = ""
        self._token = ""
        self._last_seq = 0
        self._acked_seq = 0
        # The client's frames that are kept, oldest first, the number of the first of them (from 1), and their size.
        self._kept: deque[ClientFrame] = deque()
        self._first_kept = 1
        self._kept_bytes = 0
        # The number of the frame that the connection to the host gets next.
        self._next = 1
        self.unsent_bytes = 0

    @property
    def can_resume(self) -> bool:
        """Whether the host has given a token, so that another connection can take the session up."""
        return bool(self._token)

    # --- from the client ----------------------------------------------------------------------------------------------

    def keep(self, frame: ClientFrame) -> None:
        """Take a frame of the client. The oldest ones that the host was sent are dropped beyond `max_kept_bytes`."""
        self._kept.append(frame)
        self._kept_bytes += len(frame)
        self.unsent_bytes += len(frame)
        while self._kept_bytes > self._max_kept_bytes and self._first_kept < self._next:
            self._kept_bytes -= len(self._kept.popleft())
            self._first_kept += 1

    def next_frame(self) -> ClientFrame | None:
        """The next frame for the host, which then counts as sent; None where it has all."""
        index = self._next - self._first_kept
        if index >= len(self._kept):
            return None
        self._next += 1
        frame = self._kept[index]
        self.unsent_bytes -= len(frame)
        return frame

    @property
    def num_received(self) -> int:
        """How many events of the host have come."""
        return self._last_seq

    def restart(self) -> None:
        """Send all kept frames again, to a host that begins the session: the one before had not begun it."""
        self._next = self._first_kept
        self.unsent_bytes = self._kept_bytes

    # --- from the host ------------------------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> str | bytes | None:
        """Take a frame of the host, and return what its client gets; None: nothing.

        A binary frame counts as an event, and is passed on as it is.
        """
        if isinstance(frame, bytes):
            self._last_seq += bool(self._token)
            return frame
        if not self._token and CREATED[1:] in frame[:200]:
            return self._created(frame)
        at = frame.rfind(SEQ, max(0, len(frame) - len(SEQ) - 24))
        if at >= 0 and (number := frame[at + len(SEQ) : -1]).isdigit():
            self._last_seq = int(number)
            frame = frame[:at] + "}"
        return None if frame.startswith(OF_THE_DOOR) else frame

    def _created(self, frame: str) -> str:
        """Keep the session's id and token, and return the frame without the token."""
        event = fields_of(frame)
        if event.get("type") != "session.created" or not isinstance(event.get("resume_token"), str):
            return frame
        self._token = event.pop("resume_token")
        session = event.get("session")
        named = event.get("session_id") or (session.get("id") if isinstance(session, dict) else "")
        self.session_id = str(named or "")
        return json.dumps(event, separators=(",", ":"), ensure_ascii=False)

    def acknowledgement(self) -> str | None:
        """What tells the host which events arrived, once there are ACK_EVERY of them; None before."""
        if self._last_seq - self._acked_seq < ACK_EVERY:
            return None
        self._acked_seq = self._last_seq
        return message(type="session.event_ack", server_event_seq=self._last_seq)

    # --- when the connection has broken -------------------------------------------------------------------------------

    def resume_request(self) -> str:
        """The first frame of a new connection to a host."""
        return message(
            type="session.resume",
            session_id=self.session_id,
            resume_token=self._token,
            last_received_server_event_seq=self._last_seq,
        )

    def resumed(self, frame: str | bytes) -> None:
        """Take the host's answer to the request. The frames that it has not received are sent again.

        Raises CannotResume where the host has refused, or where too little is kept of what was sent.
        """
        event = fields_of(frame)
        kind = event.get("type")
        if kind == "session.resync_required":
            raise CannotResume("resync_required", str(event.get("reason")))
        if kind != "session.resumed":
            error = event.get("error")
            error = error if isinstance(error, dict) else {}
            code, text = str(error.get("code") or kind), str(error.get("message") or "")
            raise CannotResume(code, text)
        received = event.get("received_events")
        if isinstance(received, int) and not isinstance(received, bool):
            if received + 1 < self._first_kept:
                raise CannotResume("client_gap", "more of the client's messages were lost than are kept")
            num_given = min(received + 1 - self._first_kept, len(self._kept))
            self._next = self._first_kept + num_given
            self.unsent_bytes = sum(len(frame) for frame in list(self._kept)[num_given:])
        if isinstance(token := event.get("resume_token"), str):
            self._token = token


def message(**fields: Any) -> str:
    """A message of these fields, as JSON without spaces."""
    return json.dumps(fields, separators=(",", ":"))


def fields_of(frame: str | bytes) -> dict[str, Any]:
    """The fields of a JSON object; none where it is anything else."""
    try:
        found = decode_json(frame)
    except (ValueError, *JSON_ERRORS):
        return {}
    return found if isinstance(found, dict) else {}


END = message(type="session.end")
