"""The contract of native models, which hear and speak unit by unit and decide by themselves when to do which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.events.duplex import NativeSampling


@dataclass(frozen=True, slots=True)
class NativeProfile:
    """Facts of a native model.

    - `id`: its name for clients.
    - `unit_s`: seconds of audio in a unit, which is also the time that a step may take.
    - `sample_rate_hz`: of its voice; 0: it has none and says what it speaks as text.
    - `voices`: by name, the first is the default.
    - `max_frames`: the most images that a unit may show.
    - `max_slices`: the most parts that a large image may be cut into, at more detail and cost for each.
    - `window`: the rows of context at which the oldest units leave, and the rows that are left then.
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
    """How one conversation is held. None is as the model's makers have it.

    - `instructions`: what the model is told first.
    - `voice`: a name out of the profile.
    - `voice_reference`: the voice to speak with, float32 [num_samples], mono, 16 kHz.
    - `listen_only_units`: units at the start in which it only listens.
    - `sampling`: how it chooses its words and speaks them.
    """

    instructions: str = ""
    voice: str | None = None
    voice_reference: Pcm | None = None
    listen_only_units: int | None = None
    sampling: NativeSampling = field(default_factory=NativeSampling)


@dataclass(frozen=True, slots=True)
class Unit:
    """What the user's side gave in one unit of time.

    - `pcm`: float32 [unit_s * 16000], mono, 16 kHz.
    - `frames`: encoded images, the oldest first.
    - `max_slices`: the most parts that each image may be cut into.
    - `text`: what the user typed.
    """

    pcm: Pcm
    frames: tuple[bytes, ...] = ()
    max_slices: int = 1
    text: str = ""


@dataclass(frozen=True, slots=True)
class ListenStep:
    """The model listens in this unit and says nothing."""


@dataclass(frozen=True, slots=True)
class SpeakStep:
    """The model says `text` in this unit. pcm: its audio, float32 [num_samples], mono, at the profile's rate.
    `end_of_turn`: it has finished what it wanted to say.
    """

    text: str
    pcm: Pcm
    end_of_turn: bool


NativeStep = ListenStep | SpeakStep


class NativeStream(Protocol):
    """One conversation over one long-lived KV. `append` and `step` alternate and are never called at the same time."""

    async def append(self, unit: Unit) -> None:
        """Add the next unit. Waits until it is computed. Raises MediaError for a frame that is no image, ModelError,
        EngineError.
        """
        ...

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        """Decide and generate what the model does in the unit that was appended last. Takes up to `unit_s`, and the
        conversation falls behind where it takes longer. Raises ModelError, EngineError.

        With `must_speak` it says at least one word, unless it was interrupted.
        """
        ...

    def interrupt(self) -> None:
        """Let the user take the floor: what the model is saying is over, and in its next step it listens. Returns at
        once, and may be called at any time, also during `append` and `step`.
        """
        ...

    def close(self) -> None:
        """End the conversation and give back its KV. Does not wait."""
        ...


class NativeModel(Protocol):
    """One loaded native model, shared by all sessions."""

    @property
    def profile(self) -> NativeProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, options: NativeOptions) -> NativeStream:
        """Open a conversation, and compute what comes before its first unit, such as the instructions. Raises Refused
        where there is no room for its KV, ModelError.
        """
        ...

    def close(self) -> None:
        """Stop the model's workers, when the process ends. Conversations must not be used afterwards."""
        ...
