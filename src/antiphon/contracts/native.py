"""Models that hear and speak by themselves, unit by unit: they decide when to listen and when to speak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.audio import Pcm


@dataclass(frozen=True, slots=True)
class NativeProfile:
    """Facts of a model that converses in units.

    `unit_s`: seconds of sound a unit takes, and the time its step may take. `sample_rate_hz`: of its voice; 0: it has none, and says
    what it speaks as text. `voices`: the first is the default. `max_frames`: images a unit may show, `max_slices`: parts a large one may be
    cut into. `window`: rows of context at which the oldest units leave, and down to which.
    """

    id: str
    unit_s: float
    sample_rate_hz: int
    voices: tuple[str, ...]
    max_frames: int
    max_slices: int
    window: tuple[int, int]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How one conversation is held. None: as the model's makers have it. `reference`: float32 [num_samples], 16 kHz, the voice to speak with.

    `listens_first`: units at the start in which it only listens. `temperature` 0: the likeliest token.
    """

    instructions: str = ""
    voice: str | None = None
    voice_reference: Pcm | None = None
    listen_only_units: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """What happened in a unit of time. pcm: float32 [unit_s * 16000], mono, 16 kHz. `frames`: encoded images, the oldest first."""

    pcm: Pcm
    frames: tuple[bytes, ...] = ()
    max_slices: int = 1


@dataclass(frozen=True, slots=True)
class ListenStep:
    """In this unit it says nothing."""


@dataclass(frozen=True, slots=True)
class SpeakStep:
    """In this unit it says `text`, and this is its sound: float32 [num_samples] at the profile's rate. `end_of_turn`: it has finished."""

    text: str
    pcm: Pcm
    end_of_turn: bool


NativeStep = ListenStep | SpeakStep


class NativeStream(Protocol):
    """One conversation, over one long-lived KV. `append` and `step` alternate, and are not called beside each other."""

    async def append(self, unit: Unit) -> None:
        """The next unit. Raises MediaError for a frame that is no image, ModelError, EngineError."""
        ...

    async def step(self) -> NativeStep:
        """What it does in the unit that was appended last. Raises ModelError, EngineError."""
        ...

    def interrupt(self) -> None:
        """The user has taken the floor: what it is saying is over, and in its next step it listens. May come at any time."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class NativeModel(Protocol):
    """One loaded model, shared by all sessions."""

    @property
    def profile(self) -> NativeProfile: ...

    async def open(self, options: NativeOptions) -> NativeStream:
        """A new conversation. Raises Refused where there is no room for its KV, ModelError."""
        ...

    def close(self) -> None:
        """Stop its workers."""
        ...
