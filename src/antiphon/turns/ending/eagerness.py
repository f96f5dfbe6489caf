"""The endpointing of `semantic_vad`, by the eagerness that a client asks for."""

from __future__ import annotations

from antiphon.events.transcription import Eagerness, ServerVad
from antiphon.turns.ending.end_of_turn import MAX_SILENCE_MS


def semantic_vad(eagerness: Eagerness = "auto") -> ServerVad:
    """The endpointing of `semantic_vad` with a client's eagerness, at the default threshold and padding."""
    return ServerVad(silence_duration_ms=MAX_SILENCE_MS[eagerness], eagerness=eagerness)
