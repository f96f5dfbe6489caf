"""The parts shared by dialects over a full-duplex session that are not like OpenAI's: the session's state on the wire,
and the wire side of a connection. The bridges use them (docs/wire/bridges.md), and the dialects of other vendors.

A session ends with its connection and cannot be resumed, unless its dialect says otherwise.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    ContentPosition,
    ConversationConfig,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.data_uri import decode_base64
from antiphon.events.duplex import DuplexConfig, EpochRaised
from antiphon.events.transcription import (
    AppendAudio,
    CommitRefused,
    SessionEnding,
    TranscriptFailed,
    TranscriptionConfig,
)
from antiphon.protocols.connection import Command, Context, Event, NeverResumed
from antiphon.protocols.fields import LIMIT_CODES, check_length, decode
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.messages import type_in
from antiphon.protocols.wire import Frame, Received
from antiphon.turns.end_of_turn import semantic_vad

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
# Sample rate of the audio that the clients play, in Hz.
OUT_HZ = 24_000
# Turn detection for cascades. These clients cannot configure it.
ENDPOINTING = semantic_vad()


class BridgeSession:
    """One session of a bridge. Begins the session, decodes audio and queues frames for the bridge's dialect.

    `begun`: the session has begun. `closing`: the client has asked to end it. `epoch`: the current epoch; audio and
    text of older epochs are not sent. `frame` makes a JSON frame from its fields, and the epoch of audio and text.
    """

    def __init__(self, context: Context, frame: Callable[..., Frame] = Frame) -> None:
        self._frame = frame
        self.id = context.new_id("sess-")
        self.context = context
        self.begun = False
        self.closing = False
        self.epoch = 0
        self._frames: list[Frame] = []
        self._resamplers: dict[str, Resampler] = {}
        self._epochs: dict[str, int] = {}

    def begin(
        self, instructions: str, voice: str | None = None, language: str | None = None, reference: bytes = b""
    ) -> ConfigureConversation:
        """Return the command that begins the session. `reference`: an audio file with the voice to use.

        Raises RemoteProtocolError for instructions that are too long.
        """
        check_length(len(instructions), "instructions")
        self.begun = True
        voices = self.context.voices
        transcription = TranscriptionConfig(vad=ENDPOINTING, language=language, preflight=True)
        config = ConversationConfig(
            transcription,
            instructions=instructions,
            audio_output=bool(voices),
            voice=voice if voice in voices else None,
            reports_transcripts=True,
            # A native model hears the user during its responses.
            native_decides_interruptions=True,
            allows_backchannels=True,
            duplex=DuplexConfig(voice_reference=reference),
        )
        return ConfigureConversation(config)

    def require_begun(self) -> None:
        """Raise RemoteProtocolError if the session has not begun."""
        if not self.begun:
            raise RemoteProtocolError("bad_event", "The session has not begun.")

    def decode_f32(self, text: object) -> Pcm:
        """Decode base64 of float32 at 16 kHz, clipped to [-1, 1]. Raises RemoteProtocolError (`bad_audio`)."""
        try:
            data = decode_base64(text)  # type: ignore[arg-type]
            pcm = np.frombuffer(data, "<f4")
        except (TypeError, ValueError):
            raise RemoteProtocolError("bad_audio", "Sound is float32 of 16 kHz, in base64.", "audio") from None
        if len(data) > self.context.max_append_bytes or not np.isfinite(pcm).all():
            raise RemoteProtocolError(
                "bad_audio", "The audio is too long, or has a sample that is not a finite number.", "audio"
            )
        return np.asarray(np.clip(pcm, -1, 1), np.float32)

    def resample(self, item_id: str, pcm: Pcm, rate_hz: int) -> Pcm:
        """Resample an item's audio to OUT_HZ. The first audio of a new item drops the resampler of the previous one."""
        if item_id not in self._resamplers:
            self._resamplers = {item_id: Resampler(rate_hz, OUT_HZ)}
        return self._resamplers[item_id].feed(pcm)

    def flush_audio(self, item_id: str) -> Pcm:
        """Return the last samples of an item's audio, which the resampler held back."""
        resampler = self._resamplers.pop(item_id, None)
        return resampler.flush() if resampler else np.zeros(0, np.float32)

    def add(self, **fields: Any) -> None:
        """Queue a JSON message with these fields."""
        self._frames.append(self._frame(fields))

    def add_media(self, at: ContentPosition, **fields: Any) -> None:
        """Queue a message with text or audio of a response, marked with the epoch. No-op if that epoch has passed."""
        if self._is_current(at):
            self._frames.append(self._frame(fields, self.epoch))

    def add_binary(self, at: ContentPosition, data: bytes) -> None:
        """Queue binary audio of a response, marked with the epoch. No-op if that epoch has passed."""
        if self._is_current(at):
            self._frames.append(Frame(data, self.epoch))

    def _is_current(self, at: ContentPosition) -> bool:
        return self._epochs.get(at.response_id, self.epoch) == self.epoch

    def take(self) -> list[Frame]:
        """Remove and return the queued frames, oldest first."""
        taken, self._frames = self._frames, []
        return taken

    def follow(self, event: Event) -> bool:
        """Update the epochs from an event; return whether the event belongs to a response of an older epoch."""
        match event:
            case EpochRaised(epoch):
                self.epoch = epoch
            case ResponseCreated(response) if response.stored:
                self._epochs[response.id] = self.epoch
            case ResponseAudioDelta(at) | ResponseTextDelta(at):
                return self._epochs.get(at.response_id, self.epoch) < self.epoch
            case _:
                pass
        return False

    def forget(self, event: Event) -> None:
        """Forget a response that has ended. Call it after its last event was written."""
        if isinstance(event, ResponseDone):
            self._epochs.pop(event.response.id, None)


