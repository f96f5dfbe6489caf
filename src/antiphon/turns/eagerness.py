"""How long `semantic_vad` waits for a turn that does not sound finished, by the eagerness that a client asks for."""

from __future__ import annotations

from antiphon.events.transcription import ServerVad

# How long a pause may be where the turn does not sound finished, in milliseconds. Another eagerness is an error.
EAGERNESS_MS = {"low": 8000, "auto": 4000, "medium": 4000, "high": 2000}
# How long it has to be where the turn does.
COMPLETE_MS = 300


def semantic_vad(eagerness: str = "medium") -> ServerVad:
    """The endpointing of `semantic_vad` with a client's eagerness, which is a key of EAGERNESS_MS, at the default
    threshold and padding. A complete turn ends after COMPLETE_MS. Raises KeyError for another eagerness."""
    return ServerVad(silence_duration_ms=COMPLETE_MS, patience_ms=EAGERNESS_MS[eagerness])
