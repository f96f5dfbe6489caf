"""What finds turns: speech detectors and turn detectors."""

from __future__ import annotations

from typing import Protocol

from antiphon.audio import Pcm


class VadStream(Protocol):
    """One session's speech detection. Frames are `FRAME_SAMPLES` long."""

    async def feed(self, pcm: Pcm) -> list[float]:
        """Probabilities of speech, in [0, 1], of the frames that `pcm` completes. Waits in the model's lane."""
        ...

    def reset(self) -> None:
        """Forget everything heard."""
        ...


class VoiceActivityDetector(Protocol):
    """One loaded voice-activity model, shared by all sessions."""

    @property
    def frame_samples(self) -> int: ...

    def open(self) -> VadStream: ...


class TurnDetector(Protocol):
    """One loaded model that says whether a turn is complete, shared by all sessions."""

    async def complete(self, pcm: Pcm) -> float:
        """The probability that who has paused has finished. pcm: float32 [num_samples], 16 kHz: the turn, pause included; its last
        seconds count. Raises Refused, ModelError."""
        ...
