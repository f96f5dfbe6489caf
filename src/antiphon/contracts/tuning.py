"""What becomes of a session's tuning: the profile that the session follows, within what the model can do. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from antiphon.contracts.transcription import TranscriberProfile, TuningLimits
from antiphon.events.transcription import StreamTuning


@dataclass(frozen=True, slots=True)
class TuningCaps:
    """The most that a client of this server may ask for, whatever the model: seconds of audio, and tokens."""

    max_audio_s: float = 300.0
    max_prefix_tokens: int = 1024
    max_tokens: int = 4096


def tuned(profile: TranscriberProfile, tuning: StreamTuning) -> TranscriberProfile:
    """Return the profile with the session's own values in place of the model's defaults, cut to the model's limits.

    A window that may be longer than the model's default is also called long later, in proportion.
    """
    limits = profile.limits or TuningLimits(profile.max_window_s, profile.max_prefix_tokens, profile.max_tokens)
    changes: dict[str, float | int] = {}
    if tuning.segment_duration_s is not None:
        changes |= {"step_s": tuning.segment_duration_s, "first_step_s": tuning.segment_duration_s}
    if tuning.rollback_tokens is not None:
        changes["rollback_tokens"] = tuning.rollback_tokens
    if tuning.unfixed_chunks is not None:
        changes["unfixed_chunks"] = tuning.unfixed_chunks
    if tuning.max_audio_s is not None:
        longest = min(limits.max_audio_s, tuning.max_audio_s)
        in_proportion = profile.long_window_s * max(1.0, longest / profile.max_window_s)
        changes |= {"max_window_s": longest, "long_window_s": min(in_proportion, longest)}
    if tuning.max_prefix_tokens is not None:
        changes["max_prefix_tokens"] = min(limits.max_prefix_tokens, tuning.max_prefix_tokens)
    if tuning.max_tokens is not None:
        changes["max_tokens"] = min(limits.max_tokens, tuning.max_tokens)
    if tuning.keep_context:
        prefix_tokens = tuning.max_prefix_tokens or limits.context_tokens
        changes["context_tokens"] = min(limits.context_tokens, prefix_tokens)
        changes["context_pause_s"] = math.inf if limits.context_audio else 0.0
    elif tuning.keep_context is False:
        changes |= {"context_tokens": 0, "context_pause_s": 0.0}
    return replace(profile, **changes)  # type: ignore[arg-type]
