"""A WebRTC call that a door holds: the client of a host's WebSocket that plays and listens in the caller's place.

The media end here, so that the call outlives its host. For the host the door is a client that plays by itself: it sends
the microphone as `input_audio_buffer.append`, plays what comes as `response.output_audio.delta`, pauses where the host
asks for that (`audio.output.ducking`), and truncates what was interrupted to what it has played. The caller gets the
events of a call: those of the session without audio, and `output_audio_buffer.started`, `.stopped` and `.cleared`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.client.held_session import fields_of, message
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, ContentPartDone, ContentPosition, ResponseAudioDelta
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.realtime.session_fields import uses_beta_names
from antiphon.transports.transport import STALL_S, TransportClosed

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

# What the door and its hosts send each other: the default of both sides of a session.
WIRE_HZ = 24_000
PCM = {"type": "audio/pcm", "rate": WIRE_HZ}
# The door's own messages; their errors are not the caller's.
OWN = "door_"
CONFIGURATION = f"{OWN}configuration"
# A host that dies while it has the audio paused leaves it paused for no longer than this.
MAX_HOLD_S = 4.0
# Of WebSockets alone: events of a call have the GA names until its session is given in the beta's.
DROPPED_HEADERS = (b"openai-beta",)
# By their prefix, events that are passed on unread.
UNREAD = ('{"type":"conversation.', '{"type":"rate_limits.', '{"type":"response.output_audio_transcript.delta')


class CallClient:
    """One call as a DoorClient. It is configured before it is answered.

    `session`: what the call asks for, as a session's JSON; None for the default. `decided` is set once a host has taken
    or refused that: `session_id` is the session's, or `refusal` says why there is none. `call` is its maker's, to be
    answered then, and to be ended with `hang_up` whatever comes of it.
    """

    path = "/v1/realtime"
    resumes_itself = False

    def __init__(self, request: HTTPConnection, call: WebRtcCall, session: dict[str, Any] | None) -> None:
        headers = [h for h in request.scope["headers"] if h[0] not in DROPPED_HEADERS]
        self.connection = HTTPConnection({**request.scope, "headers": headers})
        # What else a WebSocket may ask for is not for calls.
        model = request.query_params.get("model") or (session or {}).get("model")
        self.query = QueryParams({"model": model} if isinstance(model, str) else {})
        self.decided = anyio.Event()
        self.session_id = ""
        self.refusal: RemoteProtocolError | None = None
        self._call = call
        self._asked = session
        # What a host was last told of the session, once it has made one.
        self._created: dict[str, Any] | None = None
        self._made = anyio.Event()
        self._is_configured = False
        self._interrupts = True
        self._microphone = Resampler(SAMPLE_RATE_HZ, WIRE_HZ)
        self._own_ids = itertools.count(1)
        self._hold_timer: asyncio.TimerHandle | None = None
        call.playback.attach(self._tell_of_playback)

    # --- DoorClient: to the host --------------------------------------------------------------------------------------

    async def accept(self, subprotocol: str | None) -> None:
        """As DoorClient says: there is nothing to accept, the call is answered once it is decided."""

    async def receive(self) -> str | bytes | None:
        """As DoorClient says: the configuration first, then the caller's events and audio."""
        if not self._is_configured:
            await self._made.wait()
            self._is_configured = True
            return message(type="session.update", event_id=CONFIGURATION, session=self._configuration())
        while (item := await self._call.receive()) is not None:
            if not isinstance(item, AppendAudio):
                if (frame := self._from_caller(item)) is not None:
                    return frame
            elif len(pcm := self._microphone.feed(item.pcm)):
                audio = base64.b64encode(to_pcm16(pcm)).decode()
                return json.dumps({"type": "input_audio_buffer.append", "audio": audio})
        return None

    def _configuration(self) -> dict[str, Any]:
        """What the host is asked for: what the caller has asked for, in the door's formats of audio."""
        assert self._created
        kind = self._created.get("type", "realtime")
        return _in_own_formats({"type": kind} if self._asked is None else self._asked)

    def _from_caller(self, frame: str | bytes) -> str | bytes | None:
        """What the host gets of a frame of the caller; None: nothing."""
        event = fields_of(frame)
        match event.get("type"):
            case "output_audio_buffer.clear":
                self._silence()
                return None
            case "session.update" | "transcription_session.update" if isinstance(session := event.get("session"), dict):
                return json.dumps(event | {"session": _in_own_formats(session)})
        return frame

    # --- DoorClient: from the host ------------------------------------------------------------------------------------

    async def send(self, frame: str | bytes) -> None:
        """As DoorClient says. Waits until the call's channel is open. Raises TransportClosed where it never is."""
        given = frame if isinstance(frame, bytes) or frame.startswith(UNREAD) else self._from_host(frame)
        if given is None:
            return
        with anyio.move_on_after(STALL_S) as scope:
            await self._call.opened.wait()
        if scope.cancelled_caught:
            self.hang_up()
        self._send_now(given)
        if not isinstance(given, str):
            return
        # What is silenced is told of after what has silenced it.
        if given.startswith('{"type":"input_audio_buffer.speech_started"') and self._interrupts:
            self._silence()

    def _from_host(self, frame: str) -> str | None:
        """Take an event of the session, and return what the caller gets; None: nothing."""
        event = fields_of(frame)
        match event.get("type"):
            case "session.created" | "session.updated":
                return self._session_told(event, frame)
            case "error" if not self.decided.is_set():
                error = event["error"]
                code, text = str(error.get("code") or "invalid_value"), str(error.get("message"))
                self.refusal = RemoteProtocolError(code, text, error.get("param"))
                self.decided.set()
                return None
            case "error" if str(event["error"].get("event_id")).startswith(OWN):
                return None
            case "response.output_audio.delta" | "response.audio.delta":
                pcm = from_pcm16(base64.b64decode(event["delta"]))
                self._call.playback.send(ResponseAudioDelta(_place(event), pcm, WIRE_HZ))
                return None
            case "response.output_audio.done" | "response.audio.done":
                self._call.playback.send(ContentPartDone(_place(event), ContentPart("output_audio")))
            case "output_audio_buffer.ducked" | "output_audio_buffer.unducked":
                self._hold(event["type"].endswith(".ducked"))
                return None
            case "response.done" if _is_broken_off(event["response"]):
                self._silence()
        return frame

    def _session_told(self, event: dict[str, Any], frame: str) -> str | None:
        session = event["session"]
        found = session.get("audio", {}).get("input", session).get("turn_detection")
        self._interrupts = found is None or found.get("interrupt_response", True)
        created, self._created = self._created, session
        if created is None:
            self._made.set()
            return None
        if self.decided.is_set():
            return frame
        # The caller's session begins as it was asked for.
        self.session_id = session["id"]
        self.decided.set()
        return json.dumps(event | {"type": "session.created"}, separators=(",", ":"), ensure_ascii=False)

    async def close(self, code: int, reason: str) -> None:
        """As DoorClient says. WebRTC has no close codes."""
        self.decided.set()
        await self._call.close(code, reason)

    def hang_up(self) -> None:
        """Have the call end as if the caller had left. Does not wait."""
        self._call.arrive(None)
        # Whoever waits for the caller's channel goes on, and finds it closed.
        self._call.opened.set()

    def _send_now(self, frame: str | bytes) -> None:
        try:
            self._call.send_now(frame)
        except TransportClosed:
            # It has left, or reads too slowly, or takes no event of this size.
            self.hang_up()
            raise

    # --- playing ------------------------------------------------------------------------------------------------------

    def _silence(self) -> None:
        """Stop playing; tell the caller, and the host how much of each item was heard."""
        self._hold(False)
        cut = self._call.playback.silence()
        for response_id in dict.fromkeys(at.response_id for at, _ in cut):
            self._tell("output_audio_buffer.cleared", response_id)
        for at, heard_ms in cut:
            place = {"item_id": at.item_id, "content_index": at.content_index, "audio_end_ms": heard_ms}
            self._call.arrive(
                message(type="conversation.item.truncate", event_id=f"{OWN}{next(self._own_ids)}", **place)
            )

    def _hold(self, held: bool) -> None:
        if self._hold_timer:
            self._hold_timer.cancel()
        self._hold_timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._hold, False) if held else None
        self._call.playback.hold(held)

    def _tell_of_playback(self, event: PlaybackStarted | PlaybackStopped) -> None:
        kind = "started" if isinstance(event, PlaybackStarted) else "stopped"
        self._tell(f"output_audio_buffer.{kind}", event.response_id)

    def _tell(self, kind: str, response_id: str) -> None:
        with suppress(TransportClosed):
            self._send_now(message(type=kind, event_id=f"event_{secrets.token_hex(10)}", response_id=response_id))


