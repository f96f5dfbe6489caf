"""The messages of OpenAI Live's clients. See docs/wire/openai-live.md."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.protocols.fields import Text


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object of the session's configuration, which may have no other fields."""


class LiveFormat(Strict):
    """The format of the audio in both directions."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Literal[8000, 16000, 24000] | None = None


class LiveVoice(Strict):
    """A voice that was made for the client."""

    id: Text


class LiveOutput(Strict):
    """The voice that speaks the responses."""

    voice: Text | LiveVoice | None = None


class LiveAudio(Strict):
    """The format of the audio and the voice, fixed at the start."""

    format: LiveFormat | None = None
    output: LiveOutput | None = None


class LiveTool(msgspec.Struct):
    """A tool of the backend. There are functions only."""

    type: Text
    name: Text = ""
    description: Text | None = None
    parameters: Any = None


class NamedFunction(msgspec.Struct):
    """The function that the model has to call."""

    type: Text
    name: Text = ""


class LiveBackend(msgspec.Struct):
    """The backend: here, the conversation model itself. Other fields of the Responses API have no effect."""

    model: Text | UnsetType | None = UNSET
    instructions: Text | UnsetType | None = UNSET
    tools: list[LiveTool] | UnsetType | None = UNSET
    tool_choice: Text | NamedFunction | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET


class LiveDelegation(Strict):
    """Who carries out the functions: `client` (there are none) or `responses` (those of the backend)."""

    type: Text = "client"
    responses: LiveBackend | None = None
    acknowledgement_delay_ms: int | None = None


class LiveText(msgspec.Struct):
    """The text of a message of the history."""

    text: Text
    type: Text | None = None


class LiveItem(msgspec.Struct):
    """A message of the history with which a session starts."""

    role: Literal["developer", "user", "assistant"]
    content: list[LiveText]


class LiveSettings(Strict):
    """The configuration of a session. Only `delegation` can change later."""

    # The model's name, of any model.
    model: Text
    # Instructions for the model.
    instructions: Text | None = None
    # Format and voice.
    audio: LiveAudio | None = None
    # The functions.
    delegation: LiveDelegation | None = None
    # The history.
    input: list[LiveItem] | None = None
    # No effect.
    client: object = None
    # No effect.
    safety_identifier: Text | None = None
    # No effect.
    store: bool | None = None
    # Refused.
    triggers: list[object] | None = None
    # Ours: seconds without speech after which the session is paused.
    idle_timeout_s: float | None = None
    # Ours: what wakes a paused session.
    wake_policy: Literal["speech", "manual"] = "speech"


class LiveUpdate(Strict):
    """Changes of a session that has started."""

    delegation: LiveDelegation | None = None
    triggers: list[object] | None = None


class _Event(msgspec.Struct, tag_field="type"):
    """An event of the client. `event_id`: the client's name for it, which answers quote."""

    event_id: Text | None = None


class LiveStart(_Event, tag="session.start", kw_only=True):
    """Begins the session, with its configuration."""

    session: LiveSettings


class LiveSessionUpdate(_Event, tag="session.update", kw_only=True):
    """Changes the functions and their instructions."""

    session: LiveUpdate


class LiveAppend(_Event, tag="session.input_audio.append", kw_only=True):
    """Audio of the user in the session's format, as base64."""

    audio: str


class LiveMute(_Event, tag="session.input_audio.mute"):
    """From now on, the user's audio counts as silence."""


class LiveUnmute(_Event, tag="session.input_audio.unmute"):
    """From now on, the user's audio counts again."""


class ContextAppend(_Event, kw_only=True):
    """Text for the model. `delegation_id`: null, because there are no delegations to the client."""

    content: Text
    delegation_id: Text | None


class InstructionsAppend(ContextAppend, tag="session.instructions.append"):
    """Further instructions, which the model follows from now on."""


class ThinkingAppend(ContextAppend, tag="session.thinking.append"):
    """Information that is not to be spoken now."""


class CommentaryAppend(ContextAppend, tag="session.commentary.append"):
    """Information that is to be spoken now."""


class FunctionOutput(msgspec.Struct):
    """An item for the backend: the output of a function call, or a message."""

    type: Text = "message"
    call_id: Text = ""
    output: Any = ""
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Text | list[LiveText] = ""


class ResponseItemCreate(_Event, tag="response.item.create", kw_only=True):
    """Adds an item. A response follows with `response.create`."""

    item: FunctionOutput


class LiveRespond(_Event, tag="response.create"):
    """Asks for a response to the items."""


class LivePause(_Event, tag="session.pause"):
    """Pauses the session if neither side speaks."""


class LiveWake(_Event, tag="session.wake"):
    """Resumes a session that is paused."""


class LiveClose(_Event, tag="session.close"):
    """Ends the session. The answer is `session.closed`."""


LiveMessage = (
    LiveStart
    | LiveSessionUpdate
    | LiveAppend
    | LiveMute
    | LiveUnmute
    | InstructionsAppend
    | ThinkingAppend
    | CommentaryAppend
    | ResponseItemCreate
    | LiveRespond
    | LivePause
    | LiveWake
    | LiveClose
)
