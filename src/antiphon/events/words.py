"""A spoken word and its place in the sound."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One word with its place in the session's audio, in seconds, and the model's probability in [0, 1]."""

    text: str
    start_s: float
    end_s: float
    probability: float
