"""A call that a door terminates: over WebRTC, or on the telephone (`cluster/door/telephone.py`).

The door terminates the media, so the call outlives its host. To the host, the door is a WebSocket client with its own
playback: it sends the microphone as `input_audio_buffer.append`, plays `response.output_audio.delta`, pauses when the
host asks for it (`audio.output.ducking`), and truncates an interrupted item to the part that it has played. A caller
over WebRTC gets the events of a call: the session's events without audio, and `output_audio_buffer.started`, `.stopped`
and `.cleared`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio
import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.client.held_session import message
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    ResponseAudioDelta,
)
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.realtime.session_fields import uses_beta_names
from antiphon.transports.player import ResponsePlayer
from antiphon.transports.transport import STALL_S, TransportClosed

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

# The sample rate between the door and its hosts: the protocol's default in both directions.
WIRE_HZ = 24_000
PCM = msgspec.Raw(b'{"type":"audio/pcm","rate":%d}' % WIRE_HZ)
BETA_FORMATS = {"input_audio_format", "output_audio_format"}
PCM_BETA, TRUE = msgspec.Raw(b'"pcm16"'), msgspec.Raw(b"true")
# Prefix of the event ids of the door's own messages. Errors about them are not passed to the caller.
OWN = "door_"
CONFIGURATION = f"{OWN}configuration"
# Limit on a pause, in seconds: a host may die before it ends the pause.
MAX_HOLD_S = 4.0
# Headers that apply only to WebSockets. A call uses the names of OpenAI's GA API until a session with the names of the
# beta API is sent.
DROPPED_HEADERS = (b"openai-beta",)
# Prefixes of events that are passed on without being parsed.
UNREAD = ('{"type":"conversation.', '{"type":"rate_limits.', '{"type":"response.output_audio_transcript.delta')
T = TypeVar("T", bound=msgspec.Struct)
# A JSON object whose values are passed on unchanged.
_Fields = dict[str, msgspec.Raw]


# --- the fields that a door reads -------------------------------------------------------------------------------------


class _Tagged(msgspec.Struct):
    type: str = ""


class _Asked(msgspec.Struct):
    model: str = ""


class _TurnDetection(msgspec.Struct):
    interrupt_response: bool | None = True


class _Input(msgspec.Struct):
    turn_detection: _TurnDetection | None = None


class _Audio(msgspec.Struct):
    input: _Input | None = None


class _HostSession(_Input):
    """A session with the names of the GA or the beta API. The beta API has `turn_detection` outside of `audio`."""

    id: str = ""
    type: str = "realtime"
    audio: _Audio = msgspec.field(default_factory=_Audio)


class _HostError(msgspec.Struct):
    code: str | None = None
    message: str | None = None
    param: str | None = None
    event_id: str | None = None


class _Details(msgspec.Struct):
    reason: str | None = None


class _HostItem(msgspec.Struct):
    """An item of a response: a call of a function has a name and arguments, which are JSON text."""

    type: str = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class _HostResponse(msgspec.Struct):
    id: str = ""
    output: list[_HostItem] = []
    status: str | None = None
    status_details: _Details | None = None


class HostEvent(msgspec.Struct):
    """The fields of a host's events that the door reads. Each event has some of them."""

    # The event's name.
    type: str = ""
    # The session, in `session.created` and `session.updated`.
    session: msgspec.Raw = msgspec.Raw(b"{}")
    # The error, in `error`.
    error: _HostError = msgspec.field(default_factory=_HostError)
    # The response, in `response.created` and `response.done`.
    response: _HostResponse = msgspec.field(default_factory=_HostResponse)
    # The response that the audio belongs to.
    response_id: str = ""
    # The item that the audio belongs to.
    item_id: str = ""
    # The item's position in the response.
    output_index: int = 0
    # The content part's position in the item.
    content_index: int = 0
    # A piece of audio, in base64.
    delta: str = ""

    @property
    def place(self) -> ContentPosition:
        """The response, item and content part that the audio belongs to."""
        return ContentPosition(self.response_id, self.item_id, self.output_index, self.content_index)


