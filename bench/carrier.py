"""A carrier's side of a media stream, written from Twilio's documentation of Media Streams: no carrier was called.

Twilio plays received audio in order, without gaps, and returns a mark when everything before it was played. A `clear`
empties the buffer, and Twilio then returns all marks that were in it, with no sign that they were not played.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable
from typing import Any

RATE_HZ, FRAME_S = 8000, 0.02
STREAM = "MZ00000000000000000000000000000001"


class PlayBuffer:
    """The buffer of one stream. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # What is played, was played or will be played: start and end of each stretch, in seconds of the clock.
        self.spans: list[tuple[float, float]] = []
        self._marks: deque[tuple[float, str]] = deque()

    @property
    def ends_s(self) -> float:
        """When the buffer is empty."""
        return self.spans[-1][1] if self.spans else 0.0

    @property
    def played_s(self) -> float:
        """Seconds of audio that were played so far."""
        now_s = self._clock()
        return sum(max(0.0, min(end, now_s) - start) for start, end in self.spans)

    def take(self, message: dict[str, Any]) -> list[str]:
        """Take a message of the server; return the marks that it makes the carrier return at once."""
        now_s = self._clock()
        match message["event"]:
            case "media":
                begins_s = max(now_s, self.ends_s)
                lasts_s = len(base64.b64decode(message["media"]["payload"])) / RATE_HZ
                self.spans.append((begins_s, begins_s + lasts_s))
            case "mark":
                self._marks.append((max(now_s, self.ends_s), message["mark"]["name"]))
            case "clear":
                self.spans = [(start, min(end, now_s)) for start, end in self.spans if start < now_s]
                returned = [name for _, name in self._marks]
                self._marks.clear()
                return returned
        return []

    def due(self) -> list[str]:
        """Return the marks that were reached since the last call."""
        names = []
        while self._marks and self._marks[0][0] <= self._clock():
            names.append(self._marks.popleft()[1])
        return names


def connected() -> str:
    """Return the first message of a stream."""
    return json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"})


def start(call: str = "CA1", account: str = "AC1", **parameters: str) -> str:
    """Return the message that says which call a stream carries."""
    about = {
        "streamSid": STREAM,
        "accountSid": account,
        "callSid": call,
        "tracks": ["inbound"],
        "customParameters": parameters,
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": RATE_HZ, "channels": 1},
    }
    return json.dumps({"event": "start", "sequenceNumber": "1", "streamSid": STREAM, "start": about})


def media(payload: bytes, number: int = 1) -> str:
    """Return a message with the caller's audio, as µ-law."""
    text = base64.b64encode(payload).decode()
    about = {"track": "inbound", "chunk": str(number), "timestamp": str(20 * number), "payload": text}
    return json.dumps({"event": "media", "sequenceNumber": str(number + 1), "streamSid": STREAM, "media": about})


def mark(name: str) -> str:
    """Return the message that returns a mark."""
    return json.dumps({"event": "mark", "sequenceNumber": "9", "streamSid": STREAM, "mark": {"name": name}})


def dtmf(digit: str) -> str:
    """Return the message for a key that the caller has pressed."""
    about = {"track": "inbound_track", "digit": digit}
    return json.dumps({"event": "dtmf", "streamSid": STREAM, "sequenceNumber": "5", "dtmf": about})


def stop() -> str:
    """Return the last message of a stream."""
    about = {"accountSid": "AC1", "callSid": "CA1"}
    return json.dumps({"event": "stop", "sequenceNumber": "99", "streamSid": STREAM, "stop": about})
