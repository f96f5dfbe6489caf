"""The fields of `session.audio.input`: formats, noise reduction and turn detection, with their defaults and checks.

Transcriptions and conversations share most of them: docs/wire/openai-transcription.md, docs/wire/openai-realtime.md.
A check returns what the session shows from then on; it raises RemoteProtocolError with the path of the field at fault,
which begins with `param`. Nothing is changed in place.
"""

from __future__ import annotations

from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import known, number, typed
from antiphon.turns.eagerness import EAGERNESS_MS

# Hz. G.711 has 8,000 always.
PCM_RATES_HZ = (8000, 16000, 24000, 44100, 48000)
# The beta's names of formats.
BETA_FORMATS: dict[str, dict[str, Any]] = {
    "pcm16": {"type": "audio/pcm", "rate": 24000},
    "g711_ulaw": {"type": "audio/pcmu"},
    "g711_alaw": {"type": "audio/pcma"},
}
# What `idle_timeout_ms` may be: from, to.
IDLE_TIMEOUT_RANGE_MS = (1000, 60_000)
_VAD_FIELDS = (
    "type",
    "threshold",
    "prefix_padding_ms",
    "silence_duration_ms",
    "idle_timeout_ms",
    "create_response",
    "interrupt_response",
)


def default_input(model: str) -> dict[str, Any]:
    """`session.audio.input` of a new transcription: the hosted service's defaults, and the model as it is named."""
    return {
        "format": {"type": "audio/pcm", "rate": 24000},
        "transcription": {"model": model},
        "noise_reduction": None,
        "turn_detection": {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "silence_duration_ms": 200,
        },
    }


def format_of_beta(value: Any) -> Any:
    """The format that a beta name stands for; anything else is returned as it is, for `check_format` to refuse."""
    return BETA_FORMATS.get(value, value) if isinstance(value, str) else value


def beta_format_name(audio_format: dict[str, Any]) -> str:
    """The beta's name of a format; `pcm16` for PCM of any rate."""
    return next((name for name, f in BETA_FORMATS.items() if f["type"] == audio_format["type"]), "pcm16")


def check_format(value: Any, param: str) -> dict[str, Any]:
    """A format of audio: an object with `type` and, for PCM, a `rate` of PCM_RATES_HZ (default 24,000).

    A text is a beta name that is unknown, since the known ones have been replaced by their formats.
    """
    typed(value, (dict, str), param)
    kinds = ("audio/pcm", "audio/pcmu", "audio/pcma")
    if isinstance(value, str) or value.get("type") not in kinds:
        name = value if isinstance(value, str) else value.get("type")
        names = tuple(BETA_FORMATS) if isinstance(value, str) else kinds
        supported = ", ".join(f"'{k}'" for k in names)
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value: '{name}'. Supported values are: {supported}.", param
        )
    known(value, ("type", "rate"), param)
    if value["type"] != "audio/pcm":
        return {"type": value["type"]}
    rate = value.get("rate", 24000)
    if rate not in PCM_RATES_HZ:
        rates = ", ".join(map(str, PCM_RATES_HZ))
        raise RemoteProtocolError(
            "invalid_value", f"Invalid rate: {rate}. Supported values are: {rates}.", f"{param}.rate"
        )
    return {"type": "audio/pcm", "rate": rate}


def check_noise_reduction(value: Any, param: str) -> dict[str, Any] | None:
    """Noise reduction, which is accepted and shown, and has no effect; null turns it off."""
    if typed(value, (dict, type(None)), param) is None:
        return None
    known(value, ("type", "strength"), param)
    if value.get("type", "near_field") not in ("near_field", "far_field"):
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value: '{value['type']}'. Supported values are: 'near_field', 'far_field'.",
            f"{param}.type",
        )
    return dict(value)


def check_keywords(value: Any, param: str) -> list[str]:
    """Words that a transcription is to expect, in the client's order; null for none."""
    words = typed(value, (list, type(None)), param) or []
    return [typed(word, str, param) for word in words]


def check_transcription_vad(value: Any, previous: dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    """Turn detection of a transcription: `server_vad`, or null for turns that the client commits.

    Fields that are missing are as in `previous`, the turn detection before, and where that was null as by default.
    """
    if typed(value, (dict, type(None)), param) is None:
        return None
    _check_server_vad(value, param)
    if value.get("idle_timeout_ms") is not None:
        raise RemoteProtocolError(
            "invalid_value", "A transcription session has no idle timeout.", f"{param}.idle_timeout_ms"
        )
    return _merge_server_vad(value, previous, param)


def check_conversation_vad(value: Any, previous: dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    """Turn detection of a conversation: `server_vad`, `semantic_vad`, or null for turns that the client commits.

    Missing fields of `server_vad` are as in `previous` where that was of the same type, else as by default; those of
    `semantic_vad` are always as by default.
    """
    if typed(value, (dict, type(None)), param) is None:
        return None
    if value.get("type") == "semantic_vad":
        return _check_semantic_vad(value, param)
    if previous and previous["type"] != "server_vad":
        previous = None
    _check_server_vad(value, param)
    merged = _merge_server_vad(value, previous, param)
    for key in ("create_response", "interrupt_response"):
        merged[key] = merged.get(key) is not False
    idle_ms = value.get("idle_timeout_ms")
    if idle_ms is not None:
        idle_ms = number(idle_ms, f"{param}.idle_timeout_ms", *IDLE_TIMEOUT_RANGE_MS)
    return merged | {"idle_timeout_ms": idle_ms}


def _check_server_vad(value: dict[str, Any], param: str) -> None:
    known(value, _VAD_FIELDS, param)
    if value.get("type", "server_vad") != "server_vad":
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value: '{value['type']}'. Supported values are: 'server_vad'.",
            f"{param}.type",
        )


def _merge_server_vad(value: dict[str, Any], previous: dict[str, Any] | None, param: str) -> dict[str, Any]:
    merged: dict[str, Any] = dict(previous or default_input("")["turn_detection"])
    for key, least, greatest in (
        ("threshold", 0.0, 1.0),
        ("prefix_padding_ms", 0, 5000),
        ("silence_duration_ms", 32, 60000),
    ):
        if value.get(key) is not None:
            checked = number(value[key], f"{param}.{key}", least, greatest)
            merged[key] = checked if key == "threshold" else int(checked)
    for key in ("create_response", "interrupt_response"):
        if key in value:
            merged[key] = typed(value[key], (bool, type(None)), f"{param}.{key}")
    return merged


def _check_semantic_vad(value: dict[str, Any], param: str) -> dict[str, Any]:
    known(value, ("type", "eagerness", "create_response", "interrupt_response"), param)
    eagerness = value.get("eagerness") or "auto"
    if not isinstance(eagerness, str) or eagerness not in EAGERNESS_MS:
        raise RemoteProtocolError(
            "invalid_value",
            f"Invalid value: '{eagerness}'. Supported values are: 'low', 'medium', 'high', 'auto'.",
            f"{param}.eagerness",
        )
    return {
        "type": "semantic_vad",
        "eagerness": eagerness,
        "create_response": value.get("create_response") is not False,
        "interrupt_response": value.get("interrupt_response") is not False,
    }
