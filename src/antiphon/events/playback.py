"""What is heard of the responses, where the server plays them or says when to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaybackStarted:
    """The server plays a response itself, and its first audio is heard now."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackStopped:
    """The server has played all of the response's audio."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackCleared:
    """The server stopped playing the response before its end; the rest of its audio is dropped."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackHoldChanged:
    """Somebody speaks over a response, and it is not known yet whether that takes the floor: what plays it pauses
    (`held`), or goes on from the very sample because it does not. Where it does, SpeechStarted says so.
    """

    held: bool
