"""The bridge `/v1/omni`, for clients that send and receive audio as binary frames: docs/wire/bridges.md, "Omni".

The client sends PCM16 and the server sends whole WAV files, in binary frames. The other messages are JSON.
"""

from __future__ import annotations

import msgspec

from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ContentPosition,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import ListenStepTaken
from antiphon.events.transcription import AppendAudio, CommitAudio
from antiphon.protocols.bridge import OUT_HZ, BridgeConnection, BridgeSession, read_bridge
from antiphon.protocols.connection import Command, Dialect, Event, Resume


class OmniConfig(msgspec.Struct, tag_field="type", tag="session.config"):
    """Begins the session. A field that is not a string counts as missing."""

    instructions: object = None
    voice: object = None
    language: object = None


class OmniInputDone(msgspec.Struct, tag_field="type", tag="input.done"):
    """Ends the client's turn and commits its audio."""


class OmniBridge:
    """The dialect for one session. If audio arrives before `session.config`, the session begins with the defaults."""

    name = "omni"

    def __init__(self, session: BridgeSession) -> None:
        self._session = session
        self._text = ""
        self._audio_started = False

    def opened(self) -> None:
        """Queue nothing: the client sends first."""

    def closed(self) -> None:
        """Queue nothing: the client itself closes the connection."""

    def error(self, error: RemoteProtocolError) -> None:
        """Queue an error with its code and message."""
        self._session.add(type="error", error={"code": error.code, "message": error.message})

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame; binary frames are audio. Raises RemoteProtocolError if it is invalid."""
        session = self._session
        if isinstance(data, bytes):
            return self._audio(data)
        match read_bridge(data, OmniConfig | OmniInputDone):
            case OmniConfig(instructions, voice, language):
                if session.begun:
                    raise RemoteProtocolError("session_exists", "The session has begun.")
                return [session.begin(_text(instructions) or "", _text(voice), _text(language))]
            case _:
                session.require_begun()
                return [CommitAudio()]

    def _audio(self, data: bytes) -> list[Command]:
        if len(data) % 2 or len(data) > self._session.context.max_append_bytes:
            raise RemoteProtocolError("bad_audio", "Binary frames are PCM16 of 16 kHz, mono.")
        commands: list[Command] = [] if self._session.begun else [self._session.begin("")]
        return [*commands, AppendAudio(from_pcm16(data))] if data else commands

    def write(self, event: Event) -> None:
        """Queue the frames of an event: a response's text, its audio as WAV files, its beginning and its end."""
        session = self._session
        match event:
            case ResponseCreated():
                self._text, self._audio_started = "", False
                session.add(type="turn.start")
            case ResponseTextDelta(at, text):
                self._text += text
                session.add_media(at, type="transcript.delta", delta=text)
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio(at, to_pcm16(session.resample(at.item_id, pcm, rate_hz)))
            case ContentPartDone(at):
                self._add_audio(at, to_pcm16(session.flush_audio(at.item_id)))
            case ResponseDone(response):
                if self._audio_started:
                    session.add(type="audio.done")
                used = response.usage
                usage = (
                    {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens} if used else None
                )
                session.add(type="turn.done", text=self._text, status=response.status, usage=usage)
            case ListenStepTaken(reason) if reason != "model":
                session.add(type="turn.done", text="", status="listening", usage=None)
            case _:
                return

    def _add_audio(self, at: ContentPosition, data: bytes) -> None:
        if not data:
            return
        if not self._audio_started:
            self._audio_started = True
            self._session.add_media(at, type="audio.start", format="wav_chunk", sample_rate=OUT_HZ)
        self._session.add_binary(at, wav_header(OUT_HZ, len(data)) + data)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


DIALECT = Dialect(
    name="omni",
    matches=lambda opening: opening.path == "/v1/omni",
    connect=lambda opening, context: BridgeConnection(opening, context, OmniBridge),
    paths=("/v1/omni",),
    resume=Resume.NEVER,
)
