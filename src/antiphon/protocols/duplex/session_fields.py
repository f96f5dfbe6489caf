"""The fields of a full-duplex session that a conversation does not have, its audio formats and its capabilities.

docs/wire/duplex.md describes them. What is read is checked: a wrong field raises RemoteProtocolError.
"""

from __future__ import annotations

from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.events.duplex import DuplexConfig
from antiphon.protocols.fields import audio_file, number, typed

# `{"type": ..., "rate": ...}`: a format of _INPUT_FORMATS or _OUTPUT_FORMATS, and Hz.
AudioFormat = dict[str, Any]
# Other names of the client's events, and the names that the dialect knows them by.
ALIASES = {
    "input.audio.append": "input_audio_buffer.append",
    "push_chunk": "input_audio_buffer.append",
    "input.text.append": "push_text",
    "input_text.append": "push_text",
    "signal_turn": "turn.signal",
    "audio.playback_ack": "playback.ack",
    "close_session": "session.close",
    "close": "session.close",
    "session.create": "session.update",
}
# Error codes of a conversation, and what they are called here.
DUPLEX_CODES = {
    "invalid_type": "bad_event",
    "invalid_value": "bad_event",
    "unknown_parameter": "bad_event",
    "missing_required_parameter": "bad_event",
    "input_audio_buffer_commit_empty": "input_audio_buffer_empty",
    "conversation_already_has_active_response": "response_already_active",
    "item_retrieve_invalid_item_id": "item_not_found",
    "item_delete_invalid_item_id": "item_not_found",
    "item_truncate_invalid_item_id": "item_not_found",
    "input_audio_buffer_overflow": "input_backpressure",
    "rate_limit_exceeded": "resource_exhausted",
}
# Errors after which the same message may be accepted later.
RETRYABLE = frozenset({"resource_exhausted", "input_backpressure"})

OVERLAP_POLICIES = ("listen_only", "barge_in_on_speech", "auto")
COMMIT_POLICIES = ("commit_all_on_done", "ack_only")
_INPUT_FORMATS = ("pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw")
_OUTPUT_FORMATS = (*_INPUT_FORMATS, "wav")
# Other names of formats.
_FORMAT_ALIASES = {
    "pcm": "pcm16",
    "pcm_s16le": "pcm16",
    "s16le": "pcm16",
    "audio/pcm": "pcm16",
    "pcm_f32": "pcm_f32le",
    "f32le": "pcm_f32le",
    "float32": "pcm_f32le",
    "audio/pcmu": "g711_ulaw",
    "audio/pcma": "g711_alaw",
    "audio/wav": "wav",
}
MIN_RATE_HZ, MAX_RATE_HZ = 8000, 192_000
# In one append.
MAX_VIDEO_FRAMES = 2
# What `capabilities` tells: how often a cascade is best sent audio, and how soon a barge-in silences a response.
CHUNK_PERIOD_MS = 100
TARGET_BARGE_IN_MS = 300
# Of a recording of the voice to speak with, as a file.
MAX_REFERENCE_BYTES = 10 << 20


def duplex_fields() -> dict[str, Any]:
    """The fields that a full-duplex session has beside a conversation's, as the client is shown them, by default."""
    return {
        "overlap_policy": "auto",
        "overlap_short_ack_ms": 700,
        "overlap_barge_in_ms": 1200,
        "overlap_silence_rms": 0.003,
        "playback_commit_policy": "commit_all_on_done",
        "idle_timeout_s": 300.0,
        "temperature": None,
        "ref_audio": None,
        "metadata": None,
        "extra_body": {"auto_response": True},
    }


