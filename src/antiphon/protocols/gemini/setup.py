"""Converts the setup of a Gemini Live session into the configuration of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationConfig
from antiphon.events.duplex import DuplexConfig, NativeSampling
from antiphon.events.tools import Tool
from antiphon.events.transcription import Eagerness, ServerVad, TranscriptionConfig
from antiphon.protocols.connection import Context
from antiphon.protocols.fields import check_length, number, seed, typed
from antiphon.protocols.gemini.messages import (
    AutomaticActivityDetection,
    ContextWindowCompression,
    GeminiContent,
    GeminiSetup,
    GeminiTranscription,
    GenerationConfig,
    ToolGroup,
)
from antiphon.turns.end_of_turn import semantic_vad

_EAGERNESS: Mapping[str, Eagerness] = {"END_SENSITIVITY_HIGH": "high", "END_SENSITIVITY_LOW": "low"}
# The speech probability from which a frame counts as speech, where only clear speech is to begin a turn.
LOW_SENSITIVITY = 0.7
# Limits of `silenceDurationMs`, in milliseconds.
MIN_SILENCE_MS, MAX_SILENCE_MS = 32, 60_000
# Limits of the sampling parameters.
MAX_TOKENS, MAX_TEMPERATURE, MAX_TOP_K = 1 << 20, 2, 10_000


def config_of(setup: GeminiSetup, context: Context) -> ConversationConfig:
    """Return the configuration for a setup. Raises RemoteProtocolError for a field that cannot be served."""
    instructions = setup.system_instruction or ""
    text = instructions.text if isinstance(instructions, GeminiContent) else instructions
    check_length(len(text), "setup.systemInstruction")
    generation = setup.generation_config or GenerationConfig()
    realtime = setup.realtime_input_config
    interrupts = not (realtime and realtime.activity_handling == "NO_INTERRUPTION")
    detection = realtime.automatic_activity_detection if realtime else None
    speech = generation.speech_config
    asked = speech.voice_config and speech.voice_config.prebuilt_voice_config if speech else None
    voice = context.loaded_voice(asked.voice_name if asked else None)
    if asked and asked.voice_name and not voice:
        context.log_alias(f"voice {asked.voice_name}", context.voices[0] if context.voices else "no voice")
    max_tokens = generation.max_output_tokens
    return ConversationConfig(
        _transcription(setup, speech.language_code if speech else None, detection, context),
        instructions=text,
        audio_output=bool(context.voices) and "TEXT" not in (generation.response_modalities or ()),
        voice=voice,
        tools=tools_of(setup.tools or (), context),
        max_tokens=max_tokens and int(number(max_tokens, "setup.generationConfig.maxOutputTokens", 1, MAX_TOKENS)),
        interrupt_response=interrupts,
        # A native model hears the user during its responses.
        native_decides_interruptions=interrupts,
        reports_transcripts=setup.input_audio_transcription is not None,
        truncation=_truncation(setup.context_window_compression),
        allows_backchannels=interrupts,
        duplex=DuplexConfig(
            "auto" if interrupts else "listen_only",
            reports_playout=True,
            sampling=_sampling(generation),
        ),
    )


def _sampling(generation: GenerationConfig) -> NativeSampling:
    def within(value: float | None, name: str, high: float) -> float | None:
        return None if value is None else number(value, f"setup.generationConfig.{name}", 0, high)

    top_k = within(generation.top_k, "topK", MAX_TOP_K)
    return NativeSampling(
        temperature=within(generation.temperature, "temperature", MAX_TEMPERATURE),
        top_k=None if top_k is None else int(top_k),
        top_p=within(generation.top_p, "topP", 1),
        seed=seed(generation.seed),
    )


def _transcription(
    setup: GeminiSetup, spoken: str | None, detection: AutomaticActivityDetection | None, context: Context
) -> TranscriptionConfig:
    hints = setup.input_audio_transcription or GeminiTranscription()
    named = hints.language_codes or ([spoken] if spoken else [])
    languages = tuple(c for c in (name.partition("-")[0].lower() for name in named) if context.knows_language(c))
    return TranscriptionConfig(
        language=languages[0] if len(languages) == 1 else None,
        languages=languages if len(languages) > 1 else (),
        keyterms=(*(hints.custom_vocabulary or ()), *(hints.adaptation_phrases or ())),
        vad=None if detection and detection.disabled else _vad(detection or AutomaticActivityDetection()),
        preflight=True,
    )


def _vad(detection: AutomaticActivityDetection) -> ServerVad:
    """Return the turn detection: by sound and words, or by a pause of the given length."""
    vad = semantic_vad(_EAGERNESS.get(detection.end_of_speech_sensitivity or "", "auto"))
    if detection.silence_duration_ms is not None:
        param = "setup.realtimeInputConfig.automaticActivityDetection.silenceDurationMs"
        silence_ms = number(detection.silence_duration_ms, param, 0, MAX_SILENCE_MS)
        vad = ServerVad(silence_duration_ms=max(int(silence_ms), MIN_SILENCE_MS))
    is_low = detection.start_of_speech_sensitivity == "START_SENSITIVITY_LOW"
    return replace(vad, threshold=LOW_SENSITIVITY) if is_low else vad


def _truncation(compression: ContextWindowCompression | None) -> Literal["auto"] | float:
    """Return the part of the context that a shortened history keeps, or `auto`, with which it is shortened as well."""
    window = compression.sliding_window if compression else None
    try:
        kept = int(window.target_tokens or 0) if window else 0
        full = int(compression.trigger_tokens or 0) if compression else 0
    except ValueError:
        param = "setup.contextWindowCompression"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': expected numbers.", param) from None
    return kept / full if 0 < kept < full else "auto"


def tools_of(groups: list[ToolGroup] | tuple[()], context: Context) -> tuple[Tool, ...]:
    """Return the functions of a setup. Raises RemoteProtocolError for Google's own tools, and for invalid schemas."""
    tools = list[Tool]()
    for place, group in enumerate(groups):
        for name in group.__struct_fields__[1:]:
            if getattr(group, name) is not None:
                param = f"setup.tools[{place}].{name}"
                raise RemoteProtocolError("unsupported_parameter", f"The tool '{name}' does not exist here.", param)
        for given in group.function_declarations or ():
            schema = given.parameters_json_schema or json_schema(given.parameters or {})
            param = f"setup.tools[{place}].functionDeclarations.parameters"
            tools.append(Tool(given.name, given.description or "", typed(schema, dict, param)))
    if len({tool.name for tool in tools}) < len(tools):
        raise RemoteProtocolError("invalid_value", "Two functions have the same name.", "setup.tools")
    context.check_tools(tools, "setup.tools")
    return tuple(tools)


def json_schema(schema: Any) -> Any:
    """Return Google's form of a schema as a JSON schema: types in small letters, counts as numbers, `nullable` as a
    type. Names in snake_case are read as well.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    found.pop("propertyOrdering", None)
    found.pop("property_ordering", None)
    for name in ("any_of", "min_items", "max_items", "min_length", "max_length"):
        if name in found:
            first, _, last = name.partition("_")
            found[f"{first}{last.capitalize()}"] = found.pop(name)
    for name, value in found.items():
        found[name] = _schema_value(name, value)
    if found.pop("nullable", False) and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _schema_value(name: str, value: Any) -> Any:
    match name, value:
        case "type", str():
            return value.lower()
        case "properties", dict():
            return {key: json_schema(inner) for key, inner in value.items()}
        case "items", dict():
            return json_schema(value)
        case "anyOf", list():
            return [json_schema(inner) for inner in value]
        case (("minItems" | "maxItems" | "minLength" | "maxLength"), str()) if value.isdecimal():
            return int(value)
        case _:
            return value