class CallMedia(Protocol):
    """The sound of a call in both directions: `transports/webrtc.py`, `transports/leg.py`."""

    @property
    def playback(self) -> ResponsePlayer:
        """The player of responses, which counts what the caller has heard."""
        ...

    async def receive(self) -> str | bytes | AppendAudio | None:
        """Wait for the caller's next audio or frame. Returns None after the caller has left."""
        ...

    def arrive(self, item: str) -> None:
        """Queue a frame for `receive`. Does not wait."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """End the call. Raises TransportClosed if the caller has left."""
        ...


class CallClient:
    """One call as a DoorClient. Its session is configured before the call is answered.

    `connection`: a request whose headers the hosts get. `model`: the requested model; "" for the hosts' own. `session`:
    the requested session, a JSON object; None for the default session. When a host has accepted or refused the session,
    `decided` is set, and so is either `session_id` or `refusal`. The creator then answers the call, and ends it with
    `hang_up` in any case.
    """

    path = "/v1/realtime"
    is_held = True

    def __init__(self, connection: HTTPConnection, session: msgspec.Raw | None, model: str = "") -> None:
        self.connection = connection
        self.query = QueryParams({"model": model} if model else {})
        self.decided = anyio.Event()
        self.session_id = ""
        self.refusal: RemoteProtocolError | None = None
        self._media: CallMedia | None = None
        # Set when there are media, or when there will be none.
        self._attached = anyio.Event()
        self._asked = session
        # The session's type; "" until a host has created the session.
        self._kind = ""
        # The session, as the host has shown it last.
        self._session = msgspec.Raw(b"{}")
        self._made = anyio.Event()
        self._is_configured = False
        self._interrupts = True
        self._microphone = Resampler(SAMPLE_RATE_HZ, WIRE_HZ)
        self._own_ids = itertools.count(1)
        self._hold_timer: asyncio.TimerHandle | None = None

    def attach(self, media: CallMedia) -> None:
        """Set the media of the call."""
        self._media = media
        self._attached.set()

    def hang_up(self) -> None:
        """End the call as if the caller had left. Does not wait."""
        self._attached.set()

    async def _show(self, frame: str | bytes) -> None:
        """Send the caller a frame. Raises TransportClosed."""
        raise NotImplementedError

    def _tell(self, kind: str, response_id: str) -> None:
        """Send the caller an event about its playback. Does not wait."""
        raise NotImplementedError

    # --- DoorClient: to the host --------------------------------------------------------------------------------------

    async def accept(self, subprotocol: str | None) -> None:
        """See DoorClient. Does nothing: the call is answered after `decided` is set."""

    async def receive(self) -> str | bytes | None:
        """See DoorClient. Returns the configuration first, then the caller's events and audio."""
        if not self._is_configured:
            await self._made.wait()
            self._is_configured = True
            update = {"type": "session.update", "event_id": CONFIGURATION, "session": self._configuration()}
            return msgspec.json.encode(update).decode()
        await self._attached.wait()
        while self._media and (item := await self._media.receive()) is not None:
            if not isinstance(item, AppendAudio):
                if (frame := self._from_caller(item)) is not None:
                    return frame
            elif len(pcm := self._microphone.feed(item.pcm)):
                audio = base64.b64encode(to_pcm16(pcm)).decode()
                return json.dumps({"type": "input_audio_buffer.append", "audio": audio})
        return None

    def _configuration(self) -> msgspec.Raw:
        """Return the session to request from the host: the caller's session, with the door's audio formats."""
        return _in_own_formats(_raw({"type": self._kind}) if self._asked is None else self._asked)

    def _from_caller(self, frame: str | bytes) -> str | bytes | None:
        """Convert a frame of the caller into a frame for the host. Returns None if the host gets no frame."""
        match read(frame, _Tagged).type:
            case "output_audio_buffer.clear":
                self._silence()
                return None
            case "session.update" | "transcription_session.update":
                with suppress(ValueError, RecursionError):
                    event = msgspec.json.decode(frame, type=_Fields)
                    if "session" in event:
                        return msgspec.json.encode(event | {"session": _in_own_formats(event["session"])}).decode()
        # The host refuses anything that is not JSON.
        return frame

    # --- DoorClient: from the host ------------------------------------------------------------------------------------

    async def send(self, frame: str | bytes) -> None:
        """See DoorClient. Raises TransportClosed if the caller has left."""
        given = frame if isinstance(frame, bytes) or frame.startswith(UNREAD) else self._from_host(frame)
        if given is None:
            return
        await self._show(given)
        if not isinstance(given, str):
            return
        # `output_audio_buffer.cleared` has to follow the event that caused it.
        if given.startswith('{"type":"input_audio_buffer.speech_started"') and self._interrupts:
            self._silence()

    def _from_host(self, frame: str) -> str | None:
        """Handle an event of the session, and return the frame for the caller; None if the caller gets no frame."""
        event = read(frame, HostEvent)
        self._follow(event)
        match event.type:
            case "session.created" | "session.updated":
                return self._session_told(event.session, frame)
            case "error":
                return self._failed(event.error, frame)
            case "response.output_audio.delta" | "response.audio.delta":
                pcm = from_pcm16(base64.b64decode(event.delta))
                self._play(ResponseAudioDelta(event.place, pcm, WIRE_HZ))
                return None
            case "response.output_audio.done" | "response.audio.done":
                self._play(ContentPartDone(event.place, ContentPart("output_audio")))
            case "output_audio_buffer.ducked" | "output_audio_buffer.unducked":
                self._hold(event.type.endswith(".ducked"))
                return None
            case "response.done" if _is_broken_off(event.response):
                self._silence()
        return frame

    def _follow(self, event: HostEvent) -> None:
        """Take note of an event of the session, before it is handled."""

    def _play(self, event: ConversationEvent) -> None:
        if self._media:
            self._media.playback.send(event)

    def _failed(self, error: _HostError, frame: str) -> str | None:
        if not self.decided.is_set():
            self.refusal = RemoteProtocolError(error.code or "invalid_value", f"{error.message}", error.param)
            self.decided.set()
            return None
        return None if (error.event_id or "").startswith(OWN) else frame

    def _session_told(self, raw: msgspec.Raw, frame: str) -> str | None:
        session = msgspec.json.decode(raw, type=_HostSession)
        self._session = raw
        found = (session.audio.input or session).turn_detection
        self._interrupts = found is None or bool(found.interrupt_response)
        if not self._kind:
            self._kind = session.type
            self._made.set()
            return None
        if self.decided.is_set():
            return frame
        # The first update confirms the caller's configuration: it becomes the caller's `session.created`.
        self.session_id = session.id
        self.decided.set()
        event: dict[str, msgspec.Raw | str] = msgspec.json.decode(frame, type=_Fields)
        return msgspec.json.encode(event | {"type": "session.created"}).decode()

    async def close(self, code: int, reason: str) -> None:
        """See DoorClient. Ends the call, if it was answered."""
        self.decided.set()
        if self._media:
            await self._media.close(code, reason)

    # --- playing ------------------------------------------------------------------------------------------------------

    def _silence(self) -> None:
        """Stop playing. Sends `cleared` events to the caller, and truncations of the cut items to the host."""
        self._hold(False)
        if not self._media:
            return
        cut = self._media.playback.silence()
        for response_id in dict.fromkeys(at.response_id for at, _ in cut):
            self._tell("output_audio_buffer.cleared", response_id)
        for at, heard_ms in cut:
            place = {"item_id": at.item_id, "content_index": at.content_index, "audio_end_ms": heard_ms}
            self._ask("conversation.item.truncate", **place)

    def _ask(self, type: str, **fields: object) -> None:
        """Queue a message of the door for the host."""
        if self._media:
            asked = {"type": type, "event_id": f"{OWN}{next(self._own_ids)}", **fields}
            self._media.arrive(msgspec.json.encode(asked).decode())

    def _hold(self, held: bool) -> None:
        if self._hold_timer:
            self._hold_timer.cancel()
        self._hold_timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._hold, False) if held else None
        if self._media:
            self._media.playback.hold(held)