def capabilities(*, unit_ms: int, speaks: bool, resumes: bool) -> dict[str, Any]:
    """`capabilities` as JSON values. `unit_ms`: the length of a native model's unit, 0 for a cascade.

    `speaks`: there is a voice. `resumes`: the session outlives its connection.
    """
    return {
        "implementation_level": "model_native_duplex" if unit_ms else "turn_based_duplex",
        "input_modes": ["audio", "video"] if unit_ms else ["audio", "text"],
        "chunk_period_ms": unit_ms or CHUNK_PERIOD_MS,
        "required_modalities": ["audio"],
        "optional_modalities": ["video"] if unit_ms else ["text"],
        "output_modalities": ["audio", "text"] if speaks else ["text"],
        "supports_barge_in": True,
        "supports_session_resume": resumes,
        "supports_audio_truncate": True,
        "supports_kv_lease": True,
        "target_barge_in_latency_ms": TARGET_BARGE_IN_MS,
    }


def audio_json(input_format: AudioFormat, output: dict[str, Any]) -> dict[str, Any]:
    """The session's `audio` as JSON values. `output` is the conversation's: format, voice and speed."""
    return {
        "input": {"format": input_format["type"], "sample_rate_hz": input_format["rate"]},
        "output": {
            "format": output["format"]["type"],
            "sample_rate_hz": output["format"]["rate"],
            "voice": output["voice"],
            "speed": output["speed"],
        },
    }


