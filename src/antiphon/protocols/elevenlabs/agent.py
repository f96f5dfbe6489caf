"""ElevenLabs' agents over a WebSocket, `/v1/convai/conversation`. See docs/wire/elevenlabs-agents.md."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec

from antiphon.audio import Pcm
from antiphon.audio.incoming import IncomingAudio
from antiphon.audio.line.g711 import to_ulaw
from antiphon.audio.pcm import to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    CommandRejected,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    ItemTruncated,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.data_uri import decode_base64
from antiphon.events.duplex import BargeIn, EpochRaised
from antiphon.events.transcription import SessionEnding, TranscriptDone, TranscriptFailed
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.elevenlabs.agent_config import TEXT_EVENT, ConfiguredAgent
from antiphon.protocols.elevenlabs.agent_messages import (
    CONVAI_MESSAGE,
    ClientToolResult,
    ContextualUpdate,
    ConvaiConfig,
    ConvaiMessage,
    EnclaveSetup,
    InitiationData,
    MultimodalMessage,
    Pong,
    UserAudio,
    UserMessage,
)
from antiphon.protocols.elevenlabs.alignment import agent_alignment
from antiphon.protocols.elevenlabs.scribe import FORMATS
from antiphon.protocols.fields import any_value, call_arguments, decode
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received

PATH = "/v1/convai/conversation"
# What the SDKs say about themselves in the URL. `agent_id` has no effect either, but is logged.
PARAMETERS = frozenset(("source", "version", "environment"))
# Seconds between two pings, and seconds without a message after which the conversation ends.
PING_S, IDLE_S = 2.0, 300.0
# The close codes of an agent that cannot be served, of a conversation after IDLE_S, and of a failure.
CLOSE_REFUSED, CLOSE_IDLE, CLOSE_FAILED = 1008, 1000, 1011
# The WebSocket subprotocol that clients in browsers offer.
SUBPROTOCOL = "convai"
# Maximum length of the reason of a close frame, in bytes.
MAX_REASON_BYTES = 120
# The names of the objects in messages, by their types. That of any other type ends with `_event`.
_INNER = {
    "agent_chat_response_part": "text_response_part",
    "client_tool_call": "client_tool_call",
    "user_transcript": "user_transcription_event",
}
# Messages that a client gets whatever it lists.
_ALWAYS = frozenset(("conversation_initiation_metadata", "error"))
# The type of an error, by its code here.
_ERRORS = {
    "idle_timeout": "transport_receive_timeout",
    "missing_required_parameter": "missing_fields",
    "override_error": "override_error",
    "session_expired": "max_duration_exceeded",
    "transcription_failed": "asr_transcription_error",
}
# The number of items whose text is kept, so that a correction can quote it.
MAX_REPORTED = 16


class ConvaiConnection(ConfiguredAgent):
    """One conversation. It begins with the client's first message."""

    dialect, id_prefix = "elevenlabs_agent", "conv_"
    idle_s = IDLE_S

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        # The number of the newest response. Its audio has it too, so that a client can drop what an interruption ended.
        self._number = 0
        # The numbers of the responses in progress, and the numbers and texts of the newest items.
        self._numbers: dict[str, int] = {}
        self._reported: dict[str, tuple[int, str]] = {}
        # The item that is spoken and the seconds of its audio so far, and the item whose text is streamed.
        self._spoken = ("", 0.0)
        self._streamed = ""
        # The number of the newest ping, when it was sent, and the milliseconds until the answer to one.
        self._ping = 0
        self._pinged_s = context.steady_s()
        self._ping_ms: int | None = None

    def open(self) -> list[Frame]:
        """Return no frames: the client sends first. Raises RemoteProtocolError if no cascade is loaded."""
        self.check_model()
        return []

    # --- from the client

    def read(self, data: str | bytes) -> Received[Command]:
        """Read one message, which may begin the conversation. Raises RemoteProtocolError."""
        if isinstance(data, bytes):
            raise _invalid("A message is JSON, with audio in base64.", "type")
        sound = decode(data, UserAudio).user_audio_chunk
        asked = CONVAI_MESSAGE.read(data) if isinstance(sound, msgspec.UnsetType) else None
        if isinstance(asked, EnclaveSetup | InitiationData):
            if self.begun:
                raise _invalid("The conversation has begun.", "type")
            if isinstance(asked, InitiationData):
                return self._begin(asked)
            self.set_up(asked)
            return Received()
        commands = self._received(asked) if asked else self._append(str(sound))
        began = Received[Command]() if self.begun else self._begin(InitiationData())
        return Received([*began.commands, *commands], [*began.answers, *self._pings()])

    def _append(self, sound: str) -> list[Command]:
        try:
            data = decode_base64(sound)
        except ValueError:
            raise _invalid("Invalid value for 'user_audio_chunk': expected base64.", "user_audio_chunk") from None
        if len(data) > self.context.max_append_bytes:
            raise _invalid(f"A message has at most {self.context.max_append_bytes} bytes of audio.", "user_audio_chunk")
        return self.hear(data)

    def _received(self, asked: ConvaiMessage) -> list[Command]:
        match asked:
            case MultimodalMessage(text, file, files):
                if file or files:
                    raise _invalid("Files are not taken: send text.", "file")
                return self._written(text)
            case UserMessage():
                return self._written(asked)
            case ContextualUpdate(text):
                return [CreateItem(self.written("system", text))]
            case ClientToolResult(call_id, result, failed):
                value = any_value(result, "result")
                text = value if isinstance(value, str) else bytes(result).decode()
                return self.answered(call_id, f"The tool failed: {text}" if failed else text, "invalid_value")
            case Pong(event_id) if event_id == self._ping:
                self._ping_ms = round((self.context.steady_s() - self._pinged_s) * 1000)
            case _:
                pass
        return []

    def _written(self, asked: UserMessage | None) -> list[Command]:
        if not asked or not (asked.text or "").strip():
            return []
        item = CreateItem(self.written("user", asked.text or ""))
        return [BargeIn("user_message"), item, CreateResponse(when_busy="cut")]

    def _begin(self, asked: InitiationData) -> Received[Command]:
        self.apply(asked.conversation_config_override or ConvaiConfig())
        first_message = self.fill_in(asked.dynamic_variables or {})
        self.audio = IncomingAudio(*FORMATS[self.input_format])
        self.output_hz = FORMATS[self.output_format][1]
        began = self._message(
            "conversation_initiation_metadata",
            conversation_id=self.id,
            agent_output_audio_format=self.output_format,
            user_input_audio_format=self.input_format,
        )
        return Received(self.begin(first_message, []), began)

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect does not report it, or if the client does not want it."""
        self.follow(event)
        match event:
            case EpochRaised():
                return self._message("interruption", event_id=self._number)
            case TranscriptDone(_, text) if text.strip():
                return self._message("user_transcript", user_transcript=text.strip(), event_id=self._number)
            case ResponseCreated(response):
                self._number += 1
                self._numbers[response.id] = self._number
            case ResponseTextDelta(at, text) if self.is_current(at):
                begins, self._streamed = self._streamed != at.item_id, at.item_id
                return [*(self._part(at, "start", "") if begins else []), *self._part(at, "delta", text)]
            case ResponseAudioDelta(at, pcm, rate_hz, words) if self.is_current(at):
                before_s = self._spoken[1] if self._spoken[0] == at.item_id else 0.0
                self._spoken = at.item_id, before_s + len(pcm) / rate_hz
                aligned = {"alignment": agent_alignment(words, before_s, self._spoken[1])} if words else {}
                return self._audio(self._number_of(at.response_id), self.sound(at, pcm, rate_hz), **aligned)
            case ContentPartDone(at, part) if part.text.strip():
                return self._answered(at, part.text.strip())
            case ItemTruncated(item_id, text=text) if item_id in self._reported:
                number_, said = self._reported[item_id]
                if text.strip() == said:
                    return []
                return self._message(
                    "agent_response_correction",
                    original_agent_response=said,
                    corrected_agent_response=text.strip(),
                    event_id=number_,
                )
            case ArgumentsDone(at, call_id, name, arguments, server) if not server and self.is_current(at):
                return self._message(
                    "client_tool_call",
                    tool_name=name,
                    tool_call_id=call_id,
                    parameters=call_arguments(arguments),
                    event_id=self._number_of(at.response_id),
                )
            case ResponseDone(response):
                number_, rest = self._number_of(response.id), self.ended(event)
                self._numbers.pop(response.id, None)
                failed = response.status == "failed"
                error = self._error(response.code, response.error, "llm_error") if failed else []
                return [*error, *(self._audio(number_, rest) if rest is not None else [])]
            case SessionEnding(code, text):
                self.finishing = (CLOSE_IDLE, "idle_timeout") if code == "idle_timeout" else None
                return self._error(code, text)
            case CommandRejected(code, text):
                return self._error(code, text)
            case TranscriptFailed(_, text):
                return self._error("transcription_failed", text)
            case _:
                pass
        return []

    def _message(self, kind: str, epoch: int | None = None, **fields: Any) -> list[Frame]:
        """Return a message with these fields inside; [] if the client does not want it."""
        if kind not in _ALWAYS and kind not in self.events:
            return []
        return [Frame({"type": kind, _INNER.get(kind, f"{kind}_event"): fields}, epoch)]

    def _number_of(self, response_id: str) -> int:
        return self._numbers.get(response_id, self._number)

    def _audio(self, number_: int, pcm: Pcm, **aligned: Any) -> list[Frame]:
        data = to_ulaw(pcm) if self.output_format.startswith("ulaw") else to_pcm16(pcm)
        if not data:
            return []
        return self._message("audio", self.epoch, audio_base_64=b64encode(data).decode(), event_id=number_, **aligned)

    def _part(self, at: ContentPosition, kind: str, text: str) -> list[Frame]:
        return self._message(TEXT_EVENT, self.epoch, text=text, type=kind, event_id=self._number_of(at.response_id))

    def _answered(self, at: ContentPosition, text: str) -> list[Frame]:
        """Return the message with the text of an item, also if the user has interrupted it: a correction follows."""
        ends = self._part(at, "stop", "") if self._streamed == at.item_id else []
        number_ = self._number_of(at.response_id)
        self._reported[at.item_id] = number_, text
        if len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        return [*ends, *self._message("agent_response", agent_response=text, event_id=number_)]

    def _pings(self) -> list[Frame]:
        """Return a ping if one is due."""
        now_s = self.context.steady_s()
        if now_s - self._pinged_s < PING_S:
            return []
        self._ping, self._pinged_s = self._ping + 1, now_s
        return self._message("ping", event_id=self._ping, ping_ms=self._ping_ms)

    def _error(self, code: str, text: str, other: str = "unknown") -> list[Frame]:
        """Return an error. `other`: its type, if there is none for the code."""
        kind = _ERRORS.get(code, other)
        close = CLOSE_FAILED if kind == "llm_error" else CLOSE_REFUSED
        return self._message("error", code=close, error_type=kind, message=text, reason=code)

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Before the conversation has begun, it also ends the connection."""
        if not self.begun:
            self.finishing = CLOSE_REFUSED, error.message.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        return self._error(error.code, error.message, "invalid_message")

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a message that was not read because it exceeds `max_bytes`. The session continues."""
        return self.refuse(_invalid(f"A message has at most {max_bytes} bytes.", "type"), None)


def _invalid(text: str, param: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", text, param)


DIALECT = Dialect(
    name="elevenlabs_agent",
    matches=lambda opening: opening.path == PATH,
    connect=ConvaiConnection,
    paths=(PATH,),
    parameters=PARAMETERS,
    resume=Resume.NEVER,
    subprotocol=SUBPROTOCOL,
    opens_secret=lambda opening: not opening.is_transcription,
)
