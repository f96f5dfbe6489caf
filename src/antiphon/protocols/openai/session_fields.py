"""The fields of a conversation's session: read from a `session.update` in GA or beta names, checked, and shown.

docs/wire/openai-realtime.md describes them, under "The session". The fields of the input are checked by
input_fields.py.
"""

from __future__ import annotations

from typing import Any, Literal

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import known, number, require, typed
from antiphon.protocols.openai.input_fields import beta_format_name, format_of_beta
from antiphon.protocols.openai.items import tool_choice_from, tools_from

# The changed fields of an update by their GA names: the session's own, those of `audio.input`, those of `audio.output`.
SessionUpdate = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

_GA_FIELDS = (
    "type",
    "object",
    "id",
    "model",
    "output_modalities",
    "instructions",
    "audio",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "truncation",
    "tracing",
    "prompt",
    "include",
    "reasoning",
    "parallel_tool_calls",
    "expires_at",
)
# Fields with their GA names; then those of the input; then fields that are shown as they were given.
_BETA_NAMES = {
    "modalities": "output_modalities",
    "instructions": "instructions",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "max_response_output_tokens": "max_output_tokens",
}
_BETA_INPUT_FIELDS = (
    "input_audio_format",
    "input_audio_transcription",
    "input_audio_noise_reduction",
    "turn_detection",
)
_ECHOED_FIELDS = ("truncation", "tracing", "prompt", "include", "reasoning", "parallel_tool_calls")


def uses_beta_names(session: dict[str, Any]) -> bool:
    """Whether an update has a field that only the beta has."""
    return any(k in session for k in (*_BETA_INPUT_FIELDS, "modalities", "voice", "output_audio_format"))


def read_ga_update(session: dict[str, Any]) -> SessionUpdate:
    """Read an update in the GA names. The values are not checked yet.

    Raises RemoteProtocolError for an unknown field, and for another `type` than `realtime`.
    """
    known(session, _GA_FIELDS, "session")
    if session.get("type", "realtime") != "realtime":
        raise RemoteProtocolError("invalid_value", "A session's type cannot be changed.", "session.type")
    audio = typed(session.get("audio") or {}, dict, "session.audio")
    known(audio, ("input", "output"), "session.audio")
    given = typed(audio.get("input") or {}, dict, "session.audio.input")
    known(given, ("format", "transcription", "noise_reduction", "turn_detection"), "session.audio.input")
    output = typed(audio.get("output") or {}, dict, "session.audio.output")
    known(output, ("format", "voice", "speed"), "session.audio.output")
    keep = ("output_modalities", "instructions", "tools", "tool_choice", "max_output_tokens", *_ECHOED_FIELDS)
    return {k: session[k] for k in keep if k in session}, given, output


def read_beta_update(session: dict[str, Any]) -> SessionUpdate:
    """Read an update in the beta's names; its formats and modalities get their GA form. The values are not checked yet.

    Raises RemoteProtocolError for an unknown field.
    """
    known(
        session,
        (
            *_BETA_NAMES,
            *_BETA_INPUT_FIELDS,
            "voice",
            "output_audio_format",
            "temperature",
            "speed",
            "model",
            "type",
            "tracing",
            "include",
            "client_secret",
        ),
        "session",
    )
    fields = {new: session[old] for old, new in _BETA_NAMES.items() if old in session}
    modalities = fields.get("output_modalities") or []
    if "output_modalities" in fields and isinstance(modalities, list | str | dict):
        fields["output_modalities"] = ["audio"] if "audio" in modalities else ["text"]
    names = dict(zip(_BETA_INPUT_FIELDS, ("format", "transcription", "noise_reduction", "turn_detection"), strict=True))
    inputs = {new: session[old] for old, new in names.items() if old in session}
    if "format" in inputs:
        inputs["format"] = format_of_beta(inputs["format"])
    output: dict[str, Any] = {k: session[k] for k in ("voice", "speed") if k in session}
    if "output_audio_format" in session:
        output["format"] = format_of_beta(session["output_audio_format"])
    return fields, inputs, output


def ga_session_json(model: str, fields: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """The session as JSON values in the GA names.

    `fields` are the session's own, with those of its output under `output`; `audio` are those of its input.
    """
    shown = {k: v for k, v in fields.items() if k != "output"}
    return {"type": "realtime", "model": model} | shown | {"audio": {"input": audio, "output": fields["output"]}}


def beta_session_json(model: str, fields: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """The session as JSON values in the beta's names, from the same parts as `ga_session_json`.

    `temperature` is the service's default: it is shown and has no effect.
    """
    output = fields["output"]
    return {
        "model": model,
        "modalities": ["audio", "text"] if fields["output_modalities"] == ["audio"] else ["text"],
        "instructions": fields["instructions"],
        "voice": output["voice"],
        "input_audio_format": beta_format_name(audio["format"]),
        "output_audio_format": beta_format_name(output["format"]),
        "input_audio_transcription": audio["transcription"],
        "input_audio_noise_reduction": audio["noise_reduction"],
        "turn_detection": audio["turn_detection"],
        "tools": fields["tools"],
        "tool_choice": fields["tool_choice"],
        "temperature": 0.8,
        "max_response_output_tokens": fields["max_output_tokens"],
    }


def check_session_field(key: str, value: Any, *, speaks: bool) -> Any:
    """The value of one of the session's own fields as it is shown from then on; null stands for the default.

    `speaks`: there is a voice; without one, `output_modalities` is always text. Raises RemoteProtocolError. Fields that
    have no effect here are returned unchecked.
    """
    param = f"session.{key}"
    match key:
        case "output_modalities":
            if value not in (["audio"], ["text"]):
                raise RemoteProtocolError(
                    "invalid_value", "Invalid modalities: supported are ['audio'] and ['text'].", param
                )
            return value if speaks else ["text"]
        case "instructions":
            return typed(value, (str, type(None)), param) or ""
        case "tools":
            tools_from(value, param)
            return value or []
        case "tool_choice":
            tool_choice_from(value, param)
            return value or "auto"
        case "max_output_tokens":
            if value is None or value == "inf":
                return "inf"
            return int(number(typed(value, int, param), param, 1, 4096))
        case "truncation":
            truncation_from(value, param)
            return value or "auto"
        case _:
            return value


def truncation_from(value: Any, param: str = "truncation") -> Literal["auto", "disabled"] | float:
    """What happens when the history outgrows the context: `auto`, `disabled`, or the share that is kept, in [0, 1].

    Raises RemoteProtocolError for another value of `truncation`.
    """
    if value in (None, "auto", "disabled"):
        return value or "auto"
    given = typed(value, dict, param)
    known(given, ("type", "retention_ratio", "token_limits"), param)
    if given.get("type") != "retention_ratio":
        raise RemoteProtocolError(
            "invalid_value", "Supported are 'auto', 'disabled' and {'type': 'retention_ratio'}.", f"{param}.type"
        )
    return float(number(require(given, "retention_ratio", (int, float), param), f"{param}.retention_ratio", 0.0, 1.0))
