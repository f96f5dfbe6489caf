"""The client's side of a session that can be resumed. Our client uses it, and so does a door, for other clients.

It keeps the resume token and the frames that the client sent, and counts the host's events, so that another connection
can continue where the first connection broke. The client gets the same events as from a host that cannot resume
sessions. This module does no I/O.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from antiphon.protocols.resume import MAX_RESUME_WORDS, RESUME_WORDS
from antiphon.protocols.wire import JSON_ERRORS, decode_json

log = logging.getLogger(__name__)
# Limits on the kept frames of a client, in bytes: two minutes of PCM at 24 kHz as base64, and for a transcription
# session half a minute, which is more than a window. A turn of a conversation may be longer.
MAX_KEPT_BYTES, MAX_CAPTIONS_BYTES = 8 << 20, 2 << 20
# Limits on the records of frames that are no longer kept: their number, and the size of a recorded frame without audio.
# Equal frames in a row are one record.
MAX_GONE, MAX_GONE_BYTES = 1000, 1 << 10
APPEND = '"input_audio_buffer.append"'
# Pieces of responses are acknowledged in batches of this size, all other events at once. The host keeps events until
# they are acknowledged, and stores them with each change of the session.
ACK_EVERY = 32
OF_RESPONSES = '{"type":"response.'
# The field of the sequence number. The host writes it as the last field of each event, and before it, in some events,
# the words that the client has got and the next host needs.
SEQ = ',"server_event_seq":'
WORDS = f',"{RESUME_WORDS}":"'
# Events about the connection and its host, which are not passed on to the client.
OF_THE_DOOR = ('{"type":"session.moving"', '{"type":"session.state_degraded"', '{"type":"session.replaced"')
CREATED = ('{"type":"session.created"', '{"type":"transcription_session.created"')
UPDATED = ('{"type":"session.updated"', '{"type":"transcription_session.updated"')

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


class _GoneFrames:
    """The client's newest frames that are no longer kept, up to MAX_GONE records: the length of audio, other frames
    whole.
    """

    def __init__(self) -> None:
        # Records of equal frames: the number of the first, how many there are, and the length of their base64 or, for
        # frames without audio, the frame.
        self._records: deque[tuple[int, int, int | ClientFrame]] = deque(maxlen=MAX_GONE)

    def add(self, number: int, frame: ClientFrame) -> None:
        """Record the frame `number`, which follows the recorded frames."""
        audio = _audio_of(frame)
        if audio is None and len(frame) > MAX_GONE_BYTES:
            self._records.clear()
            return
        value = frame if audio is None else len(audio)
        first, count, last = self._records[-1] if self._records else (number, 0, value)
        if count and last == value:
            self._records[-1] = first, count + 1, value
        else:
            self._records.append((number, 1, value))

    def since(self, number: int) -> list[ClientFrame] | None:
        """Return the frames from `number` on, with silence as their audio; None if they are not all recorded."""
        if not self._records or self._records[0][0] > number:
            return None
        found: list[ClientFrame] = []
        for first, count, value in self._records:
            missing = min(count, first + count - number)
            found += [_silence(value) if isinstance(value, int) else value] * missing
        return found

    def forget(self) -> None:
        """Drop all records."""
        self._records.clear()


class HeldSession:
    """The resuming side of one session.

    Args:
        max_kept_bytes: Limit on the kept frames, in bytes. Above it, only frames that were already sent are dropped. If
            another host needs their audio, it gets as much silence. Transcription sessions have MAX_CAPTIONS_BYTES.

    Attributes:
        session_id: The session's id; "" until the host sends it.
        unsent_bytes: The size of the client's frames that were not sent on the current connection.
        starts_again: Whether the session may start again at a host that does not have it. Then it is a HeldSpeech.
        is_lost: Whether it has to start again, because no host has it.
    """

    starts_again, is_lost = False, False

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self.session_id = ""
        self._token = ""
        self._last_seq = 0
        self._acked_seq = 0
        self._words = ""
        self._is_piece = False
        # The kept frames of the client, oldest first; the number of the first frame, from 1; their size in bytes.
        self._kept: deque[ClientFrame] = deque()
        self._first_kept = 1
        self._kept_bytes = 0
        self._gone = _GoneFrames()
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
            frame = self._kept.popleft()
            self._gone.add(self._first_kept, frame)
            self._kept_bytes -= len(frame)
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

    def reset(self, frames: Sequence[ClientFrame], num_sent: int) -> None:
        """Forget the host's session, for a new session at another host. `frames` are the client's frames for it, of
        which the host was sent the first `num_sent`.
        """
        self._token, self._last_seq, self._acked_seq = "", 0, 0
        self._kept, self._first_kept, self._next = deque(frames), 1, num_sent + 1
        self._kept_bytes = sum(map(len, frames))
        self.unsent_bytes = sum(map(len, frames[num_sent:]))
        self._gone.forget()

    # --- from the host ------------------------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> str | bytes | None:
        """Count a frame of the host, and return the frame for the client; None if there is nothing for the client.

        A binary frame counts as one event and is passed on unchanged.
        """
        self._is_piece = isinstance(frame, bytes) or frame.startswith(OF_RESPONSES)
        if isinstance(frame, bytes):
            self._last_seq += bool(self._token)
            return frame
        if not self._token and any(name[1:] in frame[:200] for name in CREATED):
            return self._created(frame)
        if frame.startswith(UPDATED) and _is_transcription(frame):
            self._max_kept_bytes = min(self._max_kept_bytes, MAX_CAPTIONS_BYTES)
        at = frame.rfind(SEQ, max(0, len(frame) - len(SEQ) - 24))
        if at >= 0 and (number := frame[at + len(SEQ) : -1]).isdigit():
            self._last_seq = int(number)
            begin = frame.rfind(WORDS, max(0, at - MAX_RESUME_WORDS - len(WORDS) - 1), at)
            if begin >= 0:
                self._words = frame[begin + len(WORDS) : at - 1]
                at = begin
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
        """Return the acknowledgement for the host if the last event is no piece of a response, or if ACK_EVERY events
        are unacknowledged. Otherwise return None.
        """
        num_new = self._last_seq - self._acked_seq
        if num_new <= 0 or (num_new < ACK_EVERY and self._is_piece):
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
            **({RESUME_WORDS: self._words} if self._words else {}),
        )

    def resumed(self, frame: str | bytes) -> None:
        """Handle the host's answer to the request. Queues again the frames that the host has not received.

        Args:
            frame: The first frame of the host on the new connection.

        Raises:
            CannotResume: The host refuses to resume the session, or the host lacks frames that are not even recorded.
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
                if (again := self._gone.since(received + 1)) is None:
                    raise CannotResume("client_gap", "the host lacks messages of the client that are no longer kept")
                log.warning("silence replaces audio in %d messages that are no longer kept", len(again))
                self._kept.extendleft(reversed(again))
                self._first_kept, self._kept_bytes = received + 1, self._kept_bytes + sum(map(len, again))
            self._gone.forget()
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


def _audio_of(frame: ClientFrame) -> str | None:
    """Return the base64 audio of an append; None for any other frame."""
    if isinstance(frame, bytes) or APPEND not in frame[:200] + frame[-200:]:
        return None
    # Base64 has no quotes.
    _, _, value = frame.partition('"audio"')
    _, quote, audio = value.partition('"')
    audio, end, _ = audio.partition('"')
    return audio if quote and end else None


def _silence(num_characters: int) -> str:
    """Return an append with as much silence in PCM as base64 of this length has audio."""
    return message(type="input_audio_buffer.append", audio="A" * (num_characters // 4 * 4))


def _is_transcription(frame: str) -> bool:
    """Whether a `session.updated` is of a transcription session, in OpenAI's dialect or vLLM's."""
    updated = fields_of(frame)
    session = updated.get("session")
    if isinstance(session, dict) and updated.get("type") == "session.updated":
        return session.get("type") == "transcription"
    return "session" not in updated or updated.get("type") == "transcription_session.updated"


END = message(type="session.end")
