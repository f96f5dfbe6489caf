"""The messages of clients of ElevenLabs' agents: docs/wire/elevenlabs-agents.md. Unknown fields are ignored."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.protocols.fields import Reader, Text
from antiphon.protocols.realtime.items import ToolFields


class ConvaiTool(ToolFields):
    """A tool that the agent may call. `parameters` is the JSON schema of its arguments."""

    # Empty if `tool_config` is given.
    name: Text = ""
    # Only `client` can be called. `system` is left out.
    type: Text = "client"
    # The tool, in an exported file of tools.
    tool_config: ConvaiTool | None = None


class ConvaiPrompt(msgspec.Struct):
    """The instructions and the tools of the language model."""

    # Instructions for the model, with placeholders for `dynamic_variables`.
    prompt: Text | None = None
    # The language model, by any name.
    llm: Text | None = None
    # The tools that the model may call.
    tools: list[ConvaiTool] | None = None


class ConvaiAgent(msgspec.Struct):
    """What the agent says and understands."""

    prompt: ConvaiPrompt | None = None
    # What the agent says first, with placeholders too.
    first_message: Text | None = None
    # Code of the user's language.
    language: Text | None = None


class ConvaiSpeech(msgspec.Struct):
    """The voice of the agent, its tempo and the format of its audio."""

    # A loaded voice, or an id of the hosted service.
    voice_id: Text | None = None
    # Tempo, in [0.25, 4]; 1 is the voice's own.
    speed: float | None = None
    # `pcm_16000`, `ulaw_8000` and others.
    agent_output_audio_format: Text | None = None


class ConvaiHearing(msgspec.Struct):
    """What the transcriber expects, and the format of the user's audio."""

    # Words that are likely to be said.
    keywords: list[Text] | None = None
    # `pcm_16000`, `ulaw_8000` and others.
    user_input_audio_format: Text | None = None


class ConvaiConversation(msgspec.Struct):
    """Which messages the client wants, and in which form it wants answers."""

    # Whether the agent answers in text only.
    text_only: bool | None = None
    # The types of the messages that the client wants.
    client_events: list[Text] | None = None


class ConvaiConfig(msgspec.Struct):
    """The configuration of an agent, or the part of it that a client sets. Null counts as missing."""

    agent: ConvaiAgent | None = None
    tts: ConvaiSpeech | None = None
    asr: ConvaiHearing | None = None
    conversation: ConvaiConversation | None = None
    # The Python SDK's place for `conversation.text_only`.
    text_only: bool | None = None


class ExportedAgent(ConvaiConfig):
    """An agent as the hosted service exports it: its configuration is inside."""

    conversation_config: ConvaiConfig | None = None


class EnclaveSetup(msgspec.Struct, tag_field="type", tag="enclave_setup_config"):
    """The whole agent, which clients of a self-hosted orchestrator send before anything else."""

    # The agent.
    agent_config_dict: ExportedAgent | None = None
    # Parts of configurations that replace those of the agent, in order.
    override_agent_config_list: list[ExportedAgent] | None = None
    # The agent's tools.
    tools_config_list: list[ConvaiTool] | None = None


class InitiationData(msgspec.Struct, tag_field="type", tag="conversation_initiation_client_data"):
    """Begins the conversation, with the settings that replace those of the agent."""

    # What replaces the agent's configuration.
    conversation_config_override: ConvaiConfig | None = None
    # Values of the placeholders, such as `{{name}}`, by their names.
    dynamic_variables: dict[Text, Text | int | float | bool | None] | None = None
    # No effect.
    custom_llm_extra_body: object = None
    # No effect.
    source_info: object = None
    # No effect.
    user_id: object = None
    # No effect.
    tool_mock_config: object = None


class UserMessage(msgspec.Struct, tag_field="type", tag="user_message"):
    """A message that the user has written. It is answered at once."""

    text: Text | None = None


class MultimodalMessage(msgspec.Struct, tag_field="type", tag="multimodal_message"):
    """A written message with files. Files are refused."""

    text: UserMessage | None = None
    file: object = None
    files: list[object] | None = None


class ContextualUpdate(msgspec.Struct, tag_field="type", tag="contextual_update"):
    """Something that the model has to know from now on. It is not answered."""

    text: Text


class ClientToolResult(msgspec.Struct, tag_field="type", tag="client_tool_result"):
    """The result of a call that the client has carried out."""

    tool_call_id: Text
    # The text for the model, or any other JSON value.
    result: msgspec.Raw = msgspec.Raw(b'""')
    # Whether the tool failed.
    is_error: bool = False


class Pong(msgspec.Struct, tag_field="type", tag="pong"):
    """The answer to a `ping`, whose number it has."""

    event_id: int = 0


class UserActivity(msgspec.Struct, tag_field="type", tag="user_activity"):
    """The user is there. The conversation does not end for silence."""


class Feedback(msgspec.Struct, tag_field="type", tag="feedback"):
    """Whether the user likes an answer. No effect."""


class UserAudio(msgspec.Struct):
    """Audio of the user, as base64, in a message without a type."""

    user_audio_chunk: str | UnsetType = UNSET


ConvaiMessage = (
    EnclaveSetup
    | InitiationData
    | UserMessage
    | MultimodalMessage
    | ContextualUpdate
    | ClientToolResult
    | Pong
    | UserActivity
    | Feedback
)
CONVAI_MESSAGE: Reader[ConvaiMessage] = Reader(ConvaiMessage)
