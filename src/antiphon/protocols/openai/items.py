"""Items, responses and tools of OpenAI's Realtime API: read from a client's JSON, and written as JSON values.

docs/wire/openai-realtime.md describes them. What is read raises RemoteProtocolError with the path of the field at
fault, which begins with `where` or `param`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from antiphon.audio import Pcm
from antiphon.contracts import AudioPart
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, ContentPosition, CreateResponse, Item, Response
from antiphon.events.tools import Tool
from antiphon.protocols.fields import known, number, require, typed
from antiphon.protocols.wire import NewId

# Base64 audio in the session's format, and the path of its field, to float32 [num_samples], 16 kHz. Raises
# RemoteProtocolError.
Decode = Callable[[str, str], Pcm]
# The fields of a response in both names, and those that this server and others accept beside them.
_RESPONSE_FIELDS = (
    "instructions",
    "output_modalities",
    "modalities",
    "audio",
    "voice",
    "output_audio_format",
    "temperature",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "max_response_output_tokens",
    "metadata",
    "conversation",
    "input",
    "parallel_tool_calls",
    "prompt",
    "reasoning",
    "commit",
    "cancel_previous",
)


def item_from(raw: dict[str, Any], where: str, new_id: NewId, decode: Decode) -> Item:
    """Read an item: a message, a function call or a call's result. It gets a new id where it has none.

    Audio is decoded; images stay as data URIs, of which only the beginning is checked here.
    """
    item_id = typed(raw.get("id"), (str, type(None)), f"{where}.id") or new_id("item_")
    match require(raw, "type", str, f"{where}.type"):
        case "message":
            role = require(raw, "role", str, f"{where}.role")
            if role not in ("system", "user", "assistant"):
                raise RemoteProtocolError("invalid_value", f"Invalid value: '{role}'.", f"{where}.role")
            content = typed(raw.get("content") or [], list, f"{where}.content")
            parts = [_part_from(p, role, f"{where}.content[{i}]", decode) for i, p in enumerate(content)]
            return Item(item_id, "message", role, "completed", parts)
        case "function_call":
            return Item(
                item_id,
                "function_call",
                "assistant",
                call_id=typed(raw.get("call_id"), (str, type(None)), f"{where}.call_id") or new_id("call_"),
                name=require(raw, "name", str, f"{where}.name"),
                arguments=require(raw, "arguments", str, f"{where}.arguments"),
            )
        case "function_call_output":
            return Item(
                item_id,
                "function_call_output",
                call_id=require(raw, "call_id", str, f"{where}.call_id"),
                output=require(raw, "output", str, f"{where}.output"),
            )
        case kind:
            raise RemoteProtocolError(
                "invalid_value",
                f"Invalid value: '{kind}'. Supported values are: 'message', 'function_call', 'function_call_output'.",
                f"{where}.type",
            )


def _part_from(raw: Any, role: str, where: str, decode: Decode) -> ContentPart:
    part = typed(raw, dict, where)
    kind = require(part, "type", str, f"{where}.type")
    match role, kind:
        case ("system" | "user", "input_text"):
            return ContentPart("input_text", require(part, "text", str, f"{where}.text"))
        case ("assistant", "output_text" | "text"):
            return ContentPart("output_text", require(part, "text", str, f"{where}.text"))
        case ("assistant", "output_audio" | "audio"):
            return ContentPart("output_audio", part.get("transcript") or "")
        case ("user", "input_audio"):
            transcript = typed(part.get("transcript"), (str, type(None)), f"{where}.transcript") or ""
            audio = typed(part.get("audio"), (str, type(None)), f"{where}.audio")
            media = AudioPart(decode(audio, f"{where}.audio")) if audio else None
            return ContentPart("input_audio", transcript, media=media)
        case ("user", "input_image"):
            image = require(part, "image_url", str, f"{where}.image_url")
            if not image.startswith("data:image/") or ";base64," not in image[:64]:
                raise RemoteProtocolError(
                    "invalid_value", "An image is given as data:image/<type>;base64,<data>.", f"{where}.image_url"
                )
            return ContentPart("input_image", image=image)
        case _:
            raise RemoteProtocolError(
                "unsupported_content_type",
                f"Content of type '{kind}' is not supported in a {role} message.",
                f"{where}.type",
            )


def response_from(
    raw: dict[str, Any],
    new_id: NewId,
    voice_of: Callable[[Any], str | None],
    decode: Decode,
    event_id: str | None,
) -> CreateResponse:
    """Read the `response` of a `response.create`; fields that are missing are None: as the session has them.

    `voice_of` finds the loaded voice that a value names, None for the default. Fields without effect are accepted.
    """
    known(raw, _RESPONSE_FIELDS, "response")
    audio_output = None
    modalities = raw.get("output_modalities") or raw.get("modalities")
    if modalities:
        audio_output = "audio" in typed(modalities, list, "response.output_modalities")
    conversation = raw.get("conversation") or "auto"
    if conversation not in ("auto", "none"):
        raise RemoteProtocolError(
            "invalid_value", "Invalid value for 'response.conversation': auto or none.", "response.conversation"
        )
    items: tuple[Item | str, ...] | None = None
    if raw.get("input") is not None:
        inputs = typed(raw["input"], list, "response.input")
        items = tuple(
            _input_item(typed(v, dict, f"response.input[{i}]"), i, new_id, decode) for i, v in enumerate(inputs)
        )
    audio = typed(raw.get("audio") or {}, dict, "response.audio")
    output = typed(audio.get("output") or {}, dict, "response.audio.output")
    voice = output.get("voice") or raw.get("voice")
    return CreateResponse(
        instructions=typed(raw.get("instructions"), (str, type(None)), "response.instructions"),
        audio_output=audio_output,
        voice=voice_of(voice) if voice else None,
        tools=tools_from(raw["tools"], "response.tools") if raw.get("tools") is not None else None,
        tool_choice=tool_choice_from(raw["tool_choice"], "response.tool_choice") if raw.get("tool_choice") else None,
        max_tokens=_max_tokens(raw.get("max_output_tokens") or raw.get("max_response_output_tokens")),
        stored=conversation == "auto",
        items=items,
        metadata=typed(raw.get("metadata"), (dict, type(None)), "response.metadata"),
        event_id=event_id,
    )


def _max_tokens(value: Any, param: str = "response.max_output_tokens") -> int | None:
    if value in (None, "inf"):
        return None
    return int(number(typed(value, int, param), param, 1, 4096))


def _input_item(raw: dict[str, Any], index: int, new_id: NewId, decode: Decode) -> Item | str:
    if raw.get("type") == "item_reference":
        found: str = require(raw, "id", str, f"response.input[{index}].id")
        return found
    return item_from(raw, f"response.input[{index}]", new_id, decode)


def response_json(response: Response, session_id: str, output: dict[str, Any], *, beta: bool) -> dict[str, Any]:
    """A response as JSON values, with the items so far. `output` is the session's `audio.output`.

    Usage is null while the response is in progress; all its input tokens count as text.
    """
    shown: dict[str, Any] = {
        "id": response.id,
        "object": "realtime.response",
        "status": response.status,
        "status_details": _status_details(response),
        "output": [item_json(i, beta=beta) for i in response.output],
        "output_modalities": ["audio"] if response.audio_output else ["text"],
        "max_output_tokens": response.max_tokens or "inf",
        "metadata": response.metadata,
        "usage": None if response.status == "in_progress" else _usage_json(response),
    }
    if response.stored:
        shown["conversation_id"] = f"conv_{session_id.removeprefix('sess-')}"
    if beta:
        shown["modalities"] = ["audio", "text"] if response.audio_output else ["text"]
        del shown["output_modalities"]
    else:
        shown["audio"] = {"output": {"format": output["format"], "voice": output["voice"]}}
    return shown


def _status_details(response: Response) -> dict[str, Any] | None:
    if response.status == "failed":
        kind = "server_error" if response.code == "server_error" else "invalid_request_error"
        return {"type": "failed", "error": {"type": kind, "code": response.code}}
    if response.status in ("cancelled", "incomplete"):
        return {"type": response.status, "reason": response.reason}
    return None


def _usage_json(response: Response) -> dict[str, Any]:
    used = response.usage
    prompt, cached, completion = (used.prompt_tokens, used.cached_tokens, used.completion_tokens) if used else (0, 0, 0)
    return {
        "total_tokens": prompt + completion,
        "input_tokens": prompt,
        "output_tokens": completion,
        "input_token_details": {
            "text_tokens": prompt,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": completion, "audio_tokens": 0},
    }


def item_json(item: Item, *, beta: bool) -> dict[str, Any]:
    """An item as JSON values. Its audio is left out, and so are content parts of a response that are still empty."""
    head = {"id": item.id, "object": "realtime.item", "status": item.status}
    match item.kind:
        case "message":
            content = [
                _content(p, beta=beta)
                for p in item.parts
                if p.text or item.status != "in_progress" or p.kind[:2] == "in"
            ]
            return head | {"type": "message", "role": item.role, "content": content}
        case "function_call":
            return head | {
                "type": "function_call",
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
            }
        case "function_call_output":
            return head | {"type": "function_call_output", "call_id": item.call_id, "output": item.output}


def position_fields(position: ContentPosition, *, content: bool = True) -> dict[str, Any]:
    """The ids and indices that place something in a response, as fields of an event.

    `content`: its content part too.
    """
    found: dict[str, Any] = {
        "response_id": position.response_id,
        "item_id": position.item_id,
        "output_index": position.output_index,
    }
    return found | {"content_index": position.content_index} if content else found


def part_json(part: ContentPart) -> dict[str, Any]:
    """A content part of a response as JSON values. Its events call it `audio` or `text` in the GA names too."""
    return (
        {"type": "audio", "transcript": part.text}
        if part.kind == "output_audio"
        else {"type": "text", "text": part.text}
    )


def _content(part: ContentPart, *, beta: bool) -> dict[str, Any]:
    match part.kind:
        case "input_text":
            return {"type": "input_text", "text": part.text}
        case "input_audio":
            return {"type": "input_audio", "transcript": part.text or None}
        case "input_image":
            return {"type": "input_image", "image_url": part.image}
        case "output_text":
            return {"type": "text" if beta else "output_text", "text": part.text}
        case "output_audio":
            return {"type": "audio" if beta else "output_audio", "transcript": part.text}


def tools_from(raw: Any, param: str = "session.tools") -> tuple[Tool, ...]:
    """Read a list of function tools; null is an empty list.

    `parameters` are taken as they are, not checked as a schema.
    """
    tools = []
    for i, tool in enumerate(typed(raw or [], list, param)):
        where = f"{param}[{i}]"
        fields = typed(tool, dict, where)
        if fields.get("type", "function") != "function":
            raise RemoteProtocolError("invalid_value", "Only tools of type 'function' are supported.", f"{where}.type")
        tools.append(
            Tool(
                require(fields, "name", str, f"{where}.name"),
                typed(fields.get("description"), (str, type(None)), f"{where}.description") or "",
                typed(fields.get("parameters"), (dict, type(None)), f"{where}.parameters") or {},
            )
        )
    return tuple(tools)


def tool_choice_from(raw: Any, param: str = "session.tool_choice") -> str:
    """Read a `tool_choice`: `auto` (also for null), `none`, `required`, or the name of a function."""
    if raw is None:
        return "auto"
    if isinstance(raw, dict):
        name: str = require(raw, "name", str, f"{param}.name")
        return name
    if raw not in ("auto", "none", "required"):
        raise RemoteProtocolError("invalid_value", f"Invalid value: '{raw}'.", param)
    return str(raw)
