"""The bridge for the openbmb-realtime SDK (`/v1/realtime?mode=audio|video`): docs/wire/bridges.md.

Audio is float32 in JSON. Text and audio have separate deltas. `mode` has no effect: a model that takes images receives
them in either mode.
"""

from __future__ import annotations

import msgspec

from antiphon.audio import Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ContentPosition,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import AppendFrames, BargeIn, ListenStepTaken
from antiphon.events.transcription import SessionEnding, TranscriptDone
from antiphon.protocols.bridge import BridgeConnection, BridgeSession, f32_base64, read_bridge
from antiphon.protocols.connection import Command, Dialect, Event, Resume
from antiphon.protocols.realtime.audio_buffer import appended
from antiphon.protocols.realtime.items import video_frames

# WebSocket subprotocol that the SDK requests.
SUBPROTOCOL = "map.realtime"


class OpenbmbInit(msgspec.Struct, tag_field="type", tag="session.init"):
    """Begins the session. If the payload is not an object, or the prompt is not a string, it counts as missing."""

    payload: object = None

    @property
    def system_prompt(self) -> str:
        """The model's instructions; empty if missing."""
        found = self.payload.get("system_prompt") if isinstance(self.payload, dict) else None
        return found if isinstance(found, str) else ""


class OpenbmbInput(msgspec.Struct):
    """The user's speech and images. `audio`: base64 of float32 at 16 kHz, which is checked when it is decoded."""

    audio: object = None
    video_frames: object = None
    force_listen: object = None


class OpenbmbAppend(msgspec.Struct, tag_field="type", tag="input.append"):
    """Appends audio of the user, and images."""

    input: OpenbmbInput


class OpenbmbClose(msgspec.Struct, tag_field="type", tag="session.close"):
    """Asks the server to end the session."""


class OpenbmbBridge:
    """The dialect for one session. The server sends the first message: the client need not wait in a queue."""

    name = "openbmb"

    def __init__(self, session: BridgeSession) -> None:
        self._session = session

    def opened(self) -> None:
        """Queue `session.queue_done`, for which the client waits."""
        self._session.add(type="session.queue_done")

    def closed(self) -> None:
        """Queue `session.closed`. The client gets it however the session ends, including after its own close."""
        self._session.add(type="session.closed", reason="closed", session_id=self._session.id)

    def error(self, error: RemoteProtocolError) -> None:
        """Queue an error with its code and message."""
        self._session.add(type="error", error={"code": error.code, "message": error.message})

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame. Raises RemoteProtocolError for an invalid frame."""
        session = self._session
        match read_bridge(data, OpenbmbInit | OpenbmbAppend | OpenbmbClose):
            case OpenbmbInit() as init:
                begin = session.begin(init.system_prompt)
                session.add(type="session.created", session_id=session.id)
                return [begin]
            case OpenbmbAppend(sent):
                session.require_begun()
                pcm = session.decode_f32(sent.audio)
                commands: list[Command] = []
                if sent.video_frames is not None:
                    commands.append(AppendFrames(video_frames(sent.video_frames)))
                if sent.force_listen is True:
                    commands.append(BargeIn("client_force_listen"))
                return [*commands, *appended(pcm)]
            case _:
                session.closing = True
                return []

    def write(self, event: Event) -> None:
        """Queue the frames of an event: a response's deltas and end, and the user's transcripts."""
        session = self._session
        match event:
            case ResponseTextDelta(at, text):
                kind = "response.output_text.delta"
                session.add_media(at, type=kind, text=text, kind="text", end_of_turn=False)
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio(at, session.resample(at.item_id, pcm, rate_hz))
            case ContentPartDone(at):
                self._add_audio(at, session.flush_audio(at.item_id))
            case ResponseDone(response):
                used = response.usage
                counts = (used.prompt_tokens, used.completion_tokens) if used else (0, 0)
                usage = {"input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": sum(counts)}
                session.add(
                    type="response.done", response={"id": response.id, "status": response.status, "usage": usage}
                )
                session.add(type="response.listen")
            case TranscriptDone(_, text) if text.strip():
                session.add(type="conversation.item.input_audio_transcription.completed", transcript=text)
            case ListenStepTaken():
                session.add(type="response.listen")
            case SessionEnding():
                self.closed()
            case _:
                return

    def _add_audio(self, at: ContentPosition, pcm: Pcm) -> None:
        if len(pcm):
            self._session.add_media(at, type="response.output_audio.delta", audio=f32_base64(pcm))


DIALECT = Dialect(
    name="openbmb",
    matches=lambda opening: opening.mode in ("audio", "video"),
    connect=lambda opening, context: BridgeConnection(opening, context, OpenbmbBridge),
    resume=Resume.NEVER,
    subprotocol=SUBPROTOCOL,
)
