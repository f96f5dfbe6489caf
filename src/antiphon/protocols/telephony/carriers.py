"""Media streams in JSON: Twilio, Telnyx, Plivo and Exotel, which resemble each other. See docs/wire/telephone.md."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value, decode
from antiphon.protocols.telephony import asterisk, fork
from antiphon.protocols.telephony.stream import (
    Arrived,
    Call,
    CallerAudio,
    Codec,
    MarkReturned,
    MediaStream,
    Pressed,
    Started,
    Stopped,
    codec_of,
    facts,
)
from antiphon.protocols.telephony.vonage import CONNECTED, VonageStream
from antiphon.protocols.wire import message

# The WebSocket subprotocols of switches. Carriers have none.
SUBPROTOCOLS = (asterisk.SUBPROTOCOL, *fork.SUBPROTOCOLS)


@dataclass(frozen=True, slots=True)
class _Carrier:
    """The words of one carrier, for the same things. They are fields of its `start`, if nothing else is said."""

    # The carrier's name.
    name: str
    # The field that no other carrier has.
    recognized_by: str
    # The id of the stream.
    stream_id: str
    # The id of the call.
    call_id: str
    # The id of the account.
    account: str
    # The parameters that the owner of the number has set.
    parameters: str
    # The object with the `encoding` of the audio and its rate.
    media_format: str
    # The rate, in that object.
    sample_rate: str
    # How many frames of 20 ms a message has to have.
    message_frames: int = 5
    # The field with the stream's id in the messages to the carrier; "" if they have none.
    addressed_by: str = ""
    # Whether its packets may arrive in another order than they were sent.
    reorders: bool = False
    # Whether its streams may have 16-bit audio. The byte order of Telnyx's is documented nowhere.
    has_pcm16: bool = True


# Exotel also names its stream `stream_sid`, as Twilio `streamSid`, and messages of less than 3,200 bytes distort it.
_CARRIERS = (
    _Carrier(
        "twilio",
        "streamSid",
        "streamSid",
        "callSid",
        "accountSid",
        "customParameters",
        "mediaFormat",
        "sampleRate",
        addressed_by="streamSid",
    ),
    _Carrier(
        "telnyx",
        "call_control_id",
        "stream_id",
        "call_control_id",
        "user_id",
        "custom_parameters",
        "media_format",
        "sample_rate",
        reorders=True,
        has_pcm16=False,
    ),
    _Carrier(
        "plivo",
        "streamId",
        "streamId",
        "callId",
        "accountId",
        "extra_headers",
        "mediaFormat",
        "sampleRate",
        addressed_by="streamId",
    ),
    _Carrier(
        "exotel",
        "stream_sid",
        "stream_sid",
        "call_sid",
        "account_sid",
        "custom_parameters",
        "media_format",
        "sample_rate",
        message_frames=10,
        addressed_by="stream_sid",
    ),
)


class _Media(msgspec.Struct):
    """Audio in base64. `chunk`: its place in the stream. `track`: `inbound` for the caller's audio."""

    payload: str
    chunk: int | str | None = None
    track: str = "inbound"


class _Dtmf(msgspec.Struct):
    """A key that was pressed."""

    digit: int | str


class _Mark(msgspec.Struct):
    """A mark that the server has set."""

    name: str = ""


class CarrierMessage(msgspec.Struct):
    """One message of a carrier. Which fields it has follows from `event`."""

    # What the message is.
    event: str
    # The call, in the words of its carrier.
    start: msgspec.Raw | UnsetType = UNSET
    media: _Media | None = None  # Audio.
    dtmf: _Dtmf | None = None  # A key.
    mark: _Mark | None = None  # A mark that was returned.
    # The mark that Plivo returns with a `playedStream`.
    name: str = ""
    # Plivo's parameters of the call, beside `start`.
    extra_headers: object = None


