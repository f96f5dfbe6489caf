"""The messages of vLLM's clients, and the tuning of a session that they contain: docs/wire/vllm-realtime.md."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from antiphon.contracts import TranscriberProfile, TuningCaps, tuned
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import StreamTuning
from antiphon.protocols.fields import LIMIT_CODES, Reader, Text, check_names, decode, number


class VllmUpdate(msgspec.Struct, tag_field="type", tag="session.update"):
    """Configures the session. The first update names a model. A missing or null field keeps its value."""

    # Name of the model. Any value other than a name counts as missing.
    model: object = None
    # Code of the language; null to detect the language.
    language: Text | msgspec.UnsetType | None = msgspec.UNSET
    # For a transcriber: names and words that the audio is likely to contain. For a conversation model: instructions.
    prompt: Text | msgspec.UnsetType | None = msgspec.UNSET
    # Voice of a conversation model's responses.
    voice: Text | msgspec.UnsetType | None = msgspec.UNSET
    # Whether to report the times of words.
    word_timestamps: bool | msgspec.UnsetType = msgspec.UNSET
    # Whether to report the labels of turns' voices.
    speaker_labels: bool | msgspec.UnsetType = msgspec.UNSET
    # The remembered speakers to recognize.
    known_speaker_names: list[Text] | msgspec.UnsetType | None = msgspec.UNSET
    # Duration of new audio before the next partial, in seconds. For a model that hears audio: duration of a segment.
    segment_duration_s: float | None = None
    # Number of tokens at the end of a hypothesis that are held back.
    rollback_tokens: float | None = None
    # Number of partials at the start of a window that neither send text nor force a prefix.
    unfixed_chunks: float | None = None
    # Maximum length of a window's forced prefix, in tokens.
    max_prefix_tokens: float | None = None
    # Maximum length of a window, in seconds.
    max_audio_s: float | None = None
    # Maximum number of new tokens in one partial, or in a response.
    realtime_max_tokens: float | None = None
    # Whether a window continues the text from before a pause.
    keep_context: bool | None = None


class VllmAppend(msgspec.Struct, tag_field="type", tag="input_audio_buffer.append"):
    """Appends audio. `audio`: base64 of PCM16, mono, 16 kHz."""

    audio: str


class VllmCommit(msgspec.Struct, tag_field="type", tag="input_audio_buffer.commit"):
    """Ends the turn if `final`. Otherwise it ends a segment of the turn, if the model hears audio."""

    final: bool = False


class VllmCancel(msgspec.Struct, tag_field="type", tag="response.cancel"):
    """Cuts off the response in progress."""


class _Kind(msgspec.Struct):
    type: object = None


VllmMessage = VllmUpdate | VllmAppend | VllmCommit | VllmCancel
_MESSAGE: Reader[VllmMessage] = Reader(VllmMessage)
MIN_AUDIO_S = 5.0
# For each tuning field in a session.update: the field of StreamTuning.
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
    """Decode one frame. Raises RemoteProtocolError with the dialect's own codes and messages."""
    try:
        message = _MESSAGE.read(data)
        if not isinstance(message, VllmUpdate):
            # Updates are not checked here: their answer reports unknown fields.
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
    """Return the `usage` of a transcript or a response, as in vLLM's `UsageInfo`. Its details are always null."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }


def read_tuning(update: VllmUpdate, previous: StreamTuning, caps: TuningCaps) -> StreamTuning:
    """Return the tuning after applying the changes in an update.

    Raises RemoteProtocolError (`invalid_event`) for a value out of range. The message states the range.
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
    """Whether an update has any tuning field."""
    return any(getattr(update, key) is not None for key in FIELDS)


def applied(profile: TranscriberProfile, tuning: StreamTuning) -> dict[str, float | bool]:
    """Return the tuning that is in effect, in the form that the client sees."""
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
