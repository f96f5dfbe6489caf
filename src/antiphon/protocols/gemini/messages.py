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


class GeminiFields(msgspec.Struct, rename="camel"):
    """An object of the API. Unknown fields are ignored."""


class GeminiBlob(GeminiFields):
    """Audio or an image: base64, with its media type, such as `audio/pcm;rate=16000`."""

    data: str = ""
    mime_type: str = ""

    @property
    def base64(self) -> str:
        """The data in the usual alphabet. The client for Python writes base64 for URLs."""
        return self.data.translate(_USUAL)


class FunctionCallPart(GeminiFields):
    """A call that the model has made, in a history that the client sends."""

    id: Text = ""
    name: Text = ""
    args: Any = None


class FunctionResponse(GeminiFields):
    """The result of a call. `scheduling`: when the model is to speak of it: `INTERRUPT`, `WHEN_IDLE` or `SILENT`."""

    id: Text | None = None
    name: Text = ""
    response: Any = None
    scheduling: Text | None = None


class GeminiPart(GeminiFields):
    """A part of a content. The first field that is set counts."""

    text: Text | None = None
    inline_data: GeminiBlob | None = None
    function_call: FunctionCallPart | None = None
    function_response: FunctionResponse | None = None


class GeminiContent(GeminiFields):
    """One item of a conversation. `role`: `user` or `model`."""

    role: Text | None = None
    parts: list[GeminiPart] | None = None

    @property
    def text(self) -> str:
        """The text of all parts, in paragraphs."""
        return "\n".join(part.text for part in self.parts or () if part.text)


class PrebuiltVoiceConfig(GeminiFields):
    """A voice that is named, such as `Puck`."""

    voice_name: Text | None = None


class VoiceConfig(GeminiFields):
    """How a voice is chosen: only by its name."""

    prebuilt_voice_config: PrebuiltVoiceConfig | None = None


class GeminiSpeech(GeminiFields):
    """The voice of the responses. `language_code`: language of the conversation, such as `de-DE`."""

    voice_config: VoiceConfig | None = None
    language_code: Text | None = None


class GenerationConfig(GeminiFields):
    """How the model generates. The sampling parameters apply to native models."""

    # `AUDIO` or `TEXT`.
    response_modalities: list[Text] | None = None
    # Most tokens of a response.
    max_output_tokens: int | None = None
    # Sampling temperature, of native models.
    temperature: float | None = None
    # Top-p sampling, of native models.
    top_p: float | None = None
    # Top-k sampling, of native models.
    top_k: float | None = None
    # Random seed, of native models.
    seed: int | None = None
    # The voice.
    speech_config: GeminiSpeech | None = None


class FunctionDeclaration(GeminiFields):
    """A function that the client carries out. `parameters`: Google's schema; `parameters_json_schema`: JSON schema."""

    name: Text
    description: Text | None = None
    parameters: Any = None
    parameters_json_schema: Any = None


class ToolGroup(GeminiFields):
    """Functions, or one of Google's own tools, of which there are none here."""

    # The functions of the client.
    function_declarations: list[FunctionDeclaration] | None = None
    # One of Google's own tools, as all below.
    google_search: object = None
    # Refused.
    google_search_retrieval: object = None
    # Refused.
    google_maps: object = None
    # Refused.
    code_execution: object = None
    # Refused.
    url_context: object = None
    # Refused.
    file_search: object = None
    # Refused.
    computer_use: object = None


class AutomaticActivityDetection(GeminiFields):
    """How the server detects turns. `disabled`: the client sends `activityStart` and `activityEnd`."""

    disabled: bool | None = None
    start_of_speech_sensitivity: Text | None = None
    end_of_speech_sensitivity: Text | None = None
    silence_duration_ms: int | None = None


class RealtimeInputConfig(GeminiFields):
    """How realtime input becomes turns, and whether it interrupts responses."""

    automatic_activity_detection: AutomaticActivityDetection | None = None
    activity_handling: Text | None = None


class GeminiTranscription(GeminiFields):
    """Asks for transcripts. The fields are hints for the transcriber."""

    language_codes: list[Text] | None = None
    custom_vocabulary: list[Text] | None = None
    adaptation_phrases: list[Text] | None = None


