"""A `session.update` of either dialect taken apart: the session's own fields, those of its input, those of its output. Pure."""

from __future__ import annotations

from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import known, typed
from antiphon.protocols.openai.input_fields import BETA_FORMATS, beta_format_name

SessionUpdate = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

_GA_KEYS = (
    "type", "object", "id", "model", "output_modalities", "instructions", "audio", "tools", "tool_choice", "max_output_tokens",
    "truncation", "tracing", "prompt", "include", "reasoning", "parallel_tool_calls", "expires_at",
)  # fmt: skip
_BETA_KEYS = {
    "modalities": "output_modalities",
    "instructions": "instructions",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "max_response_output_tokens": "max_output_tokens",
}
_BETA_AUDIO = ("input_audio_format", "input_audio_transcription", "input_audio_noise_reduction", "turn_detection")
_ECHOED = ("truncation", "tracing", "prompt", "include", "reasoning", "parallel_tool_calls")


def uses_beta_names(session: dict[str, Any]) -> bool:
    """It uses names that only the beta has."""
    return any(k in session for k in (*_BETA_AUDIO, "modalities", "voice", "output_audio_format"))


def read_ga_update(session: dict[str, Any]) -> SessionUpdate:
    """The GA names. Raises RemoteProtocolError for a field that is none."""
    known(session, _GA_KEYS, "session")
    if session.get("type", "realtime") != "realtime":
        raise RemoteProtocolError("invalid_value", "A session's type cannot be changed.", "session.type")
    audio = typed(session.get("audio") or {}, dict, "session.audio")
    known(audio, ("input", "output"), "session.audio")
    given = typed(audio.get("input") or {}, dict, "session.audio.input")
    known(given, ("format", "transcription", "noise_reduction", "turn_detection"), "session.audio.input")
    output = typed(audio.get("output") or {}, dict, "session.audio.output")
    known(output, ("format", "voice", "speed"), "session.audio.output")
    keep = ("output_modalities", "instructions", "tools", "tool_choice", "max_output_tokens", *_ECHOED)
    return {k: session[k] for k in keep if k in session}, given, output


def read_beta_update(session: dict[str, Any]) -> SessionUpdate:
    """The beta names, as the GA's. Raises RemoteProtocolError for a field that is none."""
    known(
        session,
        (
            *_BETA_KEYS,
            *_BETA_AUDIO,
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
    fields = {new: session[old] for old, new in _BETA_KEYS.items() if old in session}
    if "output_modalities" in fields:
        fields["output_modalities"] = ["audio"] if "audio" in (fields["output_modalities"] or []) else ["text"]
    names = dict(zip(_BETA_AUDIO, ("format", "transcription", "noise_reduction", "turn_detection"), strict=True))
    given = {new: session[old] for old, new in names.items() if old in session}
    if "format" in given:
        given["format"] = BETA_FORMATS.get(given["format"], given["format"])
    output: dict[str, Any] = {k: session[k] for k in ("voice", "speed") if k in session}
    if "output_audio_format" in session:
        output["format"] = BETA_FORMATS.get(session["output_audio_format"], session["output_audio_format"])
    return fields, given, output


def ga_session_json(model: str, fields: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """A session in the GA names."""
    shown = {k: v for k, v in fields.items() if k != "output"}
    return {"type": "realtime", "model": model} | shown | {"audio": {"input": audio, "output": fields["output"]}}


def beta_session_json(model: str, fields: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """A session in the beta names."""
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
