"""Prepares conversations for other servers: calls with their results, media in base64, cut to the context. Pure.

A live conversation may continue before a function has answered, and a barge-in may cut an answer between two calls.
OpenAI's API refuses such histories: a message with calls must be followed directly by one result for each.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import AudioPart, ImagePart, Message, MessagePart
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import JsonSchema, Tool, ToolCall

# Sent as the result of a call that has no result yet.
NO_RESULT = "(no result yet)"
# A low estimate of the average number of characters in a token, because the server's tokenizer is not available.
# English has four or five, other European languages have three.
CHARS_PER_TOKEN = 3
# Estimated tokens of a message in addition to its text, and of an image or an audio part.
MESSAGE_TOKENS, IMAGE_TOKENS = 8, 1000


def with_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of calls directly after the message that made the calls, one for each.

    A call without a result gets NO_RESULT; a result without a call is dropped.
    """
    results = {m.tool_call_id: m for m in messages if m.role == "tool"}
    out: list[Message] = []
    for message in messages:
        if message.role == "tool":
            continue
        out.append(message)
        for call in message.tool_calls:
            answer = results.get(call.id)
            out.append(answer or Message("tool", NO_RESULT, tool_call_id=call.id, name=call.name))
    return out


def sent_arguments(call: ToolCall) -> str:
    """Return a past call's arguments as a JSON object; `{}` if the call was cut off or they are not an object.

    Servers refuse a conversation with other arguments, or their templates fail.
    """
    try:
        return call.arguments if isinstance(json.loads(call.arguments), dict) else "{}"
    except ValueError:
        return "{}"


def sent_schema(schema: JsonSchema) -> msgspec.Raw:
    """Return a JSON schema encoded for the request."""
    return msgspec.Raw(json.dumps(dict(schema), ensure_ascii=False, separators=(",", ":")).encode())


def sent_parameters(tool: Tool) -> msgspec.Raw:
    """Return a function's parameters, or an object without fields, because servers refuse an empty schema."""
    return sent_schema(tool.parameters or {"type": "object", "properties": {}})


def estimated_tokens(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Return a high estimate of a conversation's tokens."""
    num_chars = sum(len(t.name) + len(t.description) + len(json.dumps(dict(t.parameters))) for t in tools)
    num_tokens = 0
    for message in messages:
        num_tokens += MESSAGE_TOKENS
        parts: Sequence[MessagePart] = message.parts or (message.text,)
        num_chars += sum(len(part) for part in parts if isinstance(part, str))
        num_chars += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        num_tokens += IMAGE_TOKENS * sum(not isinstance(part, str) for part in parts)
    return num_tokens + num_chars // CHARS_PER_TOKEN


def newest(messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> list[Message]:
    """Return the system message and the newest other messages of about `max_tokens`, beginning with a user's message.

    The user's last message and everything after it are always kept.
    """
    system = [m for m in messages[:1] if m.role == "system"]
    rest = list(messages[len(system) :])
    starts = [k for k, m in enumerate(rest) if m.role == "user"] or [0]
    for start in starts:
        kept = system + rest[start:]
        if estimated_tokens(kept, tools) <= max_tokens:
            break
    return kept if start else [*messages]


def refuse_if_cut(messages: Sequence[Message], kept: Sequence[Message], limit: int) -> None:
    """Raise RemoteProtocolError, `context_length_exceeded`, if messages were left out."""
    if len(kept) < len(messages):
        raise RemoteProtocolError(
            "context_length_exceeded",
            f"The conversation has about {estimated_tokens(messages)} tokens; the model takes {limit}.",
            "messages",
        )


def without_media(message: Message) -> Message:
    """Return the message with its text only, for a server that accepts neither images nor audio."""
    return replace(message, parts=()) if message.parts else message


# The first bytes of each image format that antiphon accepts.
_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))


class SentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content, in the form of either API. Fields that the API does not use are unset."""

    # The kind of the part, as the API names it.
    type: str
    # The text of a text part.
    text: str | UnsetType = UNSET
    # The data URI of an image. In Chat Completions, it is within an object.
    image_url: str | dict[str, str] | UnsetType = UNSET
    # The detail of an image in the Responses API: always "auto".
    detail: str | UnsetType = UNSET
    # The base64 of a WAV file, and its format, for audio.
    input_audio: dict[str, str] | UnsetType = UNSET
    # The cache key of an image or of audio, for vLLM.
    uuid: str | UnsetType = UNSET


def content_part(part: MessagePart, api: Literal["chat_completions", "responses"], salt: str = "") -> SentPart:
    """Return one part of a message's content in the form of the named API. Encoding a picture takes milliseconds.

    `salt`: if given, images and audio get a `uuid`, by which vLLM finds earlier results of its encoder. It is derived
    from the salt and the bytes, so the same picture has a different `uuid` for another owner.
    """
    responses = api == "responses"
    if isinstance(part, str):
        return SentPart(type="input_text" if responses else "text", text=part)
    if isinstance(part, ImagePart):
        data = part.image.data
        kind = next((name for magic, name in _KINDS if data.startswith(magic)), "tiff")
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        if responses:
            return SentPart(type="input_image", image_url=url, detail="auto")
        return SentPart(type="image_url", image_url={"url": url}, uuid=_uuid(salt, data))
    # A model whose profile has no video window gets no VideoParts.
    assert isinstance(part, AudioPart)
    pcm = to_pcm16(part.pcm)
    sound = base64.b64encode(wav_header(SAMPLE_RATE_HZ, len(pcm)) + pcm).decode()
    return SentPart(type="input_audio", input_audio={"data": sound, "format": "wav"}, uuid=_uuid(salt, pcm))


def _uuid(salt: str, data: bytes) -> str | UnsetType:
    return hmac.new(salt.encode(), data, hashlib.sha256).hexdigest() if salt else UNSET
