"""FreeSWITCH's `mod_audio_fork`, as jambonz's verb `listen` uses it: a media stream over a WebSocket.

Written from the module's sources (jambonz/freeswitch-modules). No FreeSWITCH was run. See docs/wire/telephone.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value
from antiphon.protocols.telephony.stream import (
    RATES_HZ,
    Arrived,
    Call,
    CallerAudio,
    Codec,
    MarkReturned,
    Pressed,
    Started,
    facts,
)
from antiphon.protocols.wire import message

# The WebSocket subprotocols of the module, and of jambonz.
SUBPROTOCOLS = ("audio.drachtio.org", "audio.jambonz.org")
# Fields of the first message that are not the application's own.
_OWN_FIELDS = ("callSid", "accountSid", "from", "to", "sampleRate", "mixType")


class ForkStream:
    """One stream. Its first message is JSON with the facts of the call, of which `sampleRate` is required.

    Audio is 16-bit PCM in binary frames, in both directions at this rate. So the module has to be started with
    streaming in both directions (`bidirectionalAudio`) at the same rate. A stream's end is the end of the WebSocket.
    """

    message_frames = 5
    returns_marks = True

    def __init__(self) -> None:
        self._codec: Codec | None = None

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one message says; [] for an unknown one. Raises as `MediaStream.read` does."""
        if isinstance(data, bytes):
            if self._codec is None:
                raise RemoteProtocolError("bad_event", "Audio came before the facts of the call.")
            return [CallerAudio(self._codec.decode(data))]
        given = any_value(data)
        known = facts(given)
        if self._codec is None:
            return [self._start(known)]
        if known.get("event") == "dtmf":
            return [Pressed(known.get("dtmf", ""))]
        if known.get("type") == "mark":
            returned = facts(given.get("data"))
            # Marks that were cleared come back too, as `cleared`.
            return [MarkReturned(returned.get("name", ""))] if returned.get("event") == "playout" else []
        return []

    def _start(self, known: dict[str, str]) -> Started:
        rate = known.get("sampleRate", "")
        if not rate.isdecimal() or len(rate) > 6 or int(rate) not in RATES_HZ:
            rates = ", ".join(map(str, RATES_HZ))
            raise RemoteProtocolError("unsupported_format", f"'sampleRate' has to be one of {rates}.", "sampleRate")
        if known.get("mixType") == "stereo":
            raise RemoteProtocolError("unsupported_format", "'mixType' has to be 'mono'.", "mixType")
        self._codec = Codec("pcm16", int(rate))
        own = {name: value for name, value in known.items() if name not in _OWN_FIELDS}
        call = Call(
            "freeswitch",
            id=known.get("callSid", ""),
            account=known.get("accountSid", ""),
            caller=known.get("from", ""),
            called=known.get("to", ""),
            parameters=own,
        )
        return Started(call, self._codec)

    # --- to FreeSWITCH

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return one binary message with these samples."""
        assert self._codec, "nothing is sent before the stream has started"
        return [self._codec.encode(pcm)]

    def mark(self, name: str) -> str:
        """Return the message that sets a mark. The module returns it, and says whether it was played or cleared."""
        return str(message(type="mark", data={"name": name}).encode())

    def clear(self) -> str:
        """Return the message that empties the module's buffer."""
        return str(message(type="killAudio").encode())
