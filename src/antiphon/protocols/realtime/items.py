"""Items, responses and tools of OpenAI's Realtime API, read from a client's JSON.

docs/wire/openai-realtime.md describes them. The functions raise RemoteProtocolError with the path of the field at
fault. That path begins with `where` or `param`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from antiphon.audio import Pcm
from antiphon.contracts import AudioPart
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, CreateResponse, Item, Metadata
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.events.tools import JsonSchema, Tool
from antiphon.protocols.fields import Text, any_value, check_length, decode, decode_named, number
from antiphon.protocols.realtime.tool_servers import CheckServer, ToolType, servers_from
from antiphon.protocols.wire import NewId

# Raises RemoteProtocolError if a model's output cannot be constrained to the tools. The second argument is the path of
# the list of tools.
CheckTools = Callable[[Sequence[Tool], str], None]
NULL = msgspec.Raw(b"null")
ROLES = ("system", "user", "assistant")


def take_tools(tools: Sequence[Tool], param: str) -> None:
    """Accept any tools: a CheckTools for models without constrained output, and for tools that were already checked."""


class VoiceId(msgspec.Struct, omit_defaults=True):
    """A voice that the client names with an object instead of a string."""

    id: Text | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names one function. `type` is shown as it was sent."""

    type: Text | msgspec.UnsetType = msgspec.UNSET
    name: Text | msgspec.UnsetType | None = msgspec.UNSET


class ToolFields(msgspec.Struct):
    """A function as a client sends it. `parameters` is the JSON schema of its arguments. `CheckTools` checks it."""

    name: Text
    description: Text | None = None
    parameters: JsonSchema | None = None


class MessageFields(msgspec.Struct, tag_field="type", tag="message"):
    """A message as a client sends it."""

    role: Text
    id: Text | None = None
    content: list[msgspec.Raw] | None = None


