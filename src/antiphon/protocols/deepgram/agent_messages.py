"""The messages of clients of Deepgram's voice agent: docs/wire/deepgram-agent.md. Unknown fields are ignored."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.events.tools import JsonSchema
from antiphon.protocols.fields import Reader, Text


class AudioFields(msgspec.Struct):
    """The audio of one direction."""

    # `linear16`, `mulaw` or `alaw`; for the client's audio also the other encodings of `/v1/listen`.
    encoding: Text = "linear16"
    # Sample rate in Hz.
    sample_rate: float = 24_000
    # Only `none` is possible.
    container: Text = "none"


class AudioSettings(msgspec.Struct):
    """The audio of both directions."""

    input: AudioFields = msgspec.field(default_factory=AudioFields)
    output: AudioFields = msgspec.field(default_factory=AudioFields)


class ListenProvider(msgspec.Struct):
    """The transcriber. Its name is not read."""

    # Code of the language; `multi` to detect it.
    language: Text | None = None
    # Words and phrases that are likely to be said.
    keyterms: list[Text] | None = None


class Listen(msgspec.Struct):
    """How the user is heard."""

    provider: ListenProvider = msgspec.field(default_factory=ListenProvider)


class AgentFunction(msgspec.Struct):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: Text
    description: Text | None = None
    parameters: JsonSchema | None = None
    # A server that carries the function out; refused.
    endpoint: object = None


class ThinkProvider(msgspec.Struct):
    """The language model, by any name."""

    model: Text | None = None


class Think(msgspec.Struct):
    """How answers are found."""

    provider: ThinkProvider = msgspec.field(default_factory=ThinkProvider)
    # Instructions for the model.
    prompt: Text | None = None
    # The functions that the model may call.
    functions: list[AgentFunction] | None = None


class SpeakProvider(msgspec.Struct):
    """The voice: a loaded voice, or a name of Deepgram's."""

    model: Text | None = None


class SpeakSettings(msgspec.Struct):
    """How answers are spoken."""

    provider: SpeakProvider = msgspec.field(default_factory=SpeakProvider)


class HistoryMessage(msgspec.Struct):
    """A message of an earlier conversation."""

    role: Text = "user"
    content: Text = ""


class AgentContext(msgspec.Struct):
    """What was said before."""

    messages: list[HistoryMessage] = []


class AgentFields(msgspec.Struct):
    """The agent. `think` and `speak` may be lists, of which the first counts."""

    # Code of the language; `multi` to detect it.
    language: Text = "en"
    listen: Listen = msgspec.field(default_factory=Listen)
    think: Think | list[Think] = msgspec.field(default_factory=Think)
    speak: SpeakSettings | list[SpeakSettings] = msgspec.field(default_factory=SpeakSettings)
    # What the agent says first.
    greeting: Text | None = None
    context: AgentContext = msgspec.field(default_factory=AgentContext)


class Settings(msgspec.Struct, tag_field="type", tag="Settings"):
    """Begins the conversation. It has to be the first message."""

    audio: AudioSettings = msgspec.field(default_factory=AudioSettings)
    agent: AgentFields = msgspec.field(default_factory=AgentFields)


class UpdatePrompt(msgspec.Struct, tag_field="type", tag="UpdatePrompt"):
    """Replaces the instructions."""

    prompt: Text


class UpdateSpeak(msgspec.Struct, tag_field="type", tag="UpdateSpeak"):
    """Replaces the voice."""

    speak: SpeakSettings | list[SpeakSettings]


class UpdateThink(msgspec.Struct, tag_field="type", tag="UpdateThink"):
    """Replaces the instructions and functions that it has."""

    think: Think | list[Think]


class UpdateListen(msgspec.Struct, tag_field="type", tag="UpdateListen"):
    """Replaces the language and keyterms that it has."""

    listen: Listen


class InjectUserMessage(msgspec.Struct, tag_field="type", tag="InjectUserMessage"):
    """Adds a message of the user, which is answered."""

    content: Text


class InjectAgentMessage(msgspec.Struct, tag_field="type", tag="InjectAgentMessage"):
    """Lets the agent say something."""

    message: Text


class FunctionCallResponse(msgspec.Struct, tag_field="type", tag="FunctionCallResponse"):
    """The result of a function call. `id` is that of the request."""

    id: Text
    content: Text = ""
    name: Text | UnsetType = UNSET


class AgentKeepAlive(msgspec.Struct, tag_field="type", tag="KeepAlive"):
    """Keeps the connection open while no audio is sent."""


class AgentForceEndTurn(msgspec.Struct, tag_field="type", tag="ForceEndTurn"):
    """Ends the user's turn now."""


AgentMessage = (
    Settings
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
