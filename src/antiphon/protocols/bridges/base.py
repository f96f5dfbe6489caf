"""What the small duplex dialects share: one session with the partner's own turn-taking, and the interface of a connection. Sans-IO."""

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
from antiphon.protocols.wire import NewId, decode_event, frame
from antiphon.turns.eagerness import semantic_vad

OUT_HZ = 24_000
TURN = semantic_vad()


class Bridge:
    """One connection of such a dialect. A subclass reads its frames (`_event`) and says its own (`told`). `now_s`: monotonic seconds."""

    dialect = "bridge"
    min_commit_ms = 1
    idle_s: float | None = 300.0
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
        self._frames: list[str] = []
        self._resamplers: dict[str, Resampler] = {}
        self._epochs: dict[str, int] = {}

    # --- the interface of a connection --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make ready. Raises RemoteProtocolError where nobody answers."""
        if self._conversation_models is None:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")

    def receive(self, data: str | bytes) -> None:
        """One frame from the client. Never raises."""
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
        """One event. Raises RemoteProtocolError."""
        raise NotImplementedError

    def send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an output."""
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
        """What the dialect says of an output."""
        raise NotImplementedError

    def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        """Answer what the client did wrong."""
        self._add_frame(type="error", error={"code": error.code, "message": error.message})

    def too_large(self, most: int) -> None:
        """A frame over the server's limit came."""
        self.reject(RemoteProtocolError("event_too_large", f"The event is larger than {most} bytes."), None)

    def refuse(self, code: str, message: str) -> None:
        """The session ends for a reason the client should know."""
        self.send(SessionEnding(code, message))

    def closed(self) -> None:
        """The client's close was carried out."""

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Take the inputs so far."""
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[str]:
        """Take the frames to be sent."""
        taken, self._frames = self._frames, []
        return taken

    def session(self) -> dict[str, Any]:
        """The session as its client is shown it."""
        return {"id": self.id}

    # A connection of these dialects is as long as its session.

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        """None: there are no events about the connection."""
        return None

    def snapshot(self) -> dict[str, Any] | None:
        """Nothing is kept."""
        return None

    def replaced(self) -> str:
        """Nobody takes its place."""
        raise NotImplementedError

    def resumed(self, token: str, **facts: Any) -> str:
        """It is not resumed."""
        raise NotImplementedError

    # --- for a dialect --------------------------------------------------------------------------------------------------------

    def _begin(
        self, instructions: str, voice: str | None = None, language: str | None = None, reference: bytes = b""
    ) -> None:
        self._begun = True
        listening = TranscriptionConfig(vad=TURN, language=language, preflight=True)
        config = ConversationConfig(
            listening,
            instructions=instructions,
            audio_output=bool(self._voices),
            voice=voice if voice in self._voices else None,
            reports_transcripts=True,
            # A partner that takes turns by itself hears who speaks over it.
            interrupt_response=not (self._conversation_models and self._conversation_models.unit_ms),
            allows_backchannels=True,
            duplex=DuplexConfig(voice_reference=reference),
        )
        self._commands.append(ConfigureConversation(config))

    def _require_session(self) -> None:
        if not self._begun:
            raise RemoteProtocolError("bad_event", "The session has not begun.")

    def _decode_f32(self, text: Any) -> Pcm:
        """float32 sound of 16 kHz in base64. Raises RemoteProtocolError (bad_audio)."""
        try:
            data = decode_base64(text)
            pcm = np.frombuffer(data, "<f4")
        except (TypeError, ValueError):
            raise RemoteProtocolError("bad_audio", "Sound is float32 of 16 kHz, in base64.", "audio") from None
        if len(data) > self._max_bytes or not np.isfinite(pcm).all():
            raise RemoteProtocolError("bad_audio", "Sound is too long, or not of finite numbers.", "audio")
        return np.asarray(np.clip(pcm, -1, 1), np.float32)

    def _resample(self, item_id: str, pcm: Pcm, rate_hz: int) -> Pcm:
        if item_id not in self._resamplers:
            self._resamplers = {item_id: Resampler(rate_hz, OUT_HZ)}
        return self._resamplers[item_id].feed(pcm)

    def _flush_audio(self, item_id: str) -> Pcm:
        resampler = self._resamplers.pop(item_id, None)
        return resampler.flush() if resampler else np.zeros(0, np.float32)

    def _add_frame(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))


def f32_base64(pcm: Pcm) -> str:
    """float32 samples as base64."""
    return b64encode(pcm.astype("<f4").tobytes()).decode()
