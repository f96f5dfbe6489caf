"""Events of playback, for responses that the server plays or whose playback it controls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaybackStarted:
    """The server began to play a response; its first audio is heard now."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackStopped:
    """The server has played all of the response's audio."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackCleared:
    """The server stopped playing the response before its end, and dropped the rest of its audio."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackHoldChanged:
    """Somebody speaks over a response, and it is undecided whether that takes the floor.

    Playback pauses (`held`), or continues at the same sample after the speech did not take the floor. If it did take
    the floor, SpeechStarted follows.
    """

    held: bool
