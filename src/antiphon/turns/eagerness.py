"""How long `semantic_vad` waits before it ends a turn, by the eagerness that the client asked for."""

from __future__ import annotations

from antiphon.events.transcription import ServerVad

# How long a pause may be where the turn does not sound finished, in milliseconds. Another eagerness is an error.
EAGERNESS_MS = {"low": 8000, "auto": 4000, "medium": 4000, "high": 2000}
# How long it has to be where the turn does.
COMPLETE_MS = 300


def semantic_vad(eagerness: str = "medium") -> ServerVad:
    """The endpointing of `semantic_vad`, at the default threshold and padding. Raises KeyError for another eagerness."""
    return ServerVad(silence_duration_ms=COMPLETE_MS, patience_ms=EAGERNESS_MS[eagerness])
