"""The messages of Gemini Live's clients. See docs/wire/gemini-live.md.

Google's own clients spell field names in camelCase or in snake_case. `read_message` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import MAX_TOLD, Text, refusal, typed
from antiphon.protocols.wire import decode_json

_USUAL = str.maketrans("-_", "+/")
_SNAKE = re.compile(r"_([a-z0-9])")


class Fields(msgspec.Struct, rename="camel"):
    """An object of the API. Unknown fields are ignored."""


class Blob(Fields):
    """Audio or an image: base64, with its media type, such as `audio/pcm;rate=16000`."""

    data: str = ""
    mime_type: str = ""

    @property
    def base64(self) -> str:
        """The data in the usual alphabet. The client for Python writes base64 for URLs."""
        return self.data.translate(_USUAL)


class FunctionCallPart(Fields):
    """A call that the model has made, in a history that the client sends."""

    id: Text = ""
    name: Text = ""
    args: Any = None


class FunctionResponse(Fields):
    """The result of a call. `scheduling`: when the model is to speak of it: `INTERRUPT`, `WHEN_IDLE` or `SILENT`."""

    id: Text | None = None
    name: Text = ""
    response: Any = None
    scheduling: Text | None = None


class Part(Fields):
    """A part of a content. The first field that is set counts."""

    text: Text | None = None
    inline_data: Blob | None = None
    function_call: FunctionCallPart | None = None
    function_response: FunctionResponse | None = None


class Content(Fields):
    """One item of a conversation. `role`: `user` or `model`."""

    role: Text | None = None
    parts: list[Part] | None = None

    @property
    def text(self) -> str:
        """The text of all parts, in paragraphs."""
        return "\n".join(part.text for part in self.parts or () if part.text)


class PrebuiltVoiceConfig(Fields):
    """A voice by its name."""

    voice_name: Text | None = None


class VoiceConfig(Fields):
    """How the voice is named."""

    prebuilt_voice_config: PrebuiltVoiceConfig | None = None


class SpeechConfig(Fields):
    """The voice of the responses. `language_code`: language of the conversation, such as `de-DE`."""

    voice_config: VoiceConfig | None = None
    language_code: Text | None = None


class GenerationConfig(Fields):
    """How the model generates. The sampling parameters apply to native models."""

    response_modalities: list[Text] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    seed: int | None = None
    speech_config: SpeechConfig | None = None


class FunctionDeclaration(Fields):
    """A function that the client carries out. `parameters`: Google's schema; `parameters_json_schema`: JSON schema."""

    name: Text
    description: Text | None = None
    parameters: Any = None
    parameters_json_schema: Any = None


class ToolGroup(Fields):
    """Functions, or one of Google's own tools, of which there are none here."""

    function_declarations: list[FunctionDeclaration] | None = None
    google_search: object = None
    google_search_retrieval: object = None
    google_maps: object = None
    code_execution: object = None
    url_context: object = None
    file_search: object = None
    computer_use: object = None


class AutomaticActivityDetection(Fields):
    """How the server detects turns. `disabled`: the client sends `activityStart` and `activityEnd`."""

    disabled: bool | None = None
    start_of_speech_sensitivity: Text | None = None
    end_of_speech_sensitivity: Text | None = None
    silence_duration_ms: int | None = None


class RealtimeInputConfig(Fields):
    """How realtime input becomes turns, and whether it interrupts responses."""

    automatic_activity_detection: AutomaticActivityDetection | None = None
    activity_handling: Text | None = None


class Transcription(Fields):
    """Asks for transcripts. The fields are hints for the transcriber."""

    language_codes: list[Text] | None = None
    custom_vocabulary: list[Text] | None = None
    adaptation_phrases: list[Text] | None = None


class SessionResumption(Fields):
    """Asks for handles, with which the session can be resumed. `handle`: the session to resume."""

    handle: Text | None = None


class SlidingWindow(Fields):
    """`target_tokens`: the number of tokens that a shortened history has."""

    target_tokens: int | str | None = None


class ContextWindowCompression(Fields):
    """`trigger_tokens`: the number of tokens from which on the history is shortened."""

    trigger_tokens: int | str | None = None
    sliding_window: SlidingWindow | None = None


class HistoryConfig(Fields):
    """Whether the client's content is a history at first, to which the model does not respond."""

    initial_history_in_client_content: bool | None = None


class Setup(Fields):
    """The configuration of a session: the first message."""

    model: Text = ""
    generation_config: GenerationConfig | None = None
    system_instruction: Content | Text | None = None
    tools: list[ToolGroup] | None = None
    realtime_input_config: RealtimeInputConfig | None = None
    input_audio_transcription: Transcription | None = None
    output_audio_transcription: Transcription | None = None
    session_resumption: SessionResumption | None = None
    context_window_compression: ContextWindowCompression | None = None
    history_config: HistoryConfig | None = None


class RealtimeInput(Fields):
    """Input as it arises. Several fields may be set; they count in this order."""

    activity_start: object = None
    media_chunks: list[Blob] | None = None
    audio: Blob | None = None
    video: Blob | None = None
    text: Text | None = None
    activity_end: object = None
    audio_stream_end: bool | None = None


class ClientContent(Fields):
    """Items for the history. With `turn_complete`, the model responds."""

    turns: list[Content] | Content | None = None
    turn_complete: bool | None = None


class ToolResponse(Fields):
    """The results of calls."""

    function_responses: list[FunctionResponse] | FunctionResponse = []


class ClientMessage(Fields):
    """One message. Exactly one field is set."""

    setup: Setup | None = None
    realtime_input: RealtimeInput | None = None
    client_content: ClientContent | None = None
    tool_response: ToolResponse | None = None


def read_message(data: str | bytes) -> tuple[ClientMessage, list[str]]:
    """Return a message, and the paths of its unknown fields. Raises RemoteProtocolError if it cannot be read."""
    try:
        value = typed(decode_json(data), dict, "message")
    except ValueError as error:
        raise RemoteProtocolError("invalid_json", f"Invalid JSON payload received: {error}.") from None
    unknown: list[str] = []
    try:
        found = msgspec.convert(_renamed(value, ClientMessage, "", unknown), ClientMessage)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    return found, unknown


@cache
def _fields(kind: type[Fields]) -> dict[str, type[Fields] | None]:
    """Return the fields of an object by their names in camelCase, each with the kind of the objects in it, if any."""
    return {
        field.encode_name: next(_objects([inspect.type_info(field.type)]), None)
        for field in msgspec.structs.fields(kind)
    }


def _objects(kinds: Iterable[inspect.Type]) -> Iterator[type[Fields]]:
    for kind in kinds:
        match kind:
            case inspect.UnionType(types=inner):
                yield from _objects(inner)
            case inspect.ListType(item_type=item):
                yield from _objects([item])
            case inspect.StructType(cls=found) if issubclass(found, Fields):
                yield found


def _renamed(value: Any, kind: type[Fields], path: str, unknown: list[str]) -> Any:
    """Return an object with its known names in camelCase, without others. Adds their paths to `unknown`."""
    if isinstance(value, list):
        return [_renamed(item, kind, path, unknown) for item in value]
    if not isinstance(value, dict):
        return value
    known, found = _fields(kind), {}
    for name, inner in value.items():
        camel = _SNAKE.sub(lambda m: m[1].upper(), name)
        where = f"{path}.{camel}" if path else camel
        if camel not in known:
            if len(unknown) < MAX_TOLD:
                unknown.append(where)
            continue
        objects = known[camel]
        found[camel] = _renamed(inner, objects, where, unknown) if objects else inner
    return found