class FunctionCallFields(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call as a client sends it. `arguments` is JSON text."""

    name: Text
    arguments: Text
    id: Text | None = None
    call_id: Text | None = None


class FunctionCallOutputFields(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """The result of a function call as a client sends it."""

    call_id: Text
    output: Text
    id: Text | None = None


class ApprovalFields(msgspec.Struct, tag_field="type", tag="mcp_approval_response"):
    """The answer to an `mcp_approval_request`, as a client sends it."""

    approval_request_id: Text
    approve: bool
    id: Text | None = None
    reason: Text | None = None


ItemFields = MessageFields | FunctionCallFields | FunctionCallOutputFields | ApprovalFields


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    """A reference to an item of the history, in the input of a response."""

    id: Text


class PartKind(msgspec.Struct):
    """The type of a content part. It decides how the other fields are read."""

    type: Text


class TextPart(msgspec.Struct):
    """A content part with text: `input_text` or `output_text`."""

    text: Text


class InputAudioPart(msgspec.Struct):
    """A content part with the user's audio. `audio` is base64 in the session's format."""

    transcript: Text | None = None
    audio: str | None = None


class OutputAudioPart(msgspec.Struct):
    """A content part with speech of the assistant."""

    transcript: Text | None = None


class InputImagePart(msgspec.Struct):
    """A content part with an image. `image_url` is a `data:` URI. `detail` has no effect."""

    image_url: str
    detail: Text | None = None


class ResponseOutputFields(msgspec.Struct):
    """`response.audio.output`. `format` has to be the same as the session's."""

    format: msgspec.Raw | None = None
    voice: VoiceId | str | None = None


class ResponseAudioFields(msgspec.Struct):
    """`response.audio`. It has no fields except `output`."""

    output: ResponseOutputFields | None = None


class ResponseFields(msgspec.Struct, forbid_unknown_fields=True):
    """The `response` of a `response.create`, with GA or beta names."""

    # Instructions for this response, instead of the session's.
    instructions: Text | None = None
    # `["audio"]` or `["text"]`; if missing, the session's modalities apply.
    output_modalities: list[object] | None = None
    # Beta name of `output_modalities`.
    modalities: list[object] | None = None
    # Voice and format of the response's audio.
    audio: ResponseAudioFields | None = None
    # Beta name of `audio.output.voice`.
    voice: VoiceId | Text | None = None
    # Functions that the model may call, instead of the session's.
    tools: list[msgspec.Raw] | None = None
    # Which function the model may or must call, instead of the session's choice.
    tool_choice: Text | NamedTool | None = None
    # Maximum number of tokens, or "inf".
    max_output_tokens: int | Text | None = None
    # Beta name of `max_output_tokens`.
    max_response_output_tokens: int | Text | None = None
    # The client's own data, repeated in the response's events.
    metadata: Metadata | None = None
    # `auto`, or `none` for a response outside of the conversation.
    conversation: Text | None = None
    # Items to respond to, instead of the conversation.
    input: list[msgspec.Raw] | None = None
    # Accepted, but has no effect.
    output_audio_format: object = None
    # Accepted, but has no effect.
    temperature: object = None
    # Whether the response may contain several function calls.
    parallel_tool_calls: bool | None = None
    # Refused unless null or empty.
    prompt: msgspec.Raw = NULL
    # Refused unless null or empty.
    reasoning: msgspec.Raw = NULL
    # Accepted, but has no effect.
    commit: object = None
    # Accepted, but has no effect.
    cancel_previous: object = None


@dataclass(frozen=True, slots=True)
class ItemContext:
    """The parts of a session that are needed to read items and responses."""

    # See `Context` of the connection.
    new_id: NewId
    # Decodes base64 audio in the session's format to float32 [num_samples] at 16 kHz. Its second argument is the path
    # of the field. Raises RemoteProtocolError.
    decode: Callable[[str, str], Pcm]
    # Returns the loaded voice with a name; None for the default.
    voice_of: Callable[[VoiceId | str], str | None]
    # Returns the format of the session's audio, as the client sees it.
    output_format: Callable[[], object]
    # See `Context` of the connection.
    check_tools: CheckTools
    # Checks a tool server that a response names; None if the dialect has none.
    check_server: CheckServer | None = None


def item_from(raw: msgspec.Raw, where: str, context: ItemContext) -> Item:
    """Read an item: a message, a function call, its result or its approval. If it has no id, make one.

    Audio is decoded. Images stay `data:` URIs, of which only the beginning is checked.
    """
    try:
        fields: ItemFields = decode_named(raw, ItemFields, where)
    except RemoteProtocolError as error:
        if error.code == "invalid_value" and error.param == f"{where}.type":
            supported = (
                "Supported values are: 'message', 'function_call', 'function_call_output', 'mcp_approval_response'."
            )
            raise RemoteProtocolError("invalid_value", f"{error.message} {supported}", error.param) from None
        raise
    item_id = fields.id or context.new_id("item_")
    match fields:
        case MessageFields(role):
            if role not in ROLES:
                raise RemoteProtocolError("invalid_value", f"Invalid value: '{role}'.", f"{where}.role")
            parts = [
                _part_from(part, role, f"{where}.content[{i}]", context) for i, part in enumerate(fields.content or ())
            ]
            return Item(item_id, "message", role, "completed", parts)  # type: ignore[arg-type]
        case FunctionCallFields(name, arguments):
            _check_name(name, f"{where}.name")
            call_id = fields.call_id or context.new_id("call_")
            return Item(item_id, "function_call", "assistant", call_id=call_id, name=name, arguments=arguments)
        case FunctionCallOutputFields(call_id, output):
            return Item(item_id, "function_call_output", call_id=call_id, output=output)
        case ApprovalFields(request_id, approve, _, reason):
            return Item(item_id, "approval", "system", approval_id=request_id, approves=approve, output=reason or "")


def _part_from(raw: msgspec.Raw, role: str, where: str, context: ItemContext) -> ContentPart:
    kind = decode(raw, PartKind, where).type
    match role, kind:
        case ("system" | "user", "input_text"):
            return ContentPart("input_text", decode_named(raw, TextPart, where).text)
        case ("assistant", "output_text" | "text"):
            return ContentPart("output_text", decode_named(raw, TextPart, where).text)
        case ("assistant", "output_audio" | "audio"):
            return ContentPart("output_audio", decode_named(raw, OutputAudioPart, where).transcript or "")
        case ("user", "input_audio"):
            given = decode_named(raw, InputAudioPart, where)
            if not (given.audio or given.transcript):
                missing = f"Missing required parameter: '{where}.audio'."
                raise RemoteProtocolError("missing_required_parameter", missing, f"{where}.audio")
            media = AudioPart(context.decode(given.audio, f"{where}.audio")) if given.audio else None
            return ContentPart("input_audio", given.transcript or "", media=media)
        case ("user", "input_image"):
            given_image = decode_named(raw, InputImagePart, where)
            image = given_image.image_url
            if given_image.detail not in (None, "auto", "low", "high"):
                message = f"Invalid value: '{given_image.detail}'. Supported values are: 'auto', 'low', 'high'."
                raise RemoteProtocolError("invalid_value", message, f"{where}.detail")
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


def response_from(raw: msgspec.Raw, context: ItemContext, event_id: str | None) -> CreateResponse:
    """Read the `response` of a `response.create`, which may be null.

    Missing fields become None: the session's value then applies. Fields without effect are accepted.
    """
    fields = ResponseFields() if bytes(raw) == b"null" else decode(raw, ResponseFields, "response")
    check_nothing_asked(fields.prompt, "response.prompt")
    check_nothing_asked(fields.reasoning, "response.reasoning")
    output = fields.audio and fields.audio.output
    if output and output.format is not None:
        _check_response_format(output.format, context)
    modalities = fields.output_modalities or fields.modalities
    conversation = fields.conversation or "auto"
    if conversation not in ("auto", "none"):
        raise RemoteProtocolError(
            "invalid_value", "Invalid value for 'response.conversation': auto or none.", "response.conversation"
        )
    items: tuple[Item | str, ...] | None = None
    if fields.input is not None:
        items = tuple(_input_item(value, f"response.input[{i}]", context) for i, value in enumerate(fields.input))
    voice = (output and output.voice) or fields.voice
    tools, check_server = fields.tools or (), context.check_server
    return CreateResponse(
        instructions=fields.instructions,
        audio_output="audio" in modalities if modalities else None,
        voice=context.voice_of(voice) if voice else None,
        tools=None
        if fields.tools is None
        else tools_from(tools, "response.tools", context.check_tools, knows_servers=check_server is not None),
        servers=servers_from(tools, "response.tools", None, check_server),
        tool_choice=tool_choice_from(fields.tool_choice, "response.tool_choice") if fields.tool_choice else None,
        parallel_tool_calls=fields.parallel_tool_calls,
        max_tokens=_max_tokens(fields.max_output_tokens or fields.max_response_output_tokens),
        stored=conversation == "auto",
        items=items,
        metadata=fields.metadata,
        event_id=event_id,
    )


def check_nothing_asked(given: msgspec.Raw, param: str, *defaults: object) -> None:
    """Raise RemoteProtocolError for a field that is not supported, unless its value is null, `{}` or in `defaults`."""
    if any_value(given, param) not in (None, {}, *defaults):
        raise RemoteProtocolError("unsupported_parameter", f"'{param}' is not supported.", param)


def _check_response_format(given: msgspec.Raw, context: ItemContext) -> None:
    shown = context.output_format()
    param = "response.audio.output.format"
    if any_value(given, param) != msgspec.to_builtins(shown):
        message = "A response has the session's format: set 'session.audio.output.format'."
        raise RemoteProtocolError("unsupported_parameter", message, param)


def _max_tokens(given: int | str | None, param: str = "response.max_output_tokens") -> int | None:
    if given in (None, "inf"):
        return None
    if isinstance(given, str):
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected int.", param)
    return int(number(given, param, 1, 4096))


def _input_item(raw: msgspec.Raw, where: str, context: ItemContext) -> Item | str:
    if decode(raw, PartKind, where).type == "item_reference":
        return decode(raw, ItemReference, where).id
    return item_from(raw, where, context)


def tools_from(
    given: Sequence[msgspec.Raw] | None,
    param: str = "session.tools",
    check: CheckTools = take_tools,
    *,
    knows_servers: bool = True,
) -> tuple[Tool, ...]:
    """Read the functions in a list of tools; None counts as an empty list. Their JSON may have MAX_TEXT characters in
    total. With `knows_servers`, tool servers may be among them: `servers_from` reads those.
    """
    check_length(sum(len(bytes(raw)) for raw in given or ()), param)
    tools = []
    for i, raw in enumerate(given or ()):
        where = f"{param}[{i}]"
        kind = decode(raw, ToolType, where).type
        if knows_servers and kind == "mcp":
            continue
        if kind != "function":
            types = "types 'function' and 'mcp'" if knows_servers else "type 'function'"
            raise RemoteProtocolError("invalid_value", f"Only tools of {types} are supported.", f"{where}.type")
        fields = decode_named(raw, ToolFields, where)
        _check_name(fields.name, f"{where}.name")
        tools.append(Tool(fields.name, fields.description or "", fields.parameters or {}))
    check(tools, param)
    return tuple(tools)


def _check_name(name: str, param: str) -> None:
    """Raise RemoteProtocolError if a function's name is empty."""
    if not name.strip():
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': a function needs a name.", param)


def tool_choice_from(given: str | NamedTool | None, param: str = "session.tool_choice") -> str:
    """Read a `tool_choice`. Returns `auto` (also for None), `none`, `required` or the name of a function."""
    if given is None:
        return "auto"
    if isinstance(given, NamedTool):
        if given.type not in (msgspec.UNSET, "function"):
            message = f"Invalid value: '{given.type}'. Supported values are: 'function'."
            raise RemoteProtocolError("invalid_value", message, f"{param}.type")
        if given.name is None or given.name is msgspec.UNSET:
            missing = f"{param}.name"
            raise RemoteProtocolError(
                "missing_required_parameter", f"Missing required parameter: '{missing}'.", missing
            )
        _check_name(given.name, f"{param}.name")
        return given.name
    if given not in ("auto", "none", "required"):
        raise RemoteProtocolError("invalid_value", f"Invalid value: '{given}'.", param)
    return given


# Maximum number of images in one append.
MAX_VIDEO_FRAMES = 2


def video_frames(value: object) -> tuple[bytes, ...]:
    """Decode at most MAX_VIDEO_FRAMES images from base64 or `data:` URIs. The images stay compressed.

    Raises RemoteProtocolError (`invalid_video_frames`) if there are more, or if the data is neither JPEG nor PNG.
    """
    if not isinstance(value, list) or len(value) > MAX_VIDEO_FRAMES:
        raise RemoteProtocolError(
            "invalid_video_frames", f"At most {MAX_VIDEO_FRAMES} images in base64.", "video_frames"
        )
    return tuple(_image(text) for text in value)


def _image(text: object) -> bytes:
    data = b""
    if isinstance(text, str):
        try:
            header, body = split_data_uri(text)
            data = decode_base64(body) if not header or header.endswith(";base64") else b""
        except ValueError:
            data = b""
    if not data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
        raise RemoteProtocolError("invalid_video_frames", "A frame is a JPEG or PNG image in base64.", "video_frames")
    return data
