"""Messages as items of OpenAI's Realtime API, from the client's side. Pure."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.contracts import AudioPart, Message, MessagePart
from antiphon.events.tools import Tool
from antiphon.remote.chat.messages import content_part, sent_arguments, sent_parameters

# The rate of all audio of the API, in both directions.
WIRE_HZ = 24_000
# Bound: seconds of audio in one item. Longer audio is sent as its transcript, because servers bound their frames.
MAX_AUDIO_S = 180.0


class SentContent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content: text, audio or an image."""

    type: str
    text: str | None = None
    # Base64 of PCM16 at WIRE_HZ.
    audio: str | None = None
    # A data URI.
    image_url: str | None = None


class SentItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item: a message, a function call, or a call's result."""

    # "message", "function_call" or "function_call_output".
    type: str
    # The id, which the client chooses.
    id: str
    # Of a message: who it is from.
    role: str | None = None
    # Of a message: its parts.
    content: list[SentContent] | None = None
    # Of a call and of its result: the id of the call.
    call_id: str | None = None
    # Of a call: the function.
    name: str | None = None
    # Of a call: its arguments, as JSON.
    arguments: str | None = None
    # Of a result: the result.
    output: str | None = None


class SentTool(msgspec.Struct, tag="function"):
    """A function that the model may call."""

    name: str
    description: str
    parameters: msgspec.Raw


def tools_of(tools: Sequence[Tool]) -> list[SentTool]:
    """Return functions in the form of the API."""
    return [SentTool(tool.name, tool.description, sent_parameters(tool)) for tool in tools]


def items_of(message: Message, *, hears: bool, sees: bool) -> list[SentItem]:
    """Return the items of a message: none if nothing of it can be sent, several if it makes calls.

    `hears`, `sees`: whether its audio and its images are sent. Otherwise its text is sent; without a text, its audio.
    Resampling and encoding a minute of audio takes some tens of milliseconds.
    """
    if message.role == "tool":
        return [SentItem(type="function_call_output", id=_id(), call_id=message.tool_call_id, output=message.text)]
    content = list[SentContent]()
    written = "output_text" if message.role == "assistant" else "input_text"
    for part in message.parts or (message.text,):
        if isinstance(part, str):
            content += [SentContent(type=written, text=part)] if part.strip() else []
        elif isinstance(part, AudioPart):
            if (hears or not message.text.strip()) and len(part.pcm) <= MAX_AUDIO_S * SAMPLE_RATE_HZ:
                content.append(SentContent(type="input_audio", audio=_encoded(part)))
        elif sees:
            content.append(_image(part))
    if not content and message.text.strip():
        content = [SentContent(type=written, text=message.text)]
    items = [SentItem(type="message", id=_id(), role=message.role, content=content)] if content else []
    for call in message.tool_calls:
        arguments = sent_arguments(call)
        items.append(SentItem(type="function_call", id=_id(), call_id=call.id, name=call.name, arguments=arguments))
    return items


def _image(part: MessagePart) -> SentContent:
    uri = content_part(part, "responses").image_url
    assert isinstance(uri, str)
    return SentContent(type="input_image", image_url=uri)


def _encoded(part: AudioPart) -> str:
    resampler = Resampler(SAMPLE_RATE_HZ, WIRE_HZ)
    pcm = to_pcm16(resampler.feed(part.pcm)) + to_pcm16(resampler.flush())
    return base64.b64encode(pcm).decode()


def _id() -> str:
    # OpenAI takes ids of up to 32 characters.
    return f"item_{secrets.token_hex(12)}"
