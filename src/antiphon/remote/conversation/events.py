"""Events of OpenAI's Realtime API, from the client's side: what a session sends, and what it reads. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon.errors import RemoteError
from antiphon.remote.conversation.items import WIRE_HZ, SentItem, SentTool
from antiphon.remote.http import decoded


class _Format(msgspec.Struct, omit_defaults=True):
    rate: int
    type: str = msgspec.field(default="")


class _Input(msgspec.Struct):
    format: _Format
    # Turns are taken here, not at the server.
    turn_detection: None = None


class _Output(msgspec.Struct, omit_defaults=True):
    format: _Format | None = None
    voice: str | None = None
    speed: float | None = None


class _Audio(msgspec.Struct, omit_defaults=True):
    input: _Input | None = None
    output: _Output | None = None


class _Session(msgspec.Struct, tag="realtime"):
    audio: _Audio


class SessionSetup(msgspec.Struct, tag="session.update"):
    """Configures a session: audio in both directions, and no turn detection."""

    session: _Session


def session_update(voice: str, speed: float) -> SessionSetup:
    """Return the configuration of a session. `voice`: "" for the server's own."""
    pcm = _Format(WIRE_HZ, "audio/pcm")
    output = _Output(pcm, voice or None, speed if speed != 1.0 else None)
    return SessionSetup(_Session(_Audio(_Input(pcm), output)))


class ItemCreation(msgspec.Struct, tag="conversation.item.create"):
    """Appends an item to the conversation."""

    event_id: str
    item: SentItem


class ItemDeletion(msgspec.Struct, tag="conversation.item.delete"):
    """Removes an item from the conversation."""

    event_id: str
    item_id: str


class AudioAppend(msgspec.Struct, tag="input_audio_buffer.append"):
    """Appends audio to the user's open turn. `audio`: base64 of PCM16 at WIRE_HZ."""

    audio: str


class AudioCommit(msgspec.Struct, tag="input_audio_buffer.commit"):
    """Makes an item of the audio of the open turn."""

    event_id: str


class AudioClear(msgspec.Struct, tag="input_audio_buffer.clear"):
    """Drops the audio of the open turn."""

    event_id: str


class RequestedResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a response has to be."""

    # ["audio"] or ["text"].
    output_modalities: list[str]
    # The system message.
    instructions: str | None = None
    # The most tokens.
    max_output_tokens: int | None = None
    # The functions that the model may call.
    tools: list[SentTool] | None = None
    # "auto", "none", "required", or a function.
    tool_choice: str | dict[str, str] | None = None


class ResponseCreation(msgspec.Struct, tag="response.create"):
    """Requests a response of the model to the conversation so far."""

    event_id: str
    response: RequestedResponse


class ResponseCancellation(msgspec.Struct, tag="response.cancel"):
    """Ends the response that is under way, if there is one."""

    event_id: str


class ServerFault(msgspec.Struct):
    """What an error event says. `event_id`: the event that it is about, if the server knows it."""

    message: str = ""
    code: str | None = None
    event_id: str | None = None


class ModelItem(msgspec.Struct):
    """An item that the model adds to the conversation: a message or a call."""

    id: str = ""
    type: str = ""
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    input_token_details: _Cached | None = None


class ResponseState(msgspec.Struct):
    """A response, with its state and what it used."""

    id: str = ""
    status: str = ""
    # An object that differs between servers.
    status_details: Any = None
    usage: _Usage | None = None


class ServerEvent(msgspec.Struct):
    """Any event of the server. Fields that it does not have are empty."""

    # The name of the event.
    type: str = ""
    # The response that it is about.
    response_id: str = ""
    # The item that it is about.
    item_id: str = ""
    # Text, or base64 of audio. Older servers of vLLM-Omni call the audio `audio`.
    delta: str = ""
    # See `delta`.
    audio: str = ""
    # The rate of the audio, in full duplex; 0: 24 kHz.
    sample_rate_hz: int = 0
    # An item that begins or ends.
    item: ModelItem | None = None
    # A response that begins or ends.
    response: ResponseState | None = None
    # An error of the server.
    error: ServerFault | None = None


_decoder = msgspec.json.Decoder(ServerEvent)
encode = msgspec.json.Encoder().encode


def read(data: str | bytes) -> ServerEvent:
    """Read an event. Raises RemoteError if it is not one."""
    if isinstance(data, bytes):
        raise RemoteError("the model's server sent bytes instead of an event")
    return decoded(_decoder, data.encode(), "event of a conversation")


def why_failed(response: ResponseState) -> str:
    """Return the reason of a response that failed, in words."""
    details = response.status_details
    error = details.get("error") if isinstance(details, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error.get("code") or "it failed")[:300]
    return "it failed"