def _in_own_formats(session: dict[str, Any]) -> dict[str, Any]:
    """A session, or an update of one, as it is asked of a host: in the door's formats of audio, and with ducking.

    What is of no shape that has formats is left for the host to refuse.
    """
    if "type" not in session and _is_beta(session):
        return session | {name: "pcm16" for name in ("input_audio_format", "output_audio_format") if name in session}
    audio = session.get("audio", {})
    if not isinstance(audio, dict) or not all(isinstance(side, dict) for side in audio.values()):
        return session
    sides = {"input": audio.get("input", {}) | {"format": PCM}}
    if session.get("type") != "transcription":
        sides["output"] = audio.get("output", {}) | {"format": PCM, "ducking": True}
    return session | {"audio": audio | sides}


def _is_beta(session: dict[str, Any]) -> bool:
    try:
        return uses_beta_names(msgspec.Raw(msgspec.json.encode(session)))
    except RemoteProtocolError:
        return False


def _is_broken_off(response: dict[str, Any]) -> bool:
    """Whether what is heard of a response ends with it: what the caller cancels is heard until it clears it."""
    details = response.get("status_details") or {}
    return response.get("status") == "cancelled" and details.get("reason") != "client_cancelled"


def _place(event: dict[str, Any]) -> ContentPosition:
    return ContentPosition(event["response_id"], event["item_id"], event["output_index"], event["content_index"])
