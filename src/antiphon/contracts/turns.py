"""The contracts of the models that find turns: voice activity detectors and turn detectors."""

from __future__ import annotations

from typing import Protocol

from antiphon.audio import Pcm


class VadStream(Protocol):
    """Voice activity detection of one session, in frames of `VoiceActivityDetector.frame_samples`."""

    async def feed(self, pcm: Pcm) -> list[float]:
        """Return the speech probabilities, in [0, 1], of the frames that `pcm` completes, in order.

        Samples that do not fill a frame wait for the next call. Waits in the model's lane.

        Args:
            pcm: float32 [num_samples], mono, 16 kHz.
        """
        ...

    def reset(self) -> None:
        """Forget all audio so far, as for a new stream, because the next audio is unrelated to it."""
        ...


class VoiceActivityDetector(Protocol):
    """One loaded voice activity detector, shared by all sessions."""

    @property
    def frame_samples(self) -> int:
        """The number of samples of a frame at 16 kHz. Each frame has one probability."""
        ...

    def open(self) -> VadStream:
        """Open the stream of a new session. It holds the model's state between frames, and needs no closing."""
        ...


class TurnDetector(Protocol):
    """One loaded turn detector, shared by all sessions. It judges whether a turn is complete."""

    async def complete(self, pcm: Pcm) -> float:
        """Return the probability, in [0, 1], that the speaker who paused has finished.

        Waits in the model's lane.

        Args:
            pcm: float32 [num_samples], 16 kHz: the turn with the pause. The detector uses its last seconds.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...
