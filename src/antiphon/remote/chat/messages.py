"""Conversations as servers of others accept them: calls with their results, media in base64, no more than fits. Pure.

A live conversation may go on before a function has answered, and a barge-in may cut an answer between two calls.
OpenAI's API refuses such histories: behind a message with calls it wants one result for each, at once.
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

# What stands for the result of a call that has none yet.
NO_RESULT = "(no result yet)"
# How many characters a token has at least, on average over a conversation: an estimate for a tokenizer that is not
# here. English has four or five, other European languages three.
CHARS_PER_TOKEN = 3
# Tokens that a message takes besides its text, and those of an image or a second of sound.
MESSAGE_TOKENS, IMAGE_TOKENS = 8, 1000


def with_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of calls behind the message that made the calls, one for each.

    A call without a result is given NO_RESULT; a result without a call is left out.
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
    """Return the arguments of a call of the history, as JSON of an object: `{}` for a call that was cut off, and for
    what else is none. Servers refuse the whole conversation for it, or their templates fail.
    """
    try:
        return call.arguments if isinstance(json.loads(call.arguments), dict) else "{}"
    except ValueError:
        return "{}"


def sent_schema(schema: JsonSchema) -> msgspec.Raw:
    """Return a JSON schema as it is sent."""
    return msgspec.Raw(json.dumps(dict(schema), ensure_ascii=False, separators=(",", ":")).encode())


def sent_parameters(tool: Tool) -> msgspec.Raw:
    """Return a function's parameters, where none are an object without fields: servers refuse an empty schema."""
    return sent_schema(tool.parameters or {"type": "object", "properties": {}})


def estimated_tokens(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Return about how many tokens a conversation has, rather too many than too few."""
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
    """Return the system's message and the newest others of about `max_tokens`, beginning with one of the user's.

    The last of the user's messages, and what follows it, is kept in any case.
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
    """Raise RemoteProtocolError, `context_length_exceeded`, where messages were left out."""
    if len(kept) < len(messages):
        raise RemoteProtocolError(
            "context_length_exceeded",
            f"The conversation has about {estimated_tokens(messages)} tokens; the model takes {limit}.",
            "messages",
        )


def without_media(message: Message) -> Message:
    """Return the message with its text alone, for a server that takes neither images nor audio."""
    return replace(message, parts=()) if message.parts else message


# The first bytes of each kind of image that antiphon accepts.
_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))


class SentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content, in the form of either API."""

    type: str
    text: str | UnsetType = UNSET
    image_url: str | dict[str, str] | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    input_audio: dict[str, str] | UnsetType = UNSET
    uuid: str | UnsetType = UNSET


def content_part(part: MessagePart, api: Literal["chat_completions", "responses"], salt: str = "") -> SentPart:
    """One part of a message's content in the form of the named API. Encoding a picture takes milliseconds.

    `salt`: where given, images and audio get a `uuid`, by which vLLM finds what its encoder made of them before. It is
    made of the salt and the bytes, so that the same picture of another owner is another one.
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
    # A model whose profile has no video window is given no VideoParts.
    assert isinstance(part, AudioPart)
    pcm = to_pcm16(part.pcm)
    sound = base64.b64encode(wav_header(SAMPLE_RATE_HZ, len(pcm)) + pcm).decode()
    return SentPart(type="input_audio", input_audio={"data": sound, "format": "wav"}, uuid=_uuid(salt, pcm))


def _uuid(salt: str, data: bytes) -> str | UnsetType:
    return hmac.new(salt.encode(), data, hashlib.sha256).hexdigest() if salt else UNSET