def own_update(session: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of an update that a conversation does not have. Those that are missing or null are left out.

    Raises RemoteProtocolError (`bad_event` for a policy). `ref_audio` becomes the bytes of the file.
    """
    out: dict[str, Any] = {}
    for key, allowed in (("overlap_policy", OVERLAP_POLICIES), ("playback_commit_policy", COMMIT_POLICIES)):
        if session.get(key) is not None:
            if session[key] not in allowed:
                raise RemoteProtocolError(
                    "bad_event", f"Invalid value for 'session.{key}': one of {', '.join(allowed)}.", f"session.{key}"
                )
            out[key] = session[key]
    for key, low, high in (
        ("overlap_short_ack_ms", 0, 10_000),
        ("overlap_barge_in_ms", 0, 10_000),
        ("overlap_silence_rms", 0, 1),
        ("idle_timeout_s", 1, 86_400),
        ("temperature", 0, 2),
    ):
        if session.get(key) is not None:
            out[key] = number(session[key], f"session.{key}", low, high)
    for key, kinds in (("ref_audio", (str, dict)), ("metadata", (dict,)), ("extra_body", (dict,))):
        if session.get(key) is not None:
            out[key] = typed(session[key], kinds, f"session.{key}")
    if (voice := out.get("ref_audio")) is not None:
        data = typed(voice.get("data"), str, "session.ref_audio.data") if isinstance(voice, dict) else voice
        out["ref_audio"] = audio_file(data, "session.ref_audio", MAX_REFERENCE_BYTES)
    if (given := out.get("extra_body", {}).get("force_listen_count")) is not None:
        number(given, "session.extra_body.force_listen_count", 0, 3600)
    return out


def duplex_config(own_fields: dict[str, Any]) -> DuplexConfig:
    """The session's configuration from the fields of `duplex_fields`, all of which are there."""
    first = own_fields["extra_body"].get("force_listen_count")
    return DuplexConfig(
        own_fields["overlap_policy"],
        int(own_fields["overlap_short_ack_ms"]),
        int(own_fields["overlap_barge_in_ms"]),
        acks_only=own_fields["playback_commit_policy"] == "ack_only",
        listen_only_units=None if first is None else int(first),
        temperature=own_fields["temperature"],
        voice_reference=own_fields["ref_audio"] or b"",
    )


def conversation_update(session: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The fields of an update that a conversation has too, by their GA names and unchecked.

    Three objects: the session's own fields, those of its input, and voice and speed of its output.
    """
    fields: dict[str, Any] = {
        k: session[k] for k in ("instructions", "tools", "tool_choice", "truncation") if k in session
    }
    modalities = session.get("modalities", session.get("output_modalities"))
    if modalities is not None:
        fields["output_modalities"] = (
            ["audio"] if "audio" in typed(modalities, list, "session.modalities") else ["text"]
        )
    for key in ("max_response_output_tokens", "max_output_tokens"):
        if key in session:
            fields["max_output_tokens"] = session[key]
    given_in, given_out = _audio_side(session, "input"), _audio_side(session, "output")
    given: dict[str, Any] = {
        k: given_in[k] for k in ("transcription", "noise_reduction", "turn_detection") if k in given_in
    }
    for key, name in (("input_audio_transcription", "transcription"), ("turn_detection", "turn_detection")):
        if key in session:
            given[name] = session[key]
    output: dict[str, Any] = {k: given_out[k] for k in ("voice", "speed") if k in given_out}
    output |= {k: session[k] for k in ("voice", "speed") if session.get(k) is not None}
    return fields, given, output


def input_format(session: dict[str, Any], before: AudioFormat) -> AudioFormat:
    """The format that the client sends, by any of the names it may have in an update; `before` where it is missing."""
    given = _audio_side(session, "input")
    kind = session.get("input_audio_format", given.get("format"))
    rate = session.get("sample_rate_hz", given.get("sample_rate_hz"))
    return read_audio_format(kind, rate, before, _INPUT_FORMATS, "session.input_audio_format")


def output_format(session: dict[str, Any], before: AudioFormat) -> AudioFormat:
    """The format that the client is sent; `before` where an update has none."""
    given = _audio_side(session, "output")
    kind = session.get("output_audio_format", given.get("format"))
    return read_audio_format(kind, given.get("sample_rate_hz"), before, _OUTPUT_FORMATS, "session.output_audio_format")


def read_audio_format(
    kind: Any, rate: Any, before: AudioFormat, allowed: tuple[str, ...] = _INPUT_FORMATS, param: str = "format"
) -> AudioFormat:
    """Read a format, which is a name or an object with `type` and `rate`. What is missing is as `before`.

    G.711 without a rate is at 8,000 Hz. Raises RemoteProtocolError (`unsupported_audio_format`).
    """
    if isinstance(kind, dict):
        kind, rate = kind.get("type"), kind.get("rate", rate)
    name = before["type"] if kind is None else kind
    if isinstance(name, str):
        name = _FORMAT_ALIASES.get(name, name)
    if name not in allowed:
        raise RemoteProtocolError(
            "unsupported_audio_format",
            f"Sound of the format '{name}' is not supported: {', '.join(allowed)} are.",
            param,
        )
    hz = before["rate"] if rate is None else rate
    if name != before["type"] and rate is None and name.startswith("g711"):
        hz = 8000
    if not isinstance(hz, int) or isinstance(hz, bool) or not MIN_RATE_HZ <= hz <= MAX_RATE_HZ:
        raise RemoteProtocolError(
            "unsupported_audio_format",
            f"A sample rate of {hz} is not supported: {MIN_RATE_HZ} to {MAX_RATE_HZ} are.",
            param,
        )
    return {"type": name, "rate": hz}


def video_frames(value: Any) -> tuple[bytes, ...]:
    """The images in a `video_frames`: at most two, in base64 or `data:` URIs. They stay encoded.

    Raises RemoteProtocolError (`invalid_video_frames`) for more, and for what does not begin as JPEG or PNG does.
    """
    if not isinstance(value, list) or len(value) > MAX_VIDEO_FRAMES:
        raise RemoteProtocolError(
            "invalid_video_frames", f"At most {MAX_VIDEO_FRAMES} images in base64.", "video_frames"
        )
    frames = []
    for text in value:
        try:
            header, body = split_data_uri(text)
            data = decode_base64(body) if not header or header.endswith(";base64") else b""
        except (AttributeError, ValueError):
            data = b""
        if not data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
            raise RemoteProtocolError(
                "invalid_video_frames", "A frame is a JPEG or PNG image in base64.", "video_frames"
            )
        frames.append(data)
    return tuple(frames)


def _audio_side(session: dict[str, Any], side: str) -> dict[str, Any]:
    """`audio.input` or `audio.output` of an update; empty where it is missing."""
    audio = typed(session.get("audio") or {}, dict, "session.audio")
    found: dict[str, Any] = typed(audio.get(side) or {}, dict, f"session.audio.{side}")
    return found
