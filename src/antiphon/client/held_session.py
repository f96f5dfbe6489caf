"""The client's side of a session that can be resumed. Our client uses it, and so does a door, for other clients.

It keeps the resume token and the frames that the client sent, and counts the host's events, so that another connection
can continue where the first connection broke. The client gets the same events as from a host that cannot resume
sessions. This module does no I/O.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from antiphon.protocols.wire import JSON_ERRORS, decode_json

# Limit on the kept frames of a client, in bytes: two minutes of PCM at 24 kHz as base64.
MAX_KEPT_BYTES = 8 << 20
# The host's events are acknowledged in batches of this size. The host keeps events until they are acknowledged.
ACK_EVERY = 32
# The field of the sequence number. The host writes it as the last field of each event.
SEQ = ',"server_event_seq":'
# Events about the connection and its host, which are not passed on to the client.
OF_THE_DOOR = ('{"type":"session.moving"', '{"type":"session.state_degraded"', '{"type":"session.replaced"')
CREATED = ('{"type":"session.created"', '{"type":"transcription_session.created"')

ClientFrame = str | bytes


# Codes of refusals that neither another host nor a later attempt would change.
FINAL_CODES = frozenset({"resync_required", "client_gap", "invalid_resume_token", "invalid_event_ack"})


class CannotResume(Exception):
    """The session cannot be resumed: the host refuses, or frames that it lacks are no longer kept.

    Attributes:
        code: The host's error code, or `client_gap`.
        reason: The host's message or ours.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason

    @property
    def is_final(self) -> bool:
        """Whether neither another host nor a later attempt would change the refusal."""
        return self.code in FINAL_CODES


class HeldSession:
    """The resuming side of one session.

    Args:
        max_kept_bytes: Limit on the kept frames, in bytes. Above it, only frames that were already sent are dropped.

    Attributes:
        session_id: The session's id; "" until the host sends it.
        unsent_bytes: The size of the client's frames that were not sent on the current connection.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self.session_id = ""
        self._token = ""
        self._last_seq = 0
        self._acked_seq = 0
        # The kept frames of the client, oldest first; the number of the first frame, from 1; their size in bytes.
        self._kept: deque[ClientFrame] = deque()
        self._first_kept = 1
        self._kept_bytes = 0
        # The number of the next frame to send to the host.
        self._next = 1
        self.unsent_bytes = 0

    @property
    def can_resume(self) -> bool:
        """Whether the host has sent a resume token, so that another connection can resume the session."""
        return bool(self._token)

    # --- from the client ----------------------------------------------------------------------------------------------

    def keep(self, frame: ClientFrame) -> None:
        """Add a frame of the client. Drops the oldest frames that were already sent while more than `max_kept_bytes`
        are kept.
        """
        self._kept.append(frame)
        self._kept_bytes += len(frame)
        self.unsent_bytes += len(frame)
        while self._kept_bytes > self._max_kept_bytes and self._first_kept < self._next:
            self._kept_bytes -= len(self._kept.popleft())
            self._first_kept += 1

    def next_frame(self) -> ClientFrame | None:
        """Return the next frame for the host and count it as sent; None if all frames were sent."""
        index = self._next - self._first_kept
        if index >= len(self._kept):
            return None
        self._next += 1
        frame = self._kept[index]
        self.unsent_bytes -= len(frame)
        return frame

    @property
    def num_received(self) -> int:
        """The number of the host's events received."""
        return self._last_seq

    def restart(self) -> None:
        """Queue all kept frames again for another host, because the previous host did not begin the session."""
        self._next = self._first_kept
        self.unsent_bytes = self._kept_bytes

    # --- from the host ------------------------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> str | bytes | None:
        """Count a frame of the host, and return the frame for the client; None if there is nothing for the client.

        A binary frame counts as one event and is passed on unchanged.
        """
        if isinstance(frame, bytes):
            self._last_seq += bool(self._token)
            return frame
        if not self._token and any(name[1:] in frame[:200] for name in CREATED):
            return self._created(frame)
        at = frame.rfind(SEQ, max(0, len(frame) - len(SEQ) - 24))
        if at >= 0 and (number := frame[at + len(SEQ) : -1]).isdigit():
            self._last_seq = int(number)
            frame = frame[:at] + "}"
        return None if frame.startswith(OF_THE_DOOR) else frame

    def _created(self, frame: str) -> str:
        """Keep the session's id and token, and return the frame without the token."""
        event = fields_of(frame)
        kinds = ("session.created", "transcription_session.created")
        if event.get("type") not in kinds or not isinstance(event.get("resume_token"), str):
            return frame
        self._token = event.pop("resume_token")
        # A beta transcription numbers this event.
        self._last_seq = event.pop("server_event_seq", 0)
        session = event.get("session")
        named = event.get("session_id") or (session.get("id") if isinstance(session, dict) else "")
        self.session_id = str(named or "")
        return json.dumps(event, separators=(",", ":"), ensure_ascii=False)

    def acknowledgement(self) -> str | None:
        """Return the acknowledgement for the host if ACK_EVERY events are unacknowledged, otherwise None."""
        if self._last_seq - self._acked_seq < ACK_EVERY:
            return None
        self._acked_seq = self._last_seq
        return message(type="session.event_ack", server_event_seq=self._last_seq)

    # --- when the connection has broken -------------------------------------------------------------------------------

    def resume_request(self) -> str:
        """Return the first frame of a new connection to a host: the request to resume."""
        return message(
            type="session.resume",
            session_id=self.session_id,
            resume_token=self._token,
            last_received_server_event_seq=self._last_seq,
        )

    def resumed(self, frame: str | bytes) -> None:
        """Handle the host's answer to the request. Queues again the frames that the host has not received.

        Args:
            frame: The first frame of the host on the new connection.

        Raises:
            CannotResume: The host refuses to resume the session, or the host lacks frames that are no longer kept.
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
                raise CannotResume("client_gap", "the host lacks messages of the client that are no longer kept")
            num_given = min(received + 1 - self._first_kept, len(self._kept))
            self._next = self._first_kept + num_given
            self.unsent_bytes = sum(len(frame) for frame in list(self._kept)[num_given:])
        if isinstance(token := event.get("resume_token"), str):
            self._token = token


def message(**fields: Any) -> str:
    """Return a message with these fields, as compact JSON."""
    return json.dumps(fields, separators=(",", ":"))


def fields_of(frame: str | bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; an empty dict for any other frame."""
    try:
        found = decode_json(frame)
    except (ValueError, *JSON_ERRORS):
        return {}
    return found if isinstance(found, dict) else {}


END = message(type="session.end")
