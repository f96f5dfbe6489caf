"""What answers questions about what is seen: models that see pictures, or that are told what can be read on them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from antiphon.audio import Pcm
from antiphon.contracts.conversation import ResponseChunk
from antiphon.contracts.language import ReplyOptions
from antiphon.contracts.speech import VoiceOptions
from antiphon.vision.images import EncodedImage


@dataclass(frozen=True, slots=True)
class VideoProfile:
    """Facts of a watcher. `sees`: pictures, or only the text on them and plain facts (brightness, colours, motion). `sample_rate_hz` of its voice;
    `voices`: the first is the default; empty: it does not speak."""

    id: str
    sees: Literal["pictures", "text"]
    sample_rate_hz: int
    voices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """A frame that was kept: `number` counts them, `at_s` on the session's clock, `image` encoded."""

    number: int
    at_s: float
    image: EncodedImage


@dataclass(frozen=True, slots=True)
class VideoQuestion:
    """`frames`: those it is to be answered from, by number. `pcm`: what was heard since the last question, float32 [num_samples], 16 kHz."""

    text: str
    at_s: float
    frames: tuple[int, ...]
    pcm: Pcm | None = None


class VideoStream(Protocol):
    """One session with a watcher."""

    async def run(self) -> None:
        """Its own work, beside the session's, until it is cancelled."""
        ...

    async def append_frame(self, frame: VideoFrame) -> None:
        """A frame was kept. Does not wait for what takes long. Raises MediaError where it is no image, or is cut off."""
        ...

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """A question asked now would be answered from these, by number. Does not wait."""
        ...

    def drop_frame(self, frame: int) -> None:
        """That frame, by number, is asked about no more. What was answered from it stays said."""
        ...

    async def settled(self) -> None:
        """Wait until all that was seen is known."""
        ...

    def forget(self, before_s: float) -> None:
        """What was seen before is to be known no more."""
        ...

    def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """As Talk.respond. Closing the generator ends it within a step. Raises Refused, ModelError, RemoteProtocolError."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class VideoModel(Protocol):
    """Whoever watches, shared by all sessions."""

    @property
    def profile(self) -> VideoProfile: ...

    async def open(self, instructions: str) -> VideoStream:
        """A new session. Raises Refused where there is no room."""
        ...

    def close(self) -> None:
        """Stop its workers."""
        ...
