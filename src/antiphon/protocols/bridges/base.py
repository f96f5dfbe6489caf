"""What the bridges share: a full-duplex session, and the interface of a connection. docs/wire/bridges.md.

A session of a bridge lives as long as its connection and cannot be resumed. Turns end as with `semantic_vad`; a native
model takes them by itself.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    ConversationCommand,
    ConversationConfig,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.data_uri import decode_base64
from antiphon.events.duplex import DuplexConfig, EpochRaised
from antiphon.events.transcription import (
    SessionEnding,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, NewId, decode_event
from antiphon.turns.eagerness import semantic_vad

# What the clients play, in Hz.
OUT_HZ = 24_000
# Cascades end a turn as semantic_vad does; the clients have no setting for it.
ENDPOINTING = semantic_vad()


class Bridge:
    """One connection of a bridge. A subclass reads the client's messages (`_handle_event`) and writes others (`_send`).

    `conversation_models`: the names of the conversation model, None where none is loaded. `voices`: its voices, the
    first is the default; with none, responses are text. `max_bytes`: the most audio in one message, decoded. `now_s`:
    monotonic seconds.
    """

    # The name in metrics.
    dialect = "bridge"
    # Any new audio is enough for a commit.
    min_commit_ms = 1
    # Seconds without a frame from the client after which the session ends.
    idle_s: float | None = 300.0
    # The session's epoch: audio and text of an older one are not sent any more.
    epoch = 0

    def __init__(
        self,
        opening: Opening,
        conversation_models: ModelNames | None,
        voices: tuple[str, ...],
        new_id: NewId,
        max_bytes: int,
        now_s: Callable[[], float],
    ) -> None:
        self.opening = opening
        self.id = new_id("sess-")
        self.new_id = new_id
        self.closing = False
        self._conversation_models = conversation_models
        self._voices = voices
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._begun = False
        self._commands: list[Any] = []
        self._frames: list[Frame] = []
        self._resamplers: dict[str, Resampler] = {}
        self._epochs: dict[str, int] = {}

    # --- the interface of a connection

    def open(self) -> None:
        """Check that a session can begin. Raises RemoteProtocolError where no conversation model is loaded."""
        if self._conversation_models is None:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")

    def receive(self, data: str | bytes) -> None:
        """Read one frame from the client: commands, and an answer where it has one, are queued. Never raises."""
        try:
            self._receive(data)
        except RemoteProtocolError as error:
            self.reject(error, None)

    def _receive(self, data: str | bytes) -> None:
        untyped = ("bad_event", "An event is a JSON object with a type.")
        event = decode_event(data, no_object=untyped)
        if not isinstance(event.get("type"), str):
            raise RemoteProtocolError(*untyped)
        self._handle_event(event["type"], event)

    def _handle_event(self, kind: str, event: dict[str, Any]) -> None:
        """Read one message of type `kind`. Raises RemoteProtocolError, which becomes an error for the client."""
        raise NotImplementedError

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event of the session; events without a frame in the dialect are dropped.

        Text and audio of a response from an older epoch are dropped too. Rejected commands and the end of the session
        become errors.
        """
        match output:
            case EpochRaised(epoch):
                self.epoch = epoch
            case ResponseCreated(response) if response.stored:
                self._epochs[response.id] = self.epoch
            case ResponseAudioDelta(at) | ResponseTextDelta(at) if (
                self._epochs.get(at.response_id, self.epoch) < self.epoch
            ):
                return
            case CommandRejected(code, message, param):
                self.reject(RemoteProtocolError(code, message, param), None)
            case SessionEnding(code, message):
                self.reject(RemoteProtocolError(code, message), None)
            case _:
                pass
        self._send(output)
        if isinstance(output, ResponseDone):
            self._epochs.pop(output.response.id, None)

    def _send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue what this dialect has for an event."""
        raise NotImplementedError

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Queue an error for the client. Messages of these dialects have no ids, so `event_id` is dropped."""
        self._add_frame(type="error", error={"code": error.code, "message": error.message})

    def too_large(self, max_bytes: int) -> None:
        """Queue an error: a frame was larger than `max_bytes`. Call it in place of `receive`. The session goes on."""
        self.reject(RemoteProtocolError("event_too_large", f"The event is larger than {max_bytes} bytes."), None)

    def refuse(self, code: str, message: str) -> None:
        """Queue an error with which the server then ends the session."""
        self.send(SessionEnding(code, message))

    def closed(self) -> None:
        """Queue what the dialect has for a close that the client asked for and that was carried out; here nothing."""

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Remove and return what the frames so far ask of the session, in their order; frames that are wrong ask
        nothing.
        """
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[Frame]:
        """Remove and return the frames that wait to be sent, oldest first; `receive` and `send` only queue them."""
        taken, self._frames = self._frames, []
        return taken

    def session(self) -> dict[str, Any]:
        """The session's fields as JSON values, which are its id: these dialects show no more."""
        return {"id": self.id}

    # --- what a session that cannot be resumed does not have

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """None: these dialects have no messages about the connection itself."""
        return None

    def snapshot(self) -> dict[str, Any] | None:
        """None: these sessions end with their connection, and nothing of them is stored."""
        return None

    def replaced(self) -> Frame:
        """Not to be called: another connection cannot resume the session. Raises NotImplementedError."""
        raise NotImplementedError

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Not to be called: the session cannot be resumed. Raises NotImplementedError."""
        raise NotImplementedError

    # --- for a dialect

    def _begin(
        self, instructions: str, voice: str | None = None, language: str | None = None, reference: bytes = b""
    ) -> None:
        self._begun = True
        transcription = TranscriptionConfig(vad=ENDPOINTING, language=language, preflight=True)
        config = ConversationConfig(
            transcription,
            instructions=instructions,
            audio_output=bool(self._voices),
            voice=voice if voice in self._voices else None,
            reports_transcripts=True,
            # A native model hears the user speak over it, and decides by itself.
            interrupt_response=not (self._conversation_models and self._conversation_models.unit_ms),
            allows_backchannels=True,
            duplex=DuplexConfig(voice_reference=reference),
        )
        self._commands.append(ConfigureConversation(config))

    def _require_session(self) -> None:
        if not self._begun:
            raise RemoteProtocolError("bad_event", "The session has not begun.")

    def _decode_f32(self, text: Any) -> Pcm:
        """Samples of 16 kHz, clipped to [-1, 1], from base64 of float32. Raises RemoteProtocolError (`bad_audio`)."""
        try:
            data = decode_base64(text)
            pcm = np.frombuffer(data, "<f4")
        except (TypeError, ValueError):
            raise RemoteProtocolError("bad_audio", "Sound is float32 of 16 kHz, in base64.", "audio") from None
        if len(data) > self._max_bytes or not np.isfinite(pcm).all():
            raise RemoteProtocolError("bad_audio", "Sound is too long, or not of finite numbers.", "audio")
        return np.asarray(np.clip(pcm, -1, 1), np.float32)

    def _resample(self, item_id: str, pcm: Pcm, rate_hz: int) -> Pcm:
        """An item's audio at OUT_HZ. Items follow each other: a new one drops the resampler of the one before."""
        if item_id not in self._resamplers:
            self._resamplers = {item_id: Resampler(rate_hz, OUT_HZ)}
        return self._resamplers[item_id].feed(pcm)

    def _flush_audio(self, item_id: str) -> Pcm:
        """The last samples of an item's audio, which its resampler still held."""
        resampler = self._resamplers.pop(item_id, None)
        return resampler.flush() if resampler else np.zeros(0, np.float32)

    def _add_frame(self, **fields: Any) -> None:
        self._frames.append(Frame(fields))


def f32_base64(pcm: Pcm) -> str:
    """The samples as base64 of little-endian float32, neither scaled nor clipped: how these dialects carry audio."""
    return b64encode(pcm.astype("<f4").tobytes()).decode()
