"""The contract of native models, which hear and speak unit by unit and decide by themselves when to speak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.events.duplex import NativeSampling


@dataclass(frozen=True, slots=True)
class NativeProfile:
    """Facts of a native model, which do not change while it is loaded."""

    # The model's name for clients.
    id: str
    # Seconds of audio in a unit, which is also the time limit of a step.
    unit_s: float
    # Sample rate of its voice, in Hz; 0: it has no voice and answers with text only.
    sample_rate_hz: int
    # Names of its voices, the default first.
    voices: tuple[str, ...]
    # The most images in a unit.
    max_frames: int
    # The most slices of a large image. Each slice adds detail and cost.
    max_slices: int
    # The number of context rows at which the oldest units are dropped, and the number of rows that remain after that.
    window: tuple[int, int]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """Options of one conversation. None uses the model's own default."""

    # The text that the model gets first.
    instructions: str = ""
    # One of the profile's voices.
    voice: str | None = None
    # The voice to speak with, float32 [num_samples], mono, 16 kHz.
    voice_reference: Pcm | None = None
    # The number of units at the start in which the model only listens.
    listen_only_units: int | None = None
    # How the model chooses its words and its voice.
    sampling: NativeSampling = field(default_factory=NativeSampling)
    # Returns what was said and heard so far, a line for each message. A model on other servers needs it when another
    # server takes over.
    recall: Callable[[], str] = field(default=lambda: "", compare=False)


@dataclass(frozen=True, slots=True)
class Unit:
    """The user's input in one unit of time.

    - `pcm`: float32 [unit_s * 16000], mono, 16 kHz.
    - `frames`: encoded images, the oldest first.
    - `max_slices`: the most slices of each image.
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
    """The model says `text` in this unit. `pcm` is the audio of the text: float32 [num_samples], mono, at the profile's
    rate. `end_of_turn` is true if the model has finished its turn.
    """

    text: str
    pcm: Pcm
    end_of_turn: bool


@dataclass(frozen=True, slots=True)
class AwayStep:
    """The model cannot be reached: this unit is lost. The stream of the conversation model that has this native model
    answers the user's turns until a step is another one.
    """


NativeStep = ListenStep | SpeakStep | AwayStep


@dataclass(frozen=True, slots=True)
class NativeLoad:
    """How many conversations are open, and how many more there is room for now."""

    conversations: int
    room: int


class NativeStream(Protocol):
    """One conversation over one long-lived KV. `append` and `step` alternate and are never called at the same time."""

    async def append(self, unit: Unit) -> None:
        """Add the next unit, and wait until it is computed.

        Raises:
            MediaError: A frame is not an image.
            ModelError: The model failed.
            EngineError: The engine failed.
        """
        ...

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        """Decide and generate what the model does in the last appended unit.

        Takes up to `unit_s`. If it takes longer, the conversation falls behind.

        Args:
            must_speak: True: the model says at least one word, unless it was interrupted.

        Raises:
            ModelError: The model failed.
            EngineError: The engine failed.
        """
        ...

    def interrupt(self) -> None:
        """Give the floor to the user: the model stops what it is saying, and listens in its next step.

        Returns at once. May be called at any time, also during `append` and `step`.
        """
        ...

    def close(self) -> None:
        """End the conversation and free its KV. Does not wait."""
        ...


class NativeModel(Protocol):
    """One loaded native model, shared by all sessions."""

    @property
    def profile(self) -> NativeProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, options: NativeOptions) -> NativeStream:
        """Open a conversation, and compute what precedes its first unit, such as the instructions.

        Args:
            options: The options of the conversation.

        Raises:
            Refused: There is no room for its KV.
            ModelError: The model failed.
        """
        ...

    def load(self) -> NativeLoad:
        """Return how full the model is. Does not wait. Conversations that `open` is opening may not be counted yet."""
        ...

    def close(self) -> None:
        """Stop the model's workers when the process ends. Conversations must not be used afterwards."""
        ...
