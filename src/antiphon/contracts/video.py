"""The contract of video models, which answer questions about frames: models that see pictures, or that are told what
can be read on them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol

from antiphon.audio import Pcm
from antiphon.contracts.conversation import ResponseChunk
from antiphon.contracts.language import ReplyOptions
from antiphon.contracts.speech import VoiceOptions
from antiphon.vision.images import EncodedImage


@dataclass(frozen=True, slots=True)
class VideoProfile:
    """Facts of a video model.

    - `id`: its name for clients.
    - `sees`: pictures, or only the text on them and plain facts (brightness, colours, motion).
    - `sample_rate_hz`: of its voice.
    - `voices`: by name, the first is the default; empty: it does not speak.
    """

    id: str
    sees: Literal["pictures", "text"]
    sample_rate_hz: int
    voices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """A frame that was kept. `number` counts the session's kept frames, `at_s` is its time on the session's clock in
    seconds.
    """

    number: int
    at_s: float
    image: EncodedImage


@dataclass(frozen=True, slots=True)
class VideoQuestion:
    """A question about what was seen, asked at `at_s` on the session's clock.

    - `frames`: the numbers of the frames that it is to be answered from, in order.
    - `pcm`: what was heard since the last question, float32 [num_samples], mono, 16 kHz; None: nothing.
    - `pcm_at_s`: when that began, on the session's clock.
    """

    text: str
    at_s: float
    frames: tuple[int, ...]
    pcm: Pcm | None = None
    pcm_at_s: float = 0.0


class VideoStream(Protocol):
    """One session with a video model. One answer at a time; `run` has to run beside it."""

    async def run(self) -> None:
        """Do the stream's own work beside the session, such as reading frames, until it is cancelled."""
        ...

    async def append_frame(self, frame: VideoFrame) -> None:
        """Add a frame that was kept. Does not wait for work that takes long, which `run` does. Raises MediaError where
        it is no image, or is cut off.
        """
        ...

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Note more of what is heard, for models that take it in before a question: float32 [num_samples], mono, 16
        kHz, from `at_s` on. The next question comes with all of it. Sound that does not begin where the last ended
        begins anew. Does not wait.
        """
        ...

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Note the numbers of the frames that a question asked now would be answered from, so that they can be computed
        before. Does not wait.
        """
        ...

    def drop_frame(self, frame: int) -> None:
        """Note that no question will be about this frame any more, by its number. What was answered from it stays in
        the history.
        """
        ...

    async def settled(self) -> None:
        """Wait until everything about the frames so far is known, such as the text on them. For callers without a live
        camera.
        """
        ...

    def forget(self, before_s: float) -> None:
        """Forget everything that was seen before `before_s` on the session's clock."""
        ...

    def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer a question, as ConversationStream.respond does: TextDelta and ResponseAudio as they are generated,
        ReplyDone last. Closing the generator ends the answer within one step. Raises Refused, ModelError,
        RemoteProtocolError.
        """
        ...

    def close(self) -> None:
        """End the session and give back what it holds. Does not wait."""
        ...


class VideoModel(Protocol):
    """A video model, shared by all sessions."""

    @property
    def profile(self) -> VideoProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, instructions: str, owner: Hashable | None = None) -> VideoStream:
        """Open a session with `instructions`, which are what the model is told first. It may share KV with those of an
        equal `owner`; None: with no other. Raises Refused where there is no room.
        """
        ...

    def close(self) -> None:
        """Stop the model's workers, when the process ends. Streams must not be used afterwards."""
        ...