class SessionResumption(GeminiFields):
    """Asks for handles, with which the session can be resumed. `handle`: the session to resume."""

    handle: Text | None = None


class SlidingWindow(GeminiFields):
    """`target_tokens`: the number of tokens that a shortened history has."""

    target_tokens: int | str | None = None


class ContextWindowCompression(GeminiFields):
    """`trigger_tokens`: the number of tokens from which on the history is shortened."""

    trigger_tokens: int | str | None = None
    sliding_window: SlidingWindow | None = None


class HistoryConfig(GeminiFields):
    """Whether the client's content is a history at first, to which the model does not respond."""

    initial_history_in_client_content: bool | None = None


class GeminiSetup(GeminiFields):
    """The configuration of a session: the first message."""

    # `models/NAME`.
    model: Text = ""
    # How the model generates.
    generation_config: GenerationConfig | None = None
    # Instructions for the model.
    system_instruction: GeminiContent | Text | None = None
    # The functions that it may call.
    tools: list[ToolGroup] | None = None
    # How turns are detected.
    realtime_input_config: RealtimeInputConfig | None = None
    # Asks for the user's transcripts.
    input_audio_transcription: GeminiTranscription | None = None
    # Asks for the text of what is spoken.
    output_audio_transcription: GeminiTranscription | None = None
    # Asks for handles, or resumes a session.
    session_resumption: SessionResumption | None = None
    # How a long history is shortened.
    context_window_compression: ContextWindowCompression | None = None
    # Whether contents are a history at first.
    history_config: HistoryConfig | None = None


class RealtimeInput(GeminiFields):
    """Input as it arises. Several fields may be set; they count in this order."""

    # The user's turn begins.
    activity_start: object = None
    # Audio and images, as older clients send them.
    media_chunks: list[GeminiBlob] | None = None
    # Audio of the user.
    audio: GeminiBlob | None = None
    # An image of the camera.
    video: GeminiBlob | None = None
    # A typed turn.
    text: Text | None = None
    # The user's turn ends.
    activity_end: object = None
    # No more audio comes.
    audio_stream_end: bool | None = None


class ClientContent(GeminiFields):
    """Items for the history. With `turn_complete`, the model responds."""

    turns: list[GeminiContent] | GeminiContent | None = None
    turn_complete: bool | None = None


class ToolResponse(GeminiFields):
    """The results of calls of functions, one or several."""

    function_responses: list[FunctionResponse] | FunctionResponse = []


class GeminiMessage(GeminiFields):
    """One message. Exactly one field is set."""

    setup: GeminiSetup | None = None
    realtime_input: RealtimeInput | None = None
    client_content: ClientContent | None = None
    tool_response: ToolResponse | None = None


def read_message(data: str | bytes) -> tuple[GeminiMessage, list[str]]:
    """Return a message, and the paths of its unknown fields. Raises RemoteProtocolError if it cannot be read."""
    try:
        value = typed(decode_json(data), dict, "message")
    except ValueError as error:
        raise RemoteProtocolError("invalid_json", f"Invalid JSON payload received: {error}.") from None
    unknown: list[str] = []
    try:
        found = msgspec.convert(_renamed(value, GeminiMessage, "", unknown), GeminiMessage)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    return found, unknown


@cache
def _fields(kind: type[GeminiFields]) -> dict[str, type[GeminiFields] | None]:
    """Return the fields of an object by their names in camelCase, each with the kind of the objects in it, if any."""
    return {
        field.encode_name: next(_objects([inspect.type_info(field.type)]), None)
        for field in msgspec.structs.fields(kind)
    }


def _objects(kinds: Iterable[inspect.Type]) -> Iterator[type[GeminiFields]]:
    for kind in kinds:
        match kind:
            case inspect.UnionType(types=inner):
                yield from _objects(inner)
            case inspect.ListType(item_type=item):
                yield from _objects([item])
            case inspect.StructType(cls=found) if issubclass(found, GeminiFields):
                yield found


def _renamed(value: Any, kind: type[GeminiFields], path: str, unknown: list[str]) -> Any:
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