class BridgeDialect(Protocol):
    """Reads and writes the messages of one bridge. Each session has its own instance."""

    # The name in metrics.
    name: str

    def opened(self) -> None:
        """Queue the first frames to the client."""
        ...

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame. Raises RemoteProtocolError for an invalid frame."""
        ...

    def write(self, event: Event) -> None:
        """Queue the frames of an event; most events have none."""
        ...

    def error(self, error: RemoteProtocolError) -> None:
        """Queue an error message in the dialect's own format."""
        ...

    def closed(self) -> None:
        """Queue the last frames. The server calls it after it has closed the session at the client's request."""
        ...


class BridgeConnection(NeverResumed):
    """One connection in the dialect of a bridge. `make`: returns the dialect for a session."""

    # A commit is only valid if there is some new audio.
    min_commit_ms = 1
    # The close code and reason with which the session is to end.
    finishing: tuple[int, str] | None = None
    # Idle timeout: the session ends after this number of seconds without a frame from the client.
    idle_s: float | None = 300.0

    def __init__(
        self,
        opening: Opening,
        context: Context,
        make: Callable[[BridgeSession], BridgeDialect],
        frame: Callable[..., Frame] = Frame,
    ) -> None:
        self.opening = opening
        self.context = context
        self._session = BridgeSession(context, frame)
        self._dialect = make(self._session)

    @property
    def id(self) -> str:
        """The session's id. Each connection gets a new one."""
        return self._session.id

    @property
    def dialect(self) -> str:
        """The bridge's name in metrics and logs."""
        return self._dialect.name

    @property
    def epoch(self) -> int:
        """The session's epoch. Audio and text of older epochs are not sent."""
        return self._session.epoch

    @property
    def closing(self) -> bool:
        """Whether the client has asked to end the session."""
        return self._session.closing

    def open(self) -> list[Frame]:
        """Return the first frames to the client. Raises RemoteProtocolError if no conversation model is loaded."""
        if self.context.conversation_models is None:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")
        self._dialect.opened()
        return self._session.take()

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised."""
        try:
            commands: list[Command] = [data] if isinstance(data, AppendAudio) else self._dialect.read(data)
        except RemoteProtocolError as error:
            self._dialect.error(error)
            commands = []
        return Received(commands, self._session.take())

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return self.refuse(RemoteProtocolError("event_too_large", f"The event is larger than {max_bytes} bytes."), None)

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Ignores `event_id`, because messages have no ids in these dialects."""
        self._dialect.error(error)
        return self._session.take()

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect has none for it.

        Drops text and audio of a response from an older epoch. Reports rejected commands, failures and the end of the
        session as errors.
        """
        if self._session.follow(event):
            return []
        match event:
            case CommitRefused():
                self._dialect.error(
                    RemoteProtocolError("input_audio_buffer_commit_empty", "No audio arrived since the last turn.")
                )
            case TranscriptFailed(_, message):
                self._dialect.error(RemoteProtocolError("transcription_failed", message))
            case ResponseDone(response) if response.status == "failed":
                code = "processing_error" if response.code == "server_error" else response.code
                self._dialect.error(RemoteProtocolError(code, response.error))
            case CommandRejected(code, message, param):
                self._dialect.error(RemoteProtocolError(code, message, param))
            case SessionEnding(code, message):
                self._dialect.error(RemoteProtocolError(code, message))
            case _:
                pass
        self._dialect.write(event)
        self._session.forget(event)
        return self._session.take()

    def close(self) -> list[Frame]:
        """Return the dialect's last frames. The server calls it after it has closed the session for the client."""
        self._dialect.closed()
        return self._session.take()


def read_bridge(data: str | bytes, kind: TypeForm[T]) -> T:
    """Decode a frame into a member of the union `kind`. Raises RemoteProtocolError with the wording of the bridges."""
    try:
        return decode(data, kind)
    except RemoteProtocolError as error:
        if error.code in LIMIT_CODES:
            raise
        if error.code == "invalid_json":
            raise RemoteProtocolError("invalid_json", "The event is not valid JSON.") from None
        found = type_in(data)
        if not isinstance(found, str):
            raise RemoteProtocolError("bad_event", "An event is a JSON object with a type.") from None
        if error.param == "type":
            raise RemoteProtocolError("unknown_event", f"There is no event '{found}'.", "type") from None
        raise


def f32_base64(pcm: Pcm) -> str:
    """Encode samples as base64 of little-endian float32, the audio format of these dialects. Does not scale or clip."""
    return b64encode(pcm.astype("<f4").tobytes()).decode()
