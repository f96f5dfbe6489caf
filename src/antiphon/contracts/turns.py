"""The contracts of what finds turns: voice activity detectors and turn detectors."""

from __future__ import annotations

from typing import Protocol

from antiphon.audio import Pcm


class VadStream(Protocol):
    """Voice activity detection of one session, in frames of `VoiceActivityDetector.frame_samples`."""

    async def feed(self, pcm: Pcm) -> list[float]:
        """Return the speech probabilities, in [0, 1], of the frames that `pcm` completes, in order; samples that fill
        no frame wait for the next call. pcm: float32 [num_samples], mono, 16 kHz. Waits in the model's lane.
        """
        ...

    def reset(self) -> None:
        """Forget all audio so far, as for a new stream, because what follows has nothing to do with it."""
        ...


class VoiceActivityDetector(Protocol):
    """One loaded voice activity detector, shared by all sessions."""

    @property
    def frame_samples(self) -> int:
        """The number of samples of a frame at 16 kHz, for each of which there is one probability."""
        ...

    def open(self) -> VadStream:
        """Open the stream of a new session. It holds the model's state between frames, and nothing has to be closed."""
        ...


class TurnDetector(Protocol):
    """One loaded turn detector, which judges whether a turn is complete, shared by all sessions."""

    async def complete(self, pcm: Pcm) -> float:
        """The probability, in [0, 1], that the speaker who has paused has finished.

        pcm: float32 [num_samples], 16 kHz: the turn with the pause; its last seconds count. Waits in the model's lane.
        Raises Refused, ModelError.
        """
        ...
