"""Deepgram's voice agent, `/v1/agent/converse`. See docs/wire/deepgram-agent.md."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from antiphon.audio import Pcm
from antiphon.audio.incoming import IncomingAudio
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import RATES_HZ, to_pcm16
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    CommandRejected,
    ConfigureConversation,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.duplex import EpochRaised
from antiphon.events.tools import Tool
from antiphon.events.transcription import (
    CommitAudio,
    SessionEnding,
    SpeechStarted,
    TranscriptDone,
    TranscriptFailed,
)
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.deepgram.agent_messages import (
    AGENT_MESSAGE,
    AgentAudioFields,
    AgentForceEndTurn,
    AgentHistoryMessage,
    AgentKeepAlive,
    AgentListen,
    AgentMessage,
    AgentSettings,
    AgentSpeak,
    AgentThink,
    FunctionCallResponse,
    InjectAgentMessage,
    InjectUserMessage,
    UpdateListen,
    UpdatePrompt,
    UpdateSpeak,
    UpdateThink,
)
from antiphon.protocols.deepgram.forms import BAD_AUDIO, FAILED, SILENT
from antiphon.protocols.deepgram.query import COMMON, ENCODINGS, DeepgramQuery
from antiphon.protocols.opening import Opening
from antiphon.protocols.voice_agent import VoiceAgent, say
from antiphon.protocols.wire import Frame, Received, message

T = TypeVar("T")
PATH = "/v1/agent/converse"
# Encodings of the agent's audio.
_ENCODERS = {"linear16": to_pcm16, "mulaw": to_ulaw, "alaw": to_alaw}
_ENDS = {"idle_timeout": SILENT, "server_error": FAILED, "resource_exhausted": FAILED}


class AgentConnection(VoiceAgent):
    """One conversation. It begins with the client's `Settings`."""

    dialect = "deepgram_agent"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self._output = AgentAudioFields()
        self._playback = PlaybackClock(context.steady_s)
        # Whether the user's turn has ended an answer before it was reported.
        self._has_cut = False
        # When the user's turn ended, and when the first text of its answer came, in steady seconds.
        self._turn_end_s = self._text_s = 0.0

    def open(self) -> list[Frame]:
        """Return the `Welcome`. Raises RemoteProtocolError if no conversation model is loaded, or a native one."""
        self.check_model()
        DeepgramQuery(self.opening.query)
        return [message(type="Welcome", request_id=self.id)]

    # --- from the client

    def read(self, data: str | bytes) -> Received[Command]:
        """Read one frame: audio, or a message. Raises RemoteProtocolError."""
        if isinstance(data, bytes):
            return Received(self._append(data))
        asked = AGENT_MESSAGE.read(data)
        if isinstance(asked, AgentSettings):
            return self._begin(asked)
        return self._received(asked)

    def _append(self, data: bytes) -> list[Command]:
        self._require_begun()
        try:
            return self.hear(data)
        except MediaError as error:
            self.finishing = BAD_AUDIO
            raise RemoteProtocolError("UNPARSABLE_AUDIO", f"The audio cannot be decoded: {error}.") from None

    def _require_begun(self) -> None:
        if not self.begun:
            raise RemoteProtocolError("SETTINGS_NOT_RECEIVED", "The first message has to be a Settings.")

    def _begin(self, settings: AgentSettings) -> Received[Command]:
        if self.begun:
            raise RemoteProtocolError("SETTINGS_ALREADY_APPLIED", "The conversation has begun: send an update.")
        audio, agent = settings.audio, settings.agent
        output = audio.output
        if output.encoding not in _ENCODERS or output.container != "none" or not _is_rate(output.sample_rate):
            raise RemoteProtocolError("INVALID_SETTINGS", "The output is linear16, mulaw or alaw without a container.")
        if audio.input.encoding not in ENCODINGS or not _is_rate(audio.input.sample_rate):
            raise RemoteProtocolError("INVALID_SETTINGS", f"There is no encoding '{audio.input.encoding[:40]}'.")
        self.set_language(agent.language)
        self._listen(agent.listen)
        self._think(_first(agent.think, AgentThink()))
        self.set_voice(_first(agent.speak, AgentSpeak()).provider.model)
        self.audio = IncomingAudio(ENCODINGS[audio.input.encoding], round(audio.input.sample_rate))
        self._output, self.output_hz = output, round(output.sample_rate)
        said = [self._said(said) for said in agent.context.messages if said.content]
        return Received(self.begin(agent.greeting, said), [message(type="SettingsApplied")])

    def _received(self, asked: AgentMessage) -> Received[Command]:
        self._require_begun()
        match asked:
            case UpdatePrompt(prompt):
                self.config = replace(self.config, instructions=prompt)
                return self._changed("PromptUpdated")
            case UpdateSpeak(speak):
                self.set_voice(_first(speak, AgentSpeak()).provider.model)
                return self._changed("SpeakUpdated")
            case UpdateThink(think):
                self._think(_first(think, AgentThink()))
                return self._changed("ThinkUpdated")
            case UpdateListen(listen):
                self._listen(listen)
                return self._changed("ListenUpdated")
            case InjectUserMessage(content):
                return Received([CreateItem(self.written("user", content)), CreateResponse(when_busy="cut")])
            case InjectAgentMessage(text):
                return Received([say(text)])
            case FunctionCallResponse(call_id, content):
                return Received(self.answered(call_id, content, "UNKNOWN_FUNCTION_CALL"))
            case AgentForceEndTurn():
                return Received([CommitAudio()])
            case AgentKeepAlive() | AgentSettings():
                return Received()

    def _changed(self, kind: str) -> Received[Command]:
        return Received([ConfigureConversation(self.config)], [message(type=kind)])

    def _said(self, said: AgentHistoryMessage) -> Item:
        return self.written("assistant" if said.role == "assistant" else "user", said.content)

    # --- settings

    def _listen(self, listen: AgentListen) -> None:
        asked = listen.provider
        if asked.language:
            self.set_language(asked.language)
        if asked.keyterms is not None:
            terms = DeepgramQuery([("keyterm", term) for term in asked.keyterms]).terms()
            self.config = replace(self.config, transcription=replace(self.config.transcription, keyterms=terms))

    def _think(self, think: AgentThink) -> None:
        self.set_model(think.provider.model, "INVALID_SETTINGS")
        if any(function.endpoint is not None for function in think.functions or ()):
            message_ = "The client carries out functions: leave out 'endpoint'."
            raise RemoteProtocolError("INVALID_SETTINGS", message_, "endpoint")
        if think.functions is not None:
            tools = tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in think.functions)
            self.context.check_tools(tools, "agent.think.functions")
            self.config = replace(self.config, tools=tools)
        if think.prompt is not None:
            self.config = replace(self.config, instructions=think.prompt)

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect does not report it, or if the user has interrupted it."""
        self.follow(event)
        match event:
            case EpochRaised():
                self._playback.stop()
                self._has_cut = True
                return [message(type="UserStartedSpeaking")]
            case SpeechStarted():
                # Speech over an answer may be no interruption. If it is one, EpochRaised follows.
                is_known = self._has_cut or self._playback.left_s > 0
                return [] if is_known else [message(type="UserStartedSpeaking")]
            case TranscriptDone(_, text) if text.strip():
                return [message(type="ConversationText", role="user", content=text.strip())]
            case UserTurnCommitted():
                self._turn_end_s, self._text_s, self._has_cut = self.context.steady_s(), 0.0, False
            case SessionEnding(code, text):
                self.finishing = _ENDS.get(code)
                return [message(type="Error", code=code.upper(), description=text)]
            case CommandRejected(code, text):
                return [message(type="Warning", code=code.upper(), description=text)]
            case TranscriptFailed(_, text):
                return [message(type="Warning", code="TRANSCRIPTION_FAILED", description=text)]
            case _:
                return self._answer(event)
        return []

    def _answer(self, event: Event) -> list[Frame]:
        """Return the frames of an event about an answer."""
        match event:
            case ResponseTextDelta() if self.is_current(event.at):
                self._text_s = self._text_s or self.context.steady_s()
            case ResponseAudioDelta(at, pcm, rate_hz) if self.is_current(at):
                return self._sound(at, pcm, rate_hz)
            case ContentPartDone(at, part) if self.is_current(at) and part.text.strip():
                return [message(type="ConversationText", role="assistant", content=part.text.strip())]
            case ArgumentsDone(at, call_id, name, arguments, server) if not server and self.is_current(at):
                call = {"id": call_id, "name": name, "arguments": arguments, "client_side": True}
                return [message(type="FunctionCallRequest", functions=[call])]
            case ResponseDone(response):
                rest = self.ended(event)
                failed = response.status == "failed"
                error = message(type="Error", code=response.code.upper(), description=response.error)
                spoken = [] if rest is None else [*self._encoded(rest), message(type="AgentAudioDone")]
                return [*([error] if failed else []), *spoken]
            case _:
                pass
        return []

    def _sound(self, at: ContentPosition, pcm: Pcm, rate_hz: int) -> list[Frame]:
        begins = self.speaking != at.response_id
        self._playback.add(len(pcm) / rate_hz)
        started = []
        if begins:
            now_s = self.context.steady_s()
            text_s = self._text_s or now_s
            latencies = {
                "total_latency": round(max(0.0, now_s - (self._turn_end_s or now_s)), 3),
                "tts_latency": round(max(0.0, now_s - text_s), 3),
                "ttt_latency": round(max(0.0, text_s - (self._turn_end_s or text_s)), 3),
            }
            started = [message(type="AgentStartedSpeaking", **latencies)]
        return [*started, *self._encoded(self.sound(at, pcm, rate_hz))]

    def _encoded(self, pcm: Pcm) -> list[Frame]:
        data = _ENCODERS[self._output.encoding](pcm)
        return [Frame(data, self.epoch)] if data else []

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Ignores `event_id`, because messages have no ids in this dialect."""
        return [message(type="Error", code=error.code.upper(), description=error.message)]

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return [message(type="Error", code="MESSAGE_TOO_LARGE", description=f"It is larger than {max_bytes} bytes.")]


def _first(given: T | list[T], default: T) -> T:
    if isinstance(given, list):
        return given[0] if given else default
    return given


def _is_rate(rate_hz: float) -> bool:
    return RATES_HZ[0] <= rate_hz <= 192_000


DIALECT = Dialect(
    name="deepgram_agent",
    matches=lambda opening: opening.path == PATH,
    connect=AgentConnection,
    paths=(PATH,),
    parameters=COMMON,
    resume=Resume.NEVER,
)
