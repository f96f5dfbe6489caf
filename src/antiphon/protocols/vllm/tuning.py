"""The tuning of a session in vLLM's dialect: how its fields are read, and what a client is told of them."""

from __future__ import annotations

from dataclasses import replace

from antiphon.contracts import TranscriberProfile, TuningCaps, tuned
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import StreamTuning
from antiphon.protocols.fields import number
from antiphon.protocols.vllm.messages import VllmUpdate

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
