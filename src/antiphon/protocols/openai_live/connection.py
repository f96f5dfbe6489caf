"""One connection in the dialect of OpenAI's Live API: docs/wire/openai-live.md.

The server plays the audio of responses, with silence between them, and sends each part when it is due. A client plays
what it gets, so the server knows what was heard.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    ConfigureConversation,
    ContentPart,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    Item,
    ItemTruncated,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import ConversationPaused, ConversationResumed, PauseConversation
from antiphon.events.tools import Tool
from antiphon.events.transcription import (
    AppendAudio,
    SessionEnding,
    SpeechStarted,
    TranscriptDelta,
    TranscriptionConfig,
)
from antiphon.protocols.bridge import OUT_HZ, BridgeConnection, BridgeSession
from antiphon.protocols.connection import Command, Context, Dialect, Event, FirstFrame, Resume
from antiphon.protocols.fields import check_length, decode, number, typed, warnings_of
from antiphon.protocols.openai_live.messages import (
    CommentaryAppend,
    ContextAppend,
    FunctionOutput,
    InstructionsAppend,
    LiveAppend,
    LiveBackend,
    LiveClose,
    LiveDelegation,
    LiveMessage,
    LiveMute,
    LivePause,
    LiveRespond,
    LiveSessionUpdate,
    LiveSettings,
    LiveStart,
    LiveUnmute,
    LiveVoice,
    LiveWake,
    ResponseItemCreate,
)
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.audio_buffer import AudioBuffer, appended, openai_audio
from antiphon.protocols.realtime.input_fields import PCM_24K, AudioFormat
from antiphon.protocols.realtime.messages import event_id_in
from antiphon.protocols.wire import Frame, Received
from antiphon.turns.end_of_turn import semantic_vad
from antiphon.turns.wake_gate import WakeGate

PATH = "/v1/live/sessions"
# Seconds between two `session.usage.updated`.
USAGE_EVERY_S = 15.0
# Maximum of `idle_timeout_s`, in seconds.
MAX_IDLE_S = 86_400
_ENCODERS = {"audio/pcm": to_pcm16, "audio/pcmu": to_ulaw, "audio/pcma": to_alaw}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class LiveDialect:
    """Reads and writes the messages of one session."""

    name = "openai_live"

    def __init__(self, session: BridgeSession) -> None:
        self._session = session
        self._context = context = session.context
        self._format = PCM_24K
        self._buffer = AudioBuffer(PCM_24K, openai_audio(context.max_append_bytes))
        self._asked = LiveSettings("")
        self._tools: tuple[Tool, ...] = ()
        self._is_muted = False
        self._began_s = 0.0
        # The second of the session in which somebody last spoke.
        self._active_s = 0.0
        self.is_paused = False
        # Holds back the audio of a pause. After the pause it passes on everything.
        self._gate: WakeGate | None = None
        self._reported_s = 0.0
        # The end of the last transcript of the user, in milliseconds of the session.
        self._heard_ms = 0
        # The calls that the client has not answered yet, by id.
        self._calls: set[str] = set()
        # The delegation of these calls.
        self._delegation_id = ""
        # The text of responses that is not spoken yet: the sample before which it begins, and the text.
        self._texts: deque[tuple[int, str]] = deque()
        # Samples of responses that were generated, and sent, since the last interruption.
        self._generated = self._sent = 0
        # Whether no response is being generated.
        self._is_done = True
        self._resampler = Resampler(OUT_HZ, OUT_HZ)
        # The `event_id` of the message that is read.
        self.client_event_id: str | None = None

    # --- from the client

    def opened(self) -> None:
        """Queue nothing: the client sends first."""

    def closed(self) -> None:
        """Queue `session.closed`, which the client waits for."""
        self._closed("close_requested")

    def error(self, error: RemoteProtocolError) -> None:
        """Queue an error with the id of the message at fault."""
        quoted = {"client_event_id": self.client_event_id} if self.client_event_id else {}
        shown = {"type": "invalid_request_error", "code": error.code, "message": error.message, "param": error.param}
        self._event("error", error=shown | quoted, **quoted)

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame. Raises RemoteProtocolError for an invalid frame."""
        try:
            message = decode(data, LiveMessage)
        except RemoteProtocolError:
            self.client_event_id = event_id_in(data)
            raise
        self.client_event_id = message.event_id
        if isinstance(message, LiveStart):
            return self._start(message.session, data)
        if not self._session.begun:
            raise RemoteProtocolError("session_start_required", "The first event has to be a session.start.", "type")
        match message:
            case LiveAppend(audio=audio):
                return self._audio(audio)
            case LiveMute() | LiveUnmute():
                self._is_muted = isinstance(message, LiveMute)
                self._event(f"session.input_audio.{'muted' if self._is_muted else 'unmuted'}", **self._quoted())
                return []
            case ContextAppend():
                return self._append(message)
            case LiveSessionUpdate(session=changes):
                self._update(changes.delegation)
                self._event("session.updated", session=self._shown(), **self._quoted())
                return [ConfigureConversation(self._config())]
            case ResponseItemCreate(item=item):
                return [CreateItem(self._item_of(item))]
            case LiveRespond():
                if self._calls:
                    text = f"Calls without an output: {', '.join(sorted(self._calls))}."
                    raise RemoteProtocolError("function_call_outputs_required", text)
                return [CreateResponse(when_busy="wait")]
            case LivePause():
                return [self._pause()]
            case LiveWake():
                return [ConfigureConversation(self._config())]
            case LiveClose():
                self._session.closing = True
        return []

    def _start(self, asked: LiveSettings, data: str | bytes) -> list[Command]:
        if self._session.begun:
            raise RemoteProtocolError("invalid_event", "The session has started.", "type")
        models, name = self._context.conversation_models, asked.model
        if models is None or (models.strict and not models.exact(name)):
            raise RemoteProtocolError("invalid_model", f"The model `{name}` does not exist.", "session.model")
        if asked.idle_timeout_s is not None:
            number(asked.idle_timeout_s, "session.idle_timeout_s", 1, MAX_IDLE_S)
        if asked.triggers:
            raise RemoteProtocolError("unsupported_parameter", "There are no decisions here.", "session.triggers")
        if models.exact(name) is None:
            self._context.log_alias(name, models.loaded[0])
        form = asked.audio.format if asked.audio else None
        if form:
            self._format = AudioFormat(form.type, (form.rate or 24_000) if form.type == "audio/pcm" else UNSET)
        self._buffer.set_format(self._format)
        self._resampler = Resampler(OUT_HZ, self._format.rate_hz)
        self._asked = msgspec.structs.replace(asked, delegation=None)
        self._update(asked.delegation)
        config = self._config()
        items = [
            CreateItem(self._message(item.role, item.content[0].text)) for item in asked.input or () if item.content
        ]
        unread = (warning.param for warning in warnings_of(data, LiveStart))
        self._context.log_ignored([path for path in unread if path], self.name)
        self._session.begun = True
        self._began_s = self._context.steady_s()
        self._event("session.started", session=self._shown(), **self._quoted())
        return [ConfigureConversation(config), *items]

    def _update(self, changes: LiveDelegation | None) -> None:
        """Check and apply the settings of the delegation. Fields that are missing keep their values."""
        if changes is None:
            return
        known, param = self._asked.delegation, "session.delegation"
        if changes.type not in ("client", "responses") or (known and known.type != changes.type):
            raise RemoteProtocolError(
                "unsupported_parameter", f"Invalid delegation: '{changes.type}'.", f"{param}.type"
            )
        backend = (known.responses if known else None) or LiveBackend()
        given = changes.responses or LiveBackend()
        new = {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is not UNSET}
        backend = msgspec.structs.replace(backend, **new)
        tools = [self._tool(tool, f"{param}.responses.tools[{n}]") for n, tool in enumerate(backend.tools or ())]
        self._context.check_tools(tools, f"{param}.responses.tools")
        self._tools = tuple(tools)
        self._asked.delegation = msgspec.structs.replace(
            changes, responses=backend if changes.type == "responses" else None
        )

    def _tool(self, tool: Any, param: str) -> Tool:
        if tool.type != "function" or not tool.name:
            raise RemoteProtocolError("unsupported_server_tool", f"The tool '{tool.type}' does not exist here.", param)
        parameters = typed(tool.parameters or {}, dict, f"{param}.parameters")
        return Tool(tool.name, tool.description or "", parameters)

    def _config(self) -> ConversationConfig:
        asked = self._asked
        backend = (asked.delegation.responses if asked.delegation else None) or LiveBackend()
        texts = (asked.instructions, backend.instructions or None)
        instructions = "\n\n".join(text for text in texts if text)
        check_length(len(instructions), "session.instructions")
        voice = asked.audio.output.voice if asked.audio and asked.audio.output else None
        choice = backend.tool_choice or "auto"
        return ConversationConfig(
            TranscriptionConfig(vad=semantic_vad(), preflight=True),
            instructions=instructions,
            audio_output=bool(self._context.voices),
            voice=self._context.loaded_voice(voice.id if isinstance(voice, LiveVoice) else voice),
            tools=self._tools,
            tool_choice=choice if isinstance(choice, str) else choice.name,
            parallel_tool_calls=backend.parallel_tool_calls is not False,
            native_decides_interruptions=True,
            reports_transcripts=True,
            allows_backchannels=True,
        )

    def _audio(self, audio: str) -> list[Command]:
        pcm = self._buffer.decoded(audio)
        if self._is_muted:
            pcm = np.zeros_like(pcm)
        if self._gate:
            pcm = self._gate.feed(pcm)
        elif self.is_paused:
            pcm = pcm[:0]
        sent = appended(self._buffer.resampled(pcm)) if len(pcm) else []
        elapsed_s = self._elapsed_ms / 1000
        if elapsed_s - self._reported_s >= USAGE_EVERY_S:
            self._reported_s = elapsed_s
            self._event("session.usage.updated", usage={"seconds": round(elapsed_s, 1)})
        idle_s = self._asked.idle_timeout_s
        if idle_s and not self.is_paused and elapsed_s - self._active_s >= idle_s:
            # If somebody speaks after all, the next attempt follows as late as this one.
            self._active_s = elapsed_s
            return [self._pause(), *sent]
        return [*sent]

    def _pause(self) -> PauseConversation:
        return PauseConversation(self.client_event_id)

    def _append(self, message: ContextAppend) -> list[Command]:
        if message.delegation_id is not None:
            raise RemoteProtocolError("invalid_value", "There are no delegations to the client.", "delegation_id")
        kind = "instructions" if isinstance(message, InstructionsAppend) else "thinking"
        speaks = isinstance(message, CommentaryAppend)
        text = f"Say this to the user now, in your own words: {message.content}" if speaks else message.content
        times = {"start_ms": self._elapsed_ms, "end_ms": self._elapsed_ms}
        self._event(f"session.{'commentary' if speaks else kind}.appended", **times, **self._quoted())
        item = CreateItem(self._message("system", text))
        return [item, CreateResponse(when_busy="wait")] if speaks else [item]

    def _item_of(self, sent: FunctionOutput) -> Item:
        if sent.type == "function_call_output":
            if sent.call_id not in self._calls:
                raise RemoteProtocolError("invalid_value", f"No call '{sent.call_id[:64]}' is open.", "item.call_id")
            self._calls.discard(sent.call_id)
            try:
                output = sent.output if isinstance(sent.output, str) else msgspec.json.encode(sent.output).decode()
            except RecursionError:
                raise RemoteProtocolError("invalid_value", "The output is nested too deeply.", "item.output") from None
            new_id = self._context.new_id("item_")
            return Item(new_id, kind="function_call_output", call_id=sent.call_id, output=output)
        if sent.type != "message":
            raise RemoteProtocolError("invalid_value", f"Invalid value: '{sent.type[:64]}'.", "item.type")
        texts = sent.content if isinstance(sent.content, str) else "\n".join(part.text for part in sent.content)
        return self._message(sent.role, texts)

    def _message(self, role: str, text: str) -> Item:
        kind: Any = "output_text" if role == "assistant" else "input_text"
        known: Any = _ROLES[role]
        return Item(self._context.new_id("item_"), role=known, parts=[ContentPart(kind, text)])

    # --- to the client

    def write(self, event: Event) -> None:
        """Queue the frames of an event. The audio of responses is sent by `spoken`."""
        match event:
            case ResponseTextDelta(_, text, spoken):
                self._is_done = False
                self._texts.append((self._generated, text) if spoken else (-1, text))
            case ResponseAudioDelta(_, pcm, rate_hz):
                self._generated += len(pcm) * OUT_HZ // rate_hz
            case ItemTruncated():
                self._forget()
            case ConversationPaused() | ConversationResumed():
                self.is_paused = isinstance(event, ConversationPaused)
                self._active_s = self._elapsed_ms / 1000
                if self.is_paused and self._asked.wake_policy == "speech":
                    self._gate = WakeGate(self._format.rate_hz)
                elif self._gate:
                    self._gate.open()
                self._event("session.paused" if self.is_paused else "session.resumed")
            case SpeechStarted():
                self._heard_ms = self._elapsed_ms
            case TranscriptDelta(_, text):
                self._active_s = self._elapsed_ms / 1000
                start_ms, self._heard_ms = self._heard_ms, self._elapsed_ms
                times = {"start_ms": start_ms, "end_ms": self._heard_ms}
                self._event("session.input_transcript.delta", delta=text, **times)
            case ArgumentsDone(at, call_id, name, arguments, server) if not server:
                self._call(at.response_id, call_id, name, arguments)
            case ResponseDone(response):
                self._is_done = True
                if response.status == "cancelled":
                    self._forget()
                if any(item.kind == "function_call" and not item.server for item in response.output):
                    done = {"id": response.id, "object": "response", "status": response.status, "output": []}
                    self._response_event({"type": "response.completed", "response": done})
            case SessionEnding(code):
                self._closed("expired" if code == "session_expired" else "connection_lost")
            case _:
                return

    def _call(self, response_id: str, call_id: str, name: str, arguments: str) -> None:
        if not self._calls:
            self._delegation_id = self._context.new_id("dlg_")
            delegation = {"id": self._delegation_id, "type": "delegation", "target": "responses"}
            delegation |= {"response_id": response_id}
            self._event("session.delegation.created", delegation=delegation, offset_ms=self._elapsed_ms)
            begun = {"id": response_id, "object": "response", "status": "in_progress", "output": []}
            self._response_event({"type": "response.created", "response": begun})
        self._calls.add(call_id)
        item = {"id": f"fc_{call_id}", "type": "function_call", "status": "completed", "call_id": call_id}
        item |= {"name": name, "arguments": arguments or "{}"}
        self._response_event({"type": "response.output_item.done", "output_index": 0, "item": item})

    def _response_event(self, event: Any) -> None:
        self._event("response.event", delegation_id=self._delegation_id, event=event)

    def spoken(self, pcm: Pcm) -> list[Frame]:
        """Return the frames of audio that is due: a part of responses, or silence. float32 at OUT_HZ."""
        data = _ENCODERS[self._format.type](self._resampler.feed(pcm))
        self._session.add(type="session.output_audio.delta", event_id=self._new_id(), delta=b64encode(data).decode())
        return self._session.take()

    def played(self, num_samples: int) -> None:
        """Count samples of responses that are sent next, and queue the text that begins in them."""
        self._sent += num_samples
        if num_samples:
            self._active_s = self._elapsed_ms / 1000
        is_heard = self._is_done and not num_samples
        while self._texts and (self._texts[0][0] < self._sent or is_heard):
            now_ms = self._elapsed_ms
            _, text = self._texts.popleft()
            times = {"start_ms": now_ms, "end_ms": now_ms + num_samples * 1000 // OUT_HZ}
            self._event("session.output_transcript.delta", delta=text, **times)

    def _forget(self) -> None:
        """Forget the text of a response that was cut off."""
        self._texts.clear()
        self._generated = self._sent = 0

    def _closed(self, reason: str) -> None:
        if self._session.begun:
            usage = {"seconds": round(self._elapsed_ms / 1000, 1)}
            self._event("session.closed", reason=reason, session=self._shown(), usage=usage)

    def _shown(self) -> Any:
        """Return the session as clients see it."""
        asked = msgspec.to_builtins(self._asked)
        known = {name: value for name, value in asked.items() if value is not None}
        if self._asked.idle_timeout_s is None:
            del known["wake_policy"]
        facts = {"id": self._session.id, "expires_at": self._context.expires_at, "status": "active"}
        audio = known.pop("audio", {}) | {"format": {"type": self._format.type, "rate": self._format.rate_hz}}
        if responses := known.get("delegation", {}).get("responses"):
            responses.setdefault("model", self._asked.model)
        return facts | {"delegation": {"type": "client"}} | known | {"audio": audio}

    @property
    def _elapsed_ms(self) -> int:
        return int((self._context.steady_s() - self._began_s) * 1000)

    def _quoted(self) -> dict[str, str]:
        return {"client_event_id": self.client_event_id} if self.client_event_id else {}

    def _new_id(self) -> str:
        return self._context.new_id("event_")

    def _event(self, kind: str, **fields: Any) -> None:
        self._session.add(type=kind, event_id=self._new_id(), **fields)


class LiveConnection(BridgeConnection):
    """One connection, whose audio the server plays."""

    _dialect: LiveDialect

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context, LiveDialect)

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame only returns an error for the client; nothing is raised."""
        received = super().feed(data)
        self._dialect.client_event_id = None
        return received

    def spoken(self, pcm: Pcm, num_spoken: int) -> list[Frame]:
        """Return the frames of audio that is due; [] before the session has started, and while it is paused.

        `pcm`: float32 at OUT_HZ, of which the first `num_spoken` samples are of responses, and the others silence.
        """
        if not self._session.begun or self._dialect.is_paused:
            return []
        self._dialect.played(num_spoken)
        return self._dialect.spoken(pcm)


DIALECT = Dialect(
    name="openai_live",
    matches=lambda opening: opening.path == PATH,
    connect=LiveConnection,
    paths=(PATH,),
    parameters=frozenset(),
    resume=Resume.NEVER,
    client_first=True,
    first_frame=lambda _: FirstFrame(resumable=False),
    opens_secret=lambda opening: not opening.is_transcription,
)
