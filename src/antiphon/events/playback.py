"""Events about the playback of responses, if the server plays them itself or controls their playback."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaybackStarted:
    """The server began to play a response, whose first audio is heard now."""

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
    """Playback is paused or continued, because somebody speaks over a response and may take the floor.

    While it is undecided whether the speech takes the floor, playback pauses (`held`). If it does not, playback
    continues at the same sample. If it does, SpeechStarted follows.
    """

    held: bool
