"""What a media stream carries, whichever the carrier or switch: a call, audio, keys and marks in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.audio.line import g711
from antiphon.audio.pcm import from_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64

# Longest audio of one message, in seconds.
MAX_PAYLOAD_S = 30
# Limits of a call's facts: characters of each, and the number of parameters.
MAX_FACT_CHARS, MAX_PARAMETERS = 256, 32
# The names of encodings, as carriers spell them in lower case, and the encoding. PCM has 16 bits, little-endian.
_ENCODINGS = {
    "audio/x-mulaw": "ulaw",
    "mulaw": "ulaw",
    "pcmu": "ulaw",
    "audio/x-alaw": "alaw",
    "pcma": "alaw",
    "audio/x-l16": "pcm16",
    "audio/l16": "pcm16",
    "audio/x-raw": "pcm16",
    "raw/slin": "pcm16",
    "base64": "pcm16",
}
RATES_HZ = (8000, 16_000, 24_000)


class Call(msgspec.Struct, frozen=True):
    """The facts of a call, as its carrier states them. A fact that the carrier does not state is empty."""

    # The carrier's name, in lower case.
    carrier: str
    # The carrier's id of the call.
    id: str = ""
    # The carrier's id of the account that the call belongs to.
    account: str = ""
    # The number of the caller.
    caller: str = ""
    # The number that was called.
    called: str = ""
    # Parameters that the owner of the number has set, and the headers of the call.
    parameters: Mapping[str, str] = {}
    # Whether this server has called.
    is_outgoing: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The stream begins. All its audio, in both directions, is mono and has this encoding and rate."""

    call: Call
    codec: Codec


@dataclass(frozen=True, slots=True)
class CallerAudio:
    """Audio of the caller: float32 at the stream's rate. `number`: its place in a stream whose order is not certain."""

    pcm: Pcm
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Pressed:
    """The caller has pressed a key."""

    key: str


@dataclass(frozen=True, slots=True)
class MarkReturned:
    """The carrier has played all audio before this mark, or it has cleared its buffer with the mark in it."""

    name: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The call has ended at the carrier's side."""


Arrived = Started | CallerAudio | Pressed | MarkReturned | Stopped


class MediaStream(Protocol):
    """Reads and writes the messages of one stream.

    - `message_frames`: how many frames of 20 ms one message should have.
    - `returns_marks`: the peer has a play buffer, which can be emptied, and returns marks. Otherwise it plays audio at
      once, and `mark` and `clear` return "".
    """

    message_frames: int
    returns_marks: bool

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one message says; [] for a message without an effect here.

        Raises RemoteProtocolError: `bad_audio` for audio that cannot be played, after which the stream may go on, and
        other codes for a message that no carrier sends.
        """
        ...

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return the messages that play these samples, which are whole frames of 20 ms, after all earlier ones."""
        ...

    def mark(self, name: str) -> str:
        """Return the message after which the carrier reports that it has played all earlier audio."""
        ...

    def clear(self) -> str:
        """Return the message that empties the carrier's buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """The encoding of a stream's audio. `name`: `ulaw`, `alaw` or `pcm16`."""

    name: str
    rate_hz: int

    def decode(self, data: bytes) -> Pcm:
        """Decode audio to float32. Raises RemoteProtocolError (`bad_audio`) for a file, and for half a sample."""
        width = 2 if self.name == "pcm16" else 1
        if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
            raise RemoteProtocolError("bad_audio", "The payload is a WAV file. It has to be audio without a header.")
        if len(data) % width or len(data) > MAX_PAYLOAD_S * self.rate_hz * width:
            raise RemoteProtocolError("bad_audio", f"The payload has {len(data)} bytes, which is no audio.")
        match self.name:
            case "ulaw":
                return g711.from_ulaw(data)
            case "alaw":
                return g711.from_alaw(data)
            case _:
                return from_pcm16(data)

    def decode_base64(self, text: str) -> Pcm:
        """Decode audio in base64. Raises RemoteProtocolError (`bad_audio`)."""
        try:
            return self.decode(decode_base64(text))
        except ValueError:
            raise RemoteProtocolError("bad_audio", "The payload is not base64.") from None

    def encode(self, pcm: npt.NDArray[np.int16]) -> bytes:
        """Encode samples in the stream's encoding."""
        if self.name == "pcm16":
            return pcm.astype("<i2").tobytes()
        floats = pcm.astype(np.float32) / np.float32(32768)
        return g711.to_ulaw(floats) if self.name == "ulaw" else g711.to_alaw(floats)


def codec_of(encoding: str, rate_hz: int) -> Codec:
    """Return the codec of a stream. Raises RemoteProtocolError (`unsupported_format`) for another than the known."""
    name = _ENCODINGS.get(encoding.partition(";")[0].strip().lower())
    is_known = rate_hz == 8000 if name in ("ulaw", "alaw") else rate_hz in RATES_HZ
    if name is None or not is_known:
        shown = encoding[:40]
        raise RemoteProtocolError("unsupported_format", f"The stream has the audio '{shown}' at {rate_hz} Hz.")
    return Codec(name, rate_hz)


def facts(given: object) -> dict[str, str]:
    """Return the texts and numbers of a JSON object as texts. Leaves out what exceeds the limits; {} for no object."""
    if not isinstance(given, dict):
        return {}
    texts = {str(k): str(v) for k, v in given.items() if isinstance(v, str | int | float)}
    fitting = {k: v for k, v in texts.items() if len(k) <= MAX_FACT_CHARS and len(v) <= MAX_FACT_CHARS}
    return dict(list(fitting.items())[:MAX_PARAMETERS])
