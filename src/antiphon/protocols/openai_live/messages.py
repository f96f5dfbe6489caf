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
    """The voice that speaks."""

    voice: Text | LiveVoice | None = None


class LiveAudio(Strict):
    """The format of the audio, and the voice."""

    format: LiveFormat | None = None
    output: LiveOutput | None = None


class LiveTool(msgspec.Struct):
    """A tool of the backend. There are functions only."""

    type: Text
    name: Text = ""
    description: Text | None = None
    parameters: Any = None


class NamedFunction(msgspec.Struct):
    """The function that has to be called."""

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
    """The text of a message."""

    text: Text
    type: Text | None = None


class LiveItem(msgspec.Struct):
    """A message of the history with which a session starts."""

    role: Literal["developer", "user", "assistant"]
    content: list[LiveText]


class LiveSession(Strict):
    """The configuration of a session. Only `delegation` can change later."""

    model: Text
    instructions: Text | None = None
    audio: LiveAudio | None = None
    delegation: LiveDelegation | None = None
    input: list[LiveItem] | None = None
    client: object = None
    safety_identifier: Text | None = None
    store: bool | None = None
    triggers: list[object] | None = None
    idle_timeout_s: float | None = None
    wake_policy: Literal["speech", "manual"] = "speech"


class LiveUpdate(Strict):
    """Changes of a running session."""

    delegation: LiveDelegation | None = None
    triggers: list[object] | None = None


class _Event(msgspec.Struct, tag_field="type"):
    """An event of the client. `event_id`: the client's name for it, which answers quote."""

    event_id: Text | None = None


class SessionStart(_Event, tag="session.start", kw_only=True):
    """Begins the session."""

    session: LiveSession


class SessionUpdate(_Event, tag="session.update", kw_only=True):
    """Changes the functions."""

    session: LiveUpdate


class InputAudioAppend(_Event, tag="session.input_audio.append", kw_only=True):
    """Audio of the user in the session's format, as base64."""

    audio: str


class InputAudioMute(_Event, tag="session.input_audio.mute"):
    """From now on, the user's audio counts as silence."""


class InputAudioUnmute(_Event, tag="session.input_audio.unmute"):
    """Ends the mute."""


class ContextAppend(_Event, kw_only=True):
    """Text for the model. `delegation_id`: null, because there are no delegations to the client."""

    content: Text
    delegation_id: Text | None


class InstructionsAppend(ContextAppend, tag="session.instructions.append"):
    """Further instructions."""


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


class ResponseCreate(_Event, tag="response.create"):
    """Asks for a response to the items."""


class SessionPause(_Event, tag="session.pause"):
    """Pauses the session, if nobody speaks."""


class SessionWake(_Event, tag="session.wake"):
    """Resumes a paused session."""


class SessionClose(_Event, tag="session.close"):
    """Ends the session."""


LiveMessage = (
    SessionStart
    | SessionUpdate
    | InputAudioAppend
    | InputAudioMute
    | InputAudioUnmute
    | InstructionsAppend
    | ThinkingAppend
    | CommentaryAppend
    | ResponseItemCreate
    | ResponseCreate
    | SessionPause
    | SessionWake
    | SessionClose
)
