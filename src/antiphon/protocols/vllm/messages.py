"""What clients of vLLM's dialect send, and the tuning of a session that is read of it: docs/wire/vllm-realtime.md."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from antiphon.contracts import TranscriberProfile, TuningCaps, tuned
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import StreamTuning
from antiphon.protocols.fields import LIMIT_CODES, Reader, Text, check_names, decode, number


class VllmUpdate(msgspec.Struct, tag_field="type", tag="session.update"):
    """The first names a model. Fields that are missing or null are as before; the last seven are
    the tuning (tuning.py).

    `model` is any value here: what is no name counts as missing.
    """

    model: object = None
    language: Text | msgspec.UnsetType | None = msgspec.UNSET
    prompt: Text | msgspec.UnsetType | None = msgspec.UNSET
    voice: Text | msgspec.UnsetType | None = msgspec.UNSET
    word_timestamps: bool | msgspec.UnsetType = msgspec.UNSET
    segment_duration_s: float | None = None
    rollback_tokens: float | None = None
    unfixed_chunks: float | None = None
    max_prefix_tokens: float | None = None
    max_audio_s: float | None = None
    realtime_max_tokens: float | None = None
    keep_context: bool | None = None


class VllmAppend(msgspec.Struct, tag_field="type", tag="input_audio_buffer.append"):
    """`audio`: base64 of PCM16, mono, 16 kHz."""

    audio: str


class VllmCommit(msgspec.Struct, tag_field="type", tag="input_audio_buffer.commit"):
    """With `final`, the turn ends here; without, a segment of it, where a model hears it."""

    final: bool = False


class VllmCancel(msgspec.Struct, tag_field="type", tag="response.cancel"):
    """The answer under way ends."""


class _Kind(msgspec.Struct):
    type: object = None


VllmMessage = VllmUpdate | VllmAppend | VllmCommit | VllmCancel
_MESSAGE: Reader[VllmMessage] = Reader(VllmMessage)
MIN_AUDIO_S = 5.0
# Field of a session.update -> field of StreamTuning.
FIELDS = {
    "segment_duration_s": "segment_duration_s",
    "rollback_tokens": "rollback_tokens",
    "unfixed_chunks": "unfixed_chunks",
    "max_prefix_tokens": "max_prefix_tokens",
    "max_audio_s": "max_audio_s",
    "realtime_max_tokens": "max_tokens",
    "keep_context": "keep_context",
}
SECONDS = {"segment_duration_s", "max_audio_s"}


def read_vllm(data: str | bytes) -> VllmMessage:
    """The message of one frame. Raises RemoteProtocolError in the dialect's own codes and words."""
    try:
        message = _MESSAGE.read(data)
        if not isinstance(message, VllmUpdate):
            # An update tells what it does not know in its answer.
            check_names(data, message)
        return message
    except RemoteProtocolError as error:
        raise _refusal(data, error) from None


def _refusal(data: str | bytes, error: RemoteProtocolError) -> RemoteProtocolError:
    if error.code in LIMIT_CODES:
        return error
    if error.code == "invalid_json":
        return RemoteProtocolError("invalid_json", "Invalid JSON")
    match error.param:
        case None:
            return RemoteProtocolError("invalid_event", "An event is a JSON object")
        case param if error.code == "unknown_parameter":
            return RemoteProtocolError("invalid_event", error.message)
        case "type":
            return RemoteProtocolError("unknown_event", f"Unknown event type: {decode(data, _Kind).type}")
        case "audio":
            return RemoteProtocolError("invalid_audio", "Invalid audio data")
        case param if param in FIELDS:
            return RemoteProtocolError("invalid_event", error.message)
        case param:
            return RemoteProtocolError("invalid_event", f"Invalid field: {param}")


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int | None]:
    """The `usage` of a transcript or an answer, with the fields of vLLM's `UsageInfo`; the details are never known."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }


def read_tuning(update: VllmUpdate, previous: StreamTuning, caps: TuningCaps) -> StreamTuning:
    """The tuning with the fields that an update has. Raises RemoteProtocolError, `invalid_event`, with the range of a
    field that is outside of it.
    """
    ranges = {
        "segment_duration_s": (0.1, 30.0),
        "rollback_tokens": (0, 64),
        "unfixed_chunks": (0, 64),
        "max_prefix_tokens": (1, caps.max_prefix_tokens),
        "max_audio_s": (MIN_AUDIO_S, caps.max_audio_s),
        "realtime_max_tokens": (1, caps.max_tokens),
    }
    changed: dict[str, float | bool] = {}
    for key, name in FIELDS.items():
        given = getattr(update, key)
        if given is None:
            continue
        if key in ranges:
            try:
                given = number(given, key, *ranges[key])
            except RemoteProtocolError as error:
                raise RemoteProtocolError("invalid_event", error.message) from None
            if key not in SECONDS:
                if given != int(given):
                    raise RemoteProtocolError("invalid_event", f"Invalid value for '{key}': expected a whole number.")
                given = int(given)
        changed[name] = given
    return replace(previous, **changed)  # type: ignore[arg-type]


def has_tuning(update: VllmUpdate) -> bool:
    """Whether an update has a field of the tuning."""
    return any(getattr(update, key) is not None for key in FIELDS)


def applied(profile: TranscriberProfile, tuning: StreamTuning) -> dict[str, float | bool]:
    """What a client is told of its tuning: the value of each field that its session follows."""
    followed = tuned(profile, tuning)
    return {
        "segment_duration_s": followed.step_s,
        "rollback_tokens": followed.rollback_tokens,
        "unfixed_chunks": followed.unfixed_chunks,
        "max_prefix_tokens": followed.max_prefix_tokens,
        "max_audio_s": followed.max_window_s,
        "realtime_max_tokens": followed.max_tokens,
        "keep_context": bool(followed.context_tokens),
    }
