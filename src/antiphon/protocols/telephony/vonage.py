"""Vonage's media stream: audio in binary frames of exactly 20 ms, and events in JSON. See docs/wire/telephone.md."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value
from antiphon.protocols.telephony.stream import (
    Arrived,
    Call,
    CallerAudio,
    Codec,
    MarkReturned,
    Pressed,
    Started,
    codec_of,
    facts,
)
from antiphon.protocols.wire import message

CONNECTED = "websocket:connected"
# Matches the content type, as in `audio/l16;rate=16000`.
_CONTENT_TYPE = re.compile(r"(audio/l16)\s*;\s*rate=(\d{4,6})", re.IGNORECASE)
# Fields of the first message that are not the application's own.
_OWN_FIELDS = ("event", "content-type", "uuid", "from", "to")


class VonageStream:
    """One stream. Its end is the end of the WebSocket.

    A `websocket:connected` that comes again, and audio before it, raise RemoteProtocolError (`bad_event`).
    """

    message_frames = 5
    returns_marks = True

    def __init__(self) -> None:
        self._codec: Codec | None = None

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one message says; [] for an unknown event. Raises as `MediaStream.read` does."""
        if isinstance(data, bytes):
            if self._codec is None:
                raise RemoteProtocolError("bad_event", f"Audio came before '{CONNECTED}'.")
            return [CallerAudio(self._codec.decode(data))]
        given = any_value(data)
        known = facts(given)
        match known.get("event"):
            case "websocket:connected":
                return [self._start(known)]
            case "websocket:dtmf":
                key = known.get("digit") or facts(given.get("dtmf")).get("digit", "")
                return [Pressed(key)]
            case "websocket:notify":
                return [MarkReturned(facts(given.get("payload")).get("mark", ""))]
            case None:
                raise RemoteProtocolError("bad_event", "A message is a JSON object with an event.", "event")
            case _:
                return []

    def _start(self, known: dict[str, str]) -> Started:
        if self._codec:
            raise RemoteProtocolError("bad_event", f"The event '{CONNECTED}' came twice.", "event")
        found = _CONTENT_TYPE.fullmatch(known.get("content-type", ""))
        self._codec = codec_of(found[1], int(found[2])) if found else codec_of(known.get("content-type", ""), 0)
        own = {name: value for name, value in known.items() if name not in _OWN_FIELDS}
        call = Call("vonage", known.get("uuid", ""), "", known.get("from", ""), known.get("to", ""), own)
        return Started(call, self._codec)

    # --- to the carrier

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return a binary frame for each 20 ms: a frame of another size ends the call."""
        assert self._codec, "nothing is sent before the stream has started"
        size = self._codec.rate_hz // 50
        return [self._codec.encode(pcm[at : at + size]) for at in range(0, len(pcm), size)]

    def mark(self, name: str) -> str:
        """Return the message whose payload Vonage returns when the audio before it was played."""
        return str(message(action="notify", payload={"mark": name}).encode())

    def clear(self) -> str:
        """Return the message that empties Vonage's buffer."""
        return str(message(action="clear").encode())
