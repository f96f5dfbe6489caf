"""The bridge `/v1/omni`, for clients without JSON audio: docs/wire/bridges.md, "Omni".

Audio is binary in both directions: PCM16 comes in, whole WAV files go out. A few JSON messages go between.
"""

from __future__ import annotations

from typing import Any

from antiphon.audio.encode import wav_header
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import ListenStepTaken
from antiphon.events.transcription import AppendAudio, CommitAudio, TranscriptionEvent
from antiphon.protocols.bridges.base import OUT_HZ, Bridge
from antiphon.protocols.wire import Frame, Payload


class OmniBridge(Bridge):
    """One connection. Audio that comes before a `session.config` begins a session with the defaults."""

    dialect = "omni"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._text = ""
        self._audio_started = False

    def _receive(self, data: str | bytes) -> None:
        if isinstance(data, str):
            Bridge._receive(self, data)
            return
        if len(data) % 2 or len(data) > self._max_bytes:
            raise RemoteProtocolError("bad_audio", "Binary frames are PCM16 of 16 kHz, mono.")
        if not self._begun:
            self._begin("")
        if data:
            self._commands.append(AppendAudio(from_pcm16(data)))

    def _handle_event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "session.config":
                if self._begun:
                    raise RemoteProtocolError("session_exists", "The session has begun.")
                given = {k: v for k in ("instructions", "voice", "language") if isinstance(v := event.get(k), str)}
                self._begin(given.get("instructions", ""), given.get("voice"), given.get("language"))
            case "input.done":
                self._require_session()
                self._commands.append(CommitAudio())
            case _:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def _send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event: of a response its text, its audio as WAV files, and its beginning and end."""
        match output:
            case ResponseCreated():
                self._text, self._audio_started = "", False
                self._add_frame(type="turn.start")
            case ResponseTextDelta(at, text):
                self._text += text
                self._add_media(at, {"type": "transcript.delta", "delta": text})
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio(at, to_pcm16(self._resample(at.item_id, pcm, rate_hz)))
            case ContentPartDone(at):
                self._add_audio(at, to_pcm16(self._flush_audio(at.item_id)))
            case ResponseDone(response):
                if self._audio_started:
                    self._add_frame(type="audio.done")
                used = response.usage
                usage = (
                    {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens} if used else None
                )
                self._add_frame(type="turn.done", text=self._text, status=response.status, usage=usage)
            case ListenStepTaken(reason) if reason != "model":
                self._add_frame(type="turn.done", text="", status="listening", usage=None)
            case _:
                return

    def _add_audio(self, at: ContentPosition, data: bytes) -> None:
        if not data:
            return
        if not self._audio_started:
            self._audio_started = True
            self._add_media(at, {"type": "audio.start", "format": "wav_chunk", "sample_rate": OUT_HZ})
        self._add_media(at, wav_header(OUT_HZ, len(data)) + data)

    def _add_media(self, at: ContentPosition, payload: Payload | bytes) -> None:
        epoch = self._epochs.get(at.response_id, self.epoch)
        if epoch == self.epoch:
            self._frames.append(Frame(payload, epoch))
