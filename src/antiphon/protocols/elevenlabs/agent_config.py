"""The configuration of one of ElevenLabs' agents, as clients send it. See docs/wire/elevenlabs-agents.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.protocols.connection import Context
from antiphon.protocols.elevenlabs.agent_messages import (
    ConvaiAgent,
    ConvaiConfig,
    ConvaiConversation,
    ConvaiHearing,
    ConvaiPrompt,
    ConvaiSpeech,
    ConvaiTool,
    EnclaveSetup,
)
from antiphon.protocols.elevenlabs.scribe import FORMATS
from antiphon.protocols.fields import check_length, number
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.input_fields import MAX_KEYTERM_CHARS, MAX_KEYTERMS
from antiphon.protocols.voice_agent import VoiceAgent

DEFAULT_FORMAT = "pcm_16000"
# Messages that a client gets unless it lists those that it wants, and one more if answers are only text.
EVENTS = frozenset(
    (
        *("audio", "agent_response", "agent_response_correction", "client_tool_call", "interruption", "ping"),
        "user_transcript",
    )
)
TEXT_EVENT = "agent_chat_response_part"
_PLACEHOLDER = re.compile(r"\{\{\s*([^{}]{1,100}?)\s*\}\}")


class ConfiguredAgent(VoiceAgent):
    """An agent whose configuration is set in parts: the agent as it was exported, and what replaces parts of it.

    `input_format` and `output_format` are keys of FORMATS. `events` are the messages that the client wants.
    """

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self.input_format = self.output_format = DEFAULT_FORMAT
        self._first_message = ""
        self._listed: frozenset[str] | None = None

    @property
    def events(self) -> frozenset[str]:
        """The types of the messages that the client wants: those that it has listed, or the default."""
        if self._listed is None:
            return EVENTS if self.config.audio_output else EVENTS | {TEXT_EVENT}
        return self._listed

    def set_up(self, asked: EnclaveSetup) -> None:
        """Apply a whole agent. Raises RemoteProtocolError."""
        if asked.tools_config_list is not None:
            self._set_tools(asked.tools_config_list)
        for agent in (asked.agent_config_dict, *(asked.override_agent_config_list or ())):
            if agent:
                self.apply(agent.conversation_config or agent)

    def apply(self, given: ConvaiConfig) -> None:
        """Apply the settings that are given; others stay as they are. Raises RemoteProtocolError."""
        agent, speech = given.agent or ConvaiAgent(), given.tts or ConvaiSpeech()
        hearing, talk = given.asr or ConvaiHearing(), given.conversation or ConvaiConversation()
        self._instruct(agent.prompt or ConvaiPrompt())
        if agent.first_message is not None:
            self._first_message = agent.first_message
        if agent.language:
            self.set_language(agent.language)
        if speech.voice_id:
            self.set_voice(speech.voice_id)
        if speech.speed is not None:
            self.config = replace(self.config, speed=number(speech.speed, "tts.speed", 0.25, 4.0))
        if hearing.keywords is not None:
            terms = tuple(term.strip() for term in hearing.keywords if term.strip())
            if len(terms) > MAX_KEYTERMS or any(len(term) > MAX_KEYTERM_CHARS for term in terms):
                raise _refused(f"At most {MAX_KEYTERMS} keywords of {MAX_KEYTERM_CHARS} characters.", "asr.keywords")
            self.config = replace(self.config, transcription=replace(self.config.transcription, keyterms=terms))
        text_only = given.text_only if talk.text_only is None else talk.text_only
        if text_only is not None:
            self.config = replace(self.config, audio_output=bool(self.context.voices) and not text_only)
        if talk.client_events is not None:
            self._listed = frozenset(talk.client_events)
        self.input_format = _format(hearing.user_input_audio_format, self.input_format)
        self.output_format = _format(speech.agent_output_audio_format, self.output_format)

    def _instruct(self, prompt: ConvaiPrompt) -> None:
        self.set_model(prompt.llm, "override_error")
        if prompt.tools is not None:
            self._set_tools(prompt.tools)
        if prompt.prompt is not None:
            self.config = replace(self.config, instructions=prompt.prompt)

    def _set_tools(self, given: Sequence[ConvaiTool]) -> None:
        tools = [tool.tool_config or tool for tool in given]
        for tool in tools:
            if tool.type not in ("client", "system") or not tool.name:
                message = f"The tool '{tool.name[:64]}' of type '{tool.type[:64]}' cannot be called: only client tools."
                raise _refused(message, "tools")
        self.context.log_ignored([f"tool {tool.name}" for tool in tools if tool.type == "system"], self.dialect)
        own = tuple(Tool(t.name, t.description or "", t.parameters or {}) for t in tools if t.type == "client")
        self.context.check_tools(own, "tools")
        self.config = replace(self.config, tools=own)

    def fill_in(self, values: Mapping[str, str | float | bool | None]) -> str:
        """Put values into the placeholders of the instructions, and return the first message with values too.

        Placeholders without a value stay. Raises RemoteProtocolError for a text that gets too long.
        """
        shown = {name: v if isinstance(v, str) else msgspec.json.encode(v).decode() for name, v in values.items()}

        def filled(text: str) -> str:
            added = sum(len(shown.get(found[1], "")) for found in _PLACEHOLDER.finditer(text))
            check_length(len(text) + added, "dynamic_variables")
            return _PLACEHOLDER.sub(lambda found: shown.get(found[1], found[0]), text)

        self.config = replace(self.config, instructions=filled(self.config.instructions))
        return filled(self._first_message)


def _format(asked: str | None, before: str) -> str:
    if asked and asked not in FORMATS:
        raise _refused(f"The format '{asked[:40]}' is not supported: {', '.join(FORMATS)}.", "audio_format")
    return asked or before


def _refused(text: str, param: str) -> RemoteProtocolError:
    return RemoteProtocolError("override_error", text, param)
