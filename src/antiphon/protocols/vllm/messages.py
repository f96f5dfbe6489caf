"""What clients of vLLM's dialect send: docs/wire/vllm-realtime.md."""

from __future__ import annotations

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import LIMIT_CODES, Reader, Text, check_names, decode


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
# The names of what may be wrong of a session; of audio it is one error, whatever is wrong.
_TUNED = (
    "segment_duration_s",
    "rollback_tokens",
    "unfixed_chunks",
    "max_prefix_tokens",
    "max_audio_s",
    "realtime_max_tokens",
    "keep_context",
)


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
        case param if param in _TUNED:
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
