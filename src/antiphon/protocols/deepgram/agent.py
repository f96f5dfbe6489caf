"""Deepgram's voice agent, `/v1/agent/converse`: a conversation over a cascade. See docs/wire/deepgram-agent.md.

The client plays what it receives, and drops it when the user interrupts. It reports no position, so the clock decides
how much of an answer was heard: audio that was sent is played in real time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from antiphon.audio import Pcm
from antiphon.audio.incoming import IncomingAudio
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import RATES_HZ, Resampler, to_pcm16
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    CommandRejected,
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.duplex import DuplexConfig, EpochRaised
from antiphon.events.languages import language_code
from antiphon.events.tools import Tool
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    SessionEnding,
    SpeechStarted,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
)
from antiphon.protocols.connection import Command, Context, Dialect, Event, NeverResumed, Resume
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
from antiphon.protocols.wire import Frame, Received, message
from antiphon.turns.end_of_turn import semantic_vad

T = TypeVar("T")
PATH = "/v1/agent/converse"
# Encodings of the agent's audio.
_ENCODERS = {"linear16": to_pcm16, "mulaw": to_ulaw, "alaw": to_alaw}
_ENDS = {"idle_timeout": SILENT, "server_error": FAILED, "resource_exhausted": FAILED}
# Seconds without a frame after which the conversation ends.
IDLE_S = 60.0


class AgentConnection(NeverResumed):
    """One conversation. It begins with the client's `Settings`."""

    dialect = "deepgram_agent"
    closing, min_commit_ms, idle_s = False, 1, IDLE_S

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = context.new_id("")
        self.epoch = 0
        self.finishing: tuple[int, str] | None = None
        self._config: ConversationConfig | None = None
        self._audio = IncomingAudio("s16")
        self._output = AgentAudioFields()
        self._resampler: Resampler | None = None
        # The epoch of each response in progress; the response whose audio is sent; calls without a result.
        self._epochs: dict[str, int] = {}
        self._speaking = ""
        self._playback = PlaybackClock(context.steady_s)
        self._calls: dict[str, str] = {}
        # Whether the user's turn has ended an answer before it was reported.
        self._has_cut = False
        # When the user's turn ended, and when the first text of its answer came, in steady seconds.
        self._turn_end_s = self._text_s = 0.0

    def open(self) -> list[Frame]:
        """Return the `Welcome`. Raises RemoteProtocolError if no conversation model is loaded, or a native one."""
        if self.context.conversation_models is None or self.context.unit_ms:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")
        DeepgramQuery(self.opening.query)
        return [message(type="Welcome", request_id=self.id)]

    # --- from the client

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame: audio, or a message. An invalid frame is answered with an error."""
        try:
            if isinstance(data, AppendAudio):
                return Received([data])
            if isinstance(data, bytes):
                return Received(self._append(data))
            asked = AGENT_MESSAGE.read(data)
            if isinstance(asked, AgentSettings):
                return self._begin(asked)
            return self._received(asked)
        except RemoteProtocolError as error:
            return Received([], self.refuse(error, None))

    def _append(self, data: bytes) -> list[Command]:
        self._require_config()
        try:
            pcm = self._audio.feed(data)
        except MediaError as error:
            self.finishing = BAD_AUDIO
            raise RemoteProtocolError("UNPARSABLE_AUDIO", f"The audio cannot be decoded: {error}.") from None
        return [AppendAudio(pcm)] if len(pcm) else []

    def _require_config(self) -> ConversationConfig:
        if self._config is None:
            raise RemoteProtocolError("SETTINGS_NOT_RECEIVED", "The first message has to be a Settings.")
        return self._config

    def _begin(self, settings: AgentSettings) -> Received[Command]:
        if self._config is not None:
            raise RemoteProtocolError("SETTINGS_ALREADY_APPLIED", "The conversation has begun: send an update.")
        audio, agent = settings.audio, settings.agent
        output = audio.output
        if output.encoding not in _ENCODERS or output.container != "none" or not _is_rate(output.sample_rate):
            raise RemoteProtocolError("INVALID_SETTINGS", "The output is linear16, mulaw or alaw without a container.")
        if audio.input.encoding not in ENCODINGS or not _is_rate(audio.input.sample_rate):
            raise RemoteProtocolError("INVALID_SETTINGS", f"There is no encoding '{audio.input.encoding[:40]}'.")
        heard = TranscriptionConfig(vad=semantic_vad(), language=self._language(agent.language), preflight=True)
        config = ConversationConfig(
            self._listening(heard, agent.listen), reports_transcripts=True, duplex=DuplexConfig(policy="auto")
        )
        config = self._thinking(config, _first(agent.think, AgentThink()))
        self._config = self._speaking_with(config, _first(agent.speak, AgentSpeak()))
        self._audio = IncomingAudio(ENCODINGS[audio.input.encoding], round(audio.input.sample_rate))
        self._output = output
        commands: list[Command] = [ConfigureConversation(self._config)]
        commands += [CreateItem(self._said(said)) for said in agent.context.messages if said.content]
        if agent.greeting:
            commands.append(_say(agent.greeting))
        return Received(commands, [message(type="SettingsApplied")])

    def _received(self, asked: AgentMessage) -> Received[Command]:
        config = self._require_config()
        match asked:
            case UpdatePrompt(prompt):
                return self._changed(replace(config, instructions=prompt), "PromptUpdated")
            case UpdateSpeak(speak):
                return self._changed(self._speaking_with(config, _first(speak, AgentSpeak())), "SpeakUpdated")
            case UpdateThink(think):
                return self._changed(self._thinking(config, _first(think, AgentThink())), "ThinkUpdated")
            case UpdateListen(listen):
                heard = self._listening(config.transcription, listen)
                return self._changed(replace(config, transcription=heard), "ListenUpdated")
            case InjectUserMessage(content):
                item = CreateItem(self._said(AgentHistoryMessage("user", content)))
                return Received([item, CreateResponse(when_busy="cut")])
            case InjectAgentMessage(said):
                return Received([_say(said)])
            case FunctionCallResponse(call_id, content):
                return Received(self._answered(call_id, content))
            case AgentForceEndTurn():
                return Received([CommitAudio()])
            case AgentKeepAlive() | AgentSettings():
                return Received()

    def _answered(self, call_id: str, content: str) -> list[Command]:
        """Return the commands for the result of a call. When all calls have one, the model answers."""
        if call_id not in self._calls:
            raise RemoteProtocolError("UNKNOWN_FUNCTION_CALL", "There is no such function call.", "id")
        del self._calls[call_id]
        item = Item(self.context.new_id("item_"), "function_call_output", call_id=call_id, output=content)
        answer: list[Command] = [] if self._calls else [CreateResponse(when_busy="wait")]
        return [CreateItem(item), *answer]

    def _changed(self, config: ConversationConfig, kind: str) -> Received[Command]:
        self._config = config
        return Received([ConfigureConversation(config)], [message(type=kind)])

    def _said(self, said: AgentHistoryMessage) -> Item:
        role, kind = ("assistant", "output_text") if said.role == "assistant" else ("user", "input_text")
        return Item(self.context.new_id("item_"), role=role, parts=[ContentPart(kind, said.content)])  # type: ignore[arg-type]

    # --- settings

    def _language(self, name: str) -> str | None:
        """Return a language's code; None to detect it, or if the transcriber does not know it."""
        code = language_code(name)
        return code if name != "multi" and self.context.knows_language(code) else None

    def _listening(self, heard: TranscriptionConfig, listen: AgentListen) -> TranscriptionConfig:
        asked = listen.provider
        if asked.language:
            heard = replace(heard, language=self._language(asked.language))
        if asked.keyterms is not None:
            heard = replace(heard, keyterms=DeepgramQuery([("keyterm", term) for term in asked.keyterms]).terms())
        return heard

    def _thinking(self, config: ConversationConfig, think: AgentThink) -> ConversationConfig:
        models, name = self.context.conversation_models, think.provider.model or ""
        if models and name and models.exact(name) is None:
            if models.strict:
                raise RemoteProtocolError("INVALID_SETTINGS", f"The model '{name[:80]}' does not exist.")
            self.context.log_alias(name, models.loaded[0])
        if think.prompt is not None:
            config = replace(config, instructions=think.prompt)
        if think.functions is None:
            return config
        if any(function.endpoint is not None for function in think.functions):
            message_ = "The client carries out functions: leave out 'endpoint'."
            raise RemoteProtocolError("INVALID_SETTINGS", message_, "endpoint")
        tools = tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in think.functions)
        self.context.check_tools(tools, "agent.think.functions")
        return replace(config, tools=tools)

    def _speaking_with(self, config: ConversationConfig, speak: AgentSpeak) -> ConversationConfig:
        name = speak.provider.model
        voice = self.context.loaded_voice(name)
        if name and not voice and self.context.voices:
            self.context.log_alias(f"voice {name}", self.context.voices[0])
        return replace(config, voice=voice, audio_output=bool(self.context.voices))

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect does not report it, or if the user has interrupted it."""
        match event:
            case EpochRaised(epoch):
                self.epoch, self._speaking, self._resampler = epoch, "", None
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
            case ResponseCreated(response):
                self._epochs[response.id] = self.epoch
            case ResponseTextDelta() if self._is_current(event.at):
                self._text_s = self._text_s or self.context.steady_s()
            case ResponseAudioDelta(at, pcm, rate_hz) if self._is_current(at):
                return self._sound(at, pcm, rate_hz)
            case ContentPartDone(at, part) if self._is_current(at) and part.text.strip():
                return [message(type="ConversationText", role="assistant", content=part.text.strip())]
            case ArgumentsDone(at, call_id, name, arguments, server) if not server and self._is_current(at):
                self._calls[call_id] = name
                call = {"id": call_id, "name": name, "arguments": arguments, "client_side": True}
                return [message(type="FunctionCallRequest", functions=[call])]
            case ResponseDone(response):
                was_current = self._epochs.pop(response.id, -1) == self.epoch
                failed = response.status == "failed"
                error = message(type="Error", code=response.code.upper(), description=response.error)
                return [*([error] if failed else []), *(self._spoken(response.id) if was_current else [])]
            case _:
                pass
        return []

    def _is_current(self, at: ContentPosition) -> bool:
        return self._epochs.get(at.response_id, -1) == self.epoch

    def _sound(self, at: ContentPosition, pcm: Pcm, rate_hz: int) -> list[Frame]:
        begins = self._speaking != at.response_id
        if begins or self._resampler is None:
            self._resampler = Resampler(rate_hz, round(self._output.sample_rate))
        self._speaking = at.response_id
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
        return [*started, *self._encoded(self._resampler.feed(pcm))]

    def _encoded(self, pcm: Pcm) -> list[Frame]:
        data = _ENCODERS[self._output.encoding](pcm)
        return [Frame(data, self.epoch)] if data else []

    def _spoken(self, response_id: str) -> list[Frame]:
        """Return the rest of an answer's audio, and its end."""
        if self._speaking != response_id:
            return []
        rest = self._resampler.flush() if self._resampler else None
        self._speaking, self._resampler = "", None
        return [*(self._encoded(rest) if rest is not None else []), message(type="AgentAudioDone")]

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. Ignores `event_id`, because messages have no ids in this dialect."""
        return [message(type="Error", code=error.code.upper(), description=error.message)]

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        return [message(type="Error", code="MESSAGE_TOO_LARGE", description=f"It is larger than {max_bytes} bytes.")]

    def close(self) -> list[Frame]:
        """Return no frames: the last `Error` has the reason."""
        return []


def _say(text: str) -> CreateResponse:
    """Return the command for an answer with a given text. The model says it, so it may differ a little."""
    instructions = f"Say exactly the following, and nothing else:\n{text}"
    return CreateResponse(instructions=instructions, tool_choice="none", when_busy="wait")


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
