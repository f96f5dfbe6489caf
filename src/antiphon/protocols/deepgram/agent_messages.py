"""The messages of clients of Deepgram's voice agent: docs/wire/deepgram-agent.md. Unknown fields are ignored."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.protocols.fields import Reader, Text
from antiphon.protocols.realtime.items import ToolFields


class AgentAudioFields(msgspec.Struct):
    """The audio that one side sends: its encoding and sample rate."""

    # `linear16`, `mulaw` or `alaw`; for the client's audio also the other encodings of `/v1/listen`.
    encoding: Text = "linear16"
    # Sample rate in Hz.
    sample_rate: float = 24_000
    # Only `none` is possible.
    container: Text = "none"


class AgentAudio(msgspec.Struct):
    """The audio of the user, and that of the agent."""

    input: AgentAudioFields = msgspec.field(default_factory=AgentAudioFields)
    output: AgentAudioFields = msgspec.field(default_factory=AgentAudioFields)


class AgentListenProvider(msgspec.Struct):
    """The transcriber. Its name is not read."""

    # Code of the language; `multi` to detect it.
    language: Text | None = None
    # Words and phrases that are likely to be said.
    keyterms: list[Text] | None = None


class AgentListen(msgspec.Struct):
    """How the user's speech is transcribed."""

    provider: AgentListenProvider = msgspec.field(default_factory=AgentListenProvider)


class AgentFunction(ToolFields):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    # A server that carries the function out; refused.
    endpoint: object = None


class AgentThinkProvider(msgspec.Struct):
    """The language model, by any name."""

    model: Text | None = None


class AgentThink(msgspec.Struct):
    """The instructions and functions of the language model."""

    provider: AgentThinkProvider = msgspec.field(default_factory=AgentThinkProvider)
    # Instructions for the model.
    prompt: Text | None = None
    # The functions that the model may call.
    functions: list[AgentFunction] | None = None


class AgentSpeakProvider(msgspec.Struct):
    """The voice: a loaded voice, or a name of Deepgram's."""

    model: Text | None = None


class AgentSpeak(msgspec.Struct):
    """The voice that speaks the answers."""

    provider: AgentSpeakProvider = msgspec.field(default_factory=AgentSpeakProvider)


class AgentHistoryMessage(msgspec.Struct):
    """A message of an earlier conversation."""

    role: Text = "user"
    content: Text = ""


class AgentContext(msgspec.Struct):
    """What was said in an earlier conversation."""

    messages: list[AgentHistoryMessage] = []


class AgentFields(msgspec.Struct):
    """The agent. `think` and `speak` may be lists, of which the first counts."""

    # Code of the language; `multi` to detect it.
    language: Text = "en"
    # How the user is heard.
    listen: AgentListen = msgspec.field(default_factory=AgentListen)
    # How answers are found.
    think: AgentThink | list[AgentThink] = msgspec.field(default_factory=AgentThink)
    # How answers are spoken.
    speak: AgentSpeak | list[AgentSpeak] = msgspec.field(default_factory=AgentSpeak)
    # What the agent says first.
    greeting: Text | None = None
    # What was said before.
    context: AgentContext = msgspec.field(default_factory=AgentContext)


class AgentSettings(msgspec.Struct, tag_field="type", tag="Settings"):
    """Begins the conversation. It has to be the first message."""

    audio: AgentAudio = msgspec.field(default_factory=AgentAudio)
    agent: AgentFields = msgspec.field(default_factory=AgentFields)


class UpdatePrompt(msgspec.Struct, tag_field="type", tag="UpdatePrompt"):
    """Replaces the instructions for the model."""

    prompt: Text


class UpdateSpeak(msgspec.Struct, tag_field="type", tag="UpdateSpeak"):
    """Replaces the voice of later answers."""

    speak: AgentSpeak | list[AgentSpeak]


class UpdateThink(msgspec.Struct, tag_field="type", tag="UpdateThink"):
    """Replaces the instructions and functions that it has."""

    # How answers are found.
    think: AgentThink | list[AgentThink]


class UpdateListen(msgspec.Struct, tag_field="type", tag="UpdateListen"):
    """Replaces the language and keyterms that it has."""

    listen: AgentListen


class InjectUserMessage(msgspec.Struct, tag_field="type", tag="InjectUserMessage"):
    """Adds a message of the user, which is answered."""

    content: Text


class InjectAgentMessage(msgspec.Struct, tag_field="type", tag="InjectAgentMessage"):
    """Lets the agent say a text next."""

    message: Text


class FunctionCallResponse(msgspec.Struct, tag_field="type", tag="FunctionCallResponse"):
    """The result of a function call. `id` is that of the request."""

    id: Text
    content: Text = ""
    name: Text | UnsetType = UNSET


class AgentKeepAlive(msgspec.Struct, tag_field="type", tag="KeepAlive"):
    """Keeps the connection open while no audio is sent."""


class AgentForceEndTurn(msgspec.Struct, tag_field="type", tag="ForceEndTurn"):
    """Ends the user's turn at once, without waiting for a pause."""


AgentMessage = (
    AgentSettings
    | UpdatePrompt
    | UpdateSpeak
    | UpdateThink
    | UpdateListen
    | InjectUserMessage
    | InjectAgentMessage
    | FunctionCallResponse
    | AgentKeepAlive
    | AgentForceEndTurn
)
AGENT_MESSAGE: Reader[AgentMessage] = Reader(AgentMessage)