class WebRtcClient(CallClient):
    """A call over WebRTC. The other query parameters of its request do not apply to calls."""

    def __init__(self, request: HTTPConnection, call: WebRtcCall, session: msgspec.Raw | None) -> None:
        headers = [h for h in request.scope["headers"] if h[0] not in DROPPED_HEADERS]
        model = request.query_params.get("model") or read(b"{}" if session is None else session, _Asked).model
        super().__init__(HTTPConnection({**request.scope, "headers": headers}), session, model)
        self._call = call
        call.playback.attach(self._tell_of_playback)
        self.attach(call)

    def hang_up(self) -> None:
        self._call.arrive(None)
        # Wakes the task that waits for the data channel, which then finds the channel closed.
        self._call.opened.set()

    async def _show(self, frame: str | bytes) -> None:
        """Wait until the call's data channel is open, and send a frame. Raises TransportClosed if it does not open."""
        with anyio.move_on_after(STALL_S) as scope:
            await self._call.opened.wait()
        if scope.cancelled_caught:
            self.hang_up()
        self._send_now(frame)

    def _send_now(self, frame: str | bytes) -> None:
        try:
            self._call.send_now(frame)
        except TransportClosed:
            # The caller has left, reads too slowly, or does not accept an event of this size.
            self.hang_up()
            raise

    def _tell_of_playback(self, event: PlaybackStarted | PlaybackStopped) -> None:
        kind = "started" if isinstance(event, PlaybackStarted) else "stopped"
        self._tell(f"output_audio_buffer.{kind}", event.response_id)

    def _tell(self, kind: str, response_id: str) -> None:
        with suppress(TransportClosed):
            self._send_now(message(type=kind, event_id=f"event_{secrets.token_hex(10)}", response_id=response_id))


def read(data: str | bytes, kind: type[T]) -> T:
    """Parse the known fields of a JSON object. Returns the defaults for invalid JSON and for fields of other types."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):
        return kind()


def _raw(value: Mapping[str, msgspec.Raw | str | _Fields]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _is_broken_off(response: _HostResponse) -> bool:
    """Return whether playback ends with the response. A response that the caller cancels plays until it is cleared."""
    reason = response.status_details.reason if response.status_details else None
    return response.status == "cancelled" and reason != "client_cancelled"


def _in_own_formats(session: msgspec.Raw) -> msgspec.Raw:
    """Return a session, or an update, with the door's audio formats and with ducking.

    A value of an invalid shape is returned unchanged, for the host to refuse.
    """
    try:
        fields = msgspec.json.decode(session, type=_Fields)
        if "type" not in fields and uses_beta_names(session):
            return _raw(fields | dict.fromkeys(fields.keys() & BETA_FORMATS, PCM_BETA))
        sides = msgspec.json.decode(fields.get("audio", b"{}"), type=dict[str, _Fields])
    except (ValueError, RecursionError, RemoteProtocolError):
        return session
    sides["input"] = sides.get("input", {}) | {"format": PCM}
    if read(session, _Tagged).type != "transcription":
        sides["output"] = sides.get("output", {}) | {"format": PCM, "ducking": TRUE}
    return _raw(fields | {"audio": _raw(sides)})
