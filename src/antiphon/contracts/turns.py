"""The contracts of the models that find turns: voice activity detectors, turn detectors and backchannel detectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

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


# Gets a first judgement, which a better one will replace.
LearnEarly = Callable[[float], object]


class TurnStream(Protocol):
    """A turn detector's side of one session. It keeps the model's state, so it computes each sample of a turn once."""

    async def follow(self, start: int, pcm: Pcm) -> None:
        """Compute the turn as far as it was heard, so that less is left for `complete`.

        Raises what `complete` raises.
        """
        ...

    async def complete(self, start: int, pcm: Pcm, early: LearnEarly | None = None) -> float:
        """Return the probability, in [0, 1], that the speaker who paused has finished.

        Args:
            start: The session's sample at which the turn begins. A different value begins another turn.
            pcm: float32 [num_samples], 16 kHz: the turn with the pause, from its beginning.
            early: Called with a first judgement if a part of the model is late. The result takes its place.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...


@runtime_checkable
class StreamingTurnDetector(TurnDetector, Protocol):
    """A turn detector that keeps state between the pauses of a session."""

    def open(self) -> TurnStream:
        """Open the stream of a new session. It needs no closing."""
        ...


@runtime_checkable
class TurnReader(Protocol):
    """A TurnStream that may also judge by words."""

    @property
    def reads(self) -> bool:
        """Whether a part of the detector judges by words."""
        ...

    async def read(self, words: str) -> float | None:
        """Return the probability, in [0, 1], that the speaker who paused has finished, once the turn's words are known.

        None if the words say nothing. Raises nothing.
        """
        ...


@runtime_checkable
class WordsTurnDetector(Protocol):
    """One loaded turn detector that judges by the words of a turn, not by its sound."""

    async def finished(self, words: str) -> float | None:
        """Return the probability, in [0, 1], that the speaker has finished after these words; None without words.

        Waits in the model's lane.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class OverlapSound:
    """How speech over a response sounds: probabilities in [0, 1] that it is a backchannel, and that it takes the floor.

    The rest of the probability is for sounds that are not speech.
    """

    backchannel: float
    floor: float


# The features of the response in one frame, see `turns/response_sound.py`.
RESPONSE_FEATURES = 8


class BackchannelStream(Protocol):
    """A backchannel detector's side of one overlap."""

    async def feed(self, pcm: Pcm, response: npt.NDArray[np.float32]) -> list[OverlapSound]:
        """Return how the speech sounds after each chunk that `pcm` completes, in order. Waits in the model's lane.

        Args:
            pcm: float32 [num_samples], 16 kHz: whole frames of the user's audio, after those of the last call.
            response: float32 [num_frames, RESPONSE_FEATURES]: the state of the response in each of these frames.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...


class BackchannelDetector(Protocol):
    """One loaded backchannel detector, shared by all sessions. It needs no words."""

    @property
    def id(self) -> str:
        """The name of the model, for the log and the metrics."""
        ...

    @property
    def frame_samples(self) -> int:
        """The number of samples of a frame at 16 kHz."""
        ...

    @property
    def threshold(self) -> float:
        """The probability, in (0, 1), from which a sound counts as a backchannel or as a claim to the floor."""
        ...

    def open(self) -> BackchannelStream:
        """Open the stream of a new overlap. It needs no closing."""
        ...