class CarrierStream:
    """One stream. The first `start` decides which carrier it is.

    A `start` that comes again, and audio before it, raise RemoteProtocolError (`bad_event`).
    """

    message_frames = 5
    returns_marks = True

    def __init__(self) -> None:
        self._carrier: _Carrier | None = None
        self._codec: Codec | None = None
        self._stream_id = ""

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one message says; [] for an unknown event, which may be an extension of the carrier.

        Raises RemoteProtocolError as `MediaStream.read` does.
        """
        received = decode(data, CarrierMessage)
        match received.event:
            case "connected":
                return []
            case "start":
                return [self._start(received)]
            case "stop":
                return [Stopped()]
        if self._codec is None:
            raise RemoteProtocolError("bad_event", f"The event '{received.event[:40]}' came before 'start'.", "event")
        match received:
            case CarrierMessage(event="media", media=_Media(payload, chunk, track)):
                # Telnyx may send both directions.
                return (
                    []
                    if track.startswith("outbound")
                    else [CallerAudio(self._codec.decode_base64(payload), self._place(chunk))]
                )
            case CarrierMessage(event="dtmf", dtmf=_Dtmf(digit)):
                return [Pressed(str(digit))]
            case CarrierMessage(event="mark", mark=_Mark(name)) | CarrierMessage(event="playedStream", name=name):
                return [MarkReturned(name)]
            case CarrierMessage(event="media" | "dtmf" | "mark"):
                raise RemoteProtocolError(
                    "bad_event", f"The event '{received.event}' lacks its object.", received.event
                )
            case _:
                return []

    def _place(self, chunk: int | str | None) -> int | None:
        """Return the place of audio in the stream, if the carrier may have reordered it."""
        assert self._carrier
        text = str(chunk)
        return int(text) if self._carrier.reorders and text.isascii() and text.isdecimal() and len(text) < 16 else None

    def _start(self, received: CarrierMessage) -> Started:
        if self._carrier:
            raise RemoteProtocolError("bad_event", "The event 'start' came twice.", "event")
        given = {} if isinstance(received.start, UnsetType) else any_value(received.start, "start")
        known = facts(given)
        carrier = next((c for c in _CARRIERS if c.recognized_by in known), None)
        if carrier is None:
            raise RemoteProtocolError("bad_event", "The event 'start' is of no known carrier.", "start")
        form = facts(given.get(carrier.media_format))
        rate = form.get(carrier.sample_rate, "8000")
        codec = codec_of(form.get("encoding", "audio/x-mulaw"), int(rate) if rate.isdecimal() and len(rate) < 7 else 0)
        if codec.name == "pcm16" and not carrier.has_pcm16:
            raise RemoteProtocolError("unsupported_format", "Ask Telnyx for PCMU or PCMA: its L16 is not supported.")
        self._carrier, self._codec, self._stream_id = carrier, codec, known.get(carrier.stream_id, "")
        self.message_frames = carrier.message_frames
        call = Call(
            carrier.name,
            id=known.get(carrier.call_id, ""),
            account=known.get(carrier.account, ""),
            caller=known.get("from", ""),
            called=known.get("to", ""),
            parameters=_parameters(given.get(carrier.parameters) or received.extra_headers),
        )
        return Started(call, codec)

    # --- to the carrier

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return the message that plays these samples. Pads them to the least length that the carrier accepts."""
        codec = self._started
        if self.message_frames > 5:
            missing = -len(pcm) % (codec.rate_hz // 50 * self.message_frames)
            pcm = np.concatenate((pcm, np.zeros(missing, np.int16)))
        payload = b64encode(codec.encode(pcm)).decode()
        if self._is_plivo:
            kind = "audio/x-l16" if codec.name == "pcm16" else "audio/x-mulaw"
            media = {"contentType": kind, "sampleRate": codec.rate_hz, "payload": payload}
            return [self._encoded("playAudio", media=media)]
        return [self._encoded("media", media={"payload": payload})]

    def mark(self, name: str) -> str:
        """Return the message that sets a mark. Plivo calls it a checkpoint."""
        return self._encoded("checkpoint", name=name) if self._is_plivo else self._encoded("mark", mark={"name": name})

    def clear(self) -> str:
        """Return the message that empties the carrier's buffer. Twilio then returns the marks that were in it."""
        return self._encoded("clearAudio" if self._is_plivo else "clear")

    @property
    def _started(self) -> Codec:
        assert self._codec, "nothing is sent before the stream has started"
        return self._codec

    @property
    def _is_plivo(self) -> bool:
        return self._carrier is not None and self._carrier.name == "plivo"

    def _encoded(self, event: str, **fields: object) -> str:
        address = {self._carrier.addressed_by: self._stream_id} if self._carrier and self._carrier.addressed_by else {}
        return str(message(event=event, **address, **fields).encode())


def _parameters(given: object) -> dict[str, str]:
    """Return the parameters of a `start`. Plivo sends them as JSON in a text."""
    if isinstance(given, str):
        try:
            given = any_value(given, "start.extra_headers")
        except RemoteProtocolError:
            return {}
    return facts(given)


def stream_of(first: str | bytes, subprotocol: str = "") -> MediaStream:
    """Return the stream that begins with this message, which is read by its `read` too.

    `subprotocol`: the one of SUBPROTOCOLS that the peer offers; "" if it offers none.
    """
    if subprotocol in fork.SUBPROTOCOLS:
        return fork.ForkStream()
    if subprotocol == asterisk.SUBPROTOCOL or (isinstance(first, str) and asterisk.MEDIA_START in first[:100]):
        return asterisk.WebSocketChannel()
    return VonageStream() if isinstance(first, str) and CONNECTED in first else CarrierStream()
