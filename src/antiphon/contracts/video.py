"""The contract of video models, which answer questions about frames. They get the pictures, or only their text."""

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
    - `sample_rate_hz`: the sample rate of its voice.
    - `voices`: names of its voices, the default first; empty: it does not speak.
    """

    id: str
    sees: Literal["pictures", "text"]
    sample_rate_hz: int
    voices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """A frame that was kept, with its number among the session's kept frames and its time in seconds on the session's
    clock.
    """

    number: int
    at_s: float
    image: EncodedImage


@dataclass(frozen=True, slots=True)
class VideoQuestion:
    """A question about what was seen, asked at `at_s` on the session's clock.

    - `frames`: the numbers of the frames that the answer is based on, in order.
    - `pcm`: the audio since the last question, float32 [num_samples], mono, 16 kHz; None: there is none.
    - `pcm_at_s`: when that audio began, on the session's clock.
    """

    text: str
    at_s: float
    frames: tuple[int, ...]
    pcm: Pcm | None = None
    pcm_at_s: float = 0.0


class VideoStream(Protocol):
    """One session with a video model. It gives one answer at a time, and needs `run` to run as a task."""

    async def run(self) -> None:
        """Do the stream's background work, such as reading frames, until it is cancelled."""
        ...

    async def append_frame(self, frame: VideoFrame) -> None:
        """Add a frame that was kept. Slow work is left to `run`, so the call does not wait for it.

        Args:
            frame: The frame.

        Raises:
            MediaError: The frame is not an image, or is cut off.
        """
        ...

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Add audio, for models that process it before the question arrives. Does not wait.

        The next question also contains this audio.

        Args:
            pcm: float32 [num_samples], mono, 16 kHz.
            at_s: When it began, on the session's clock. Audio that does not begin where the last ended starts a new
                sound.
        """
        ...

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Announce the frames that a question asked now would use, so that they can be computed early. Does not wait.

        Args:
            frames: The numbers of the frames.
        """
        ...

    def drop_frame(self, frame: int) -> None:
        """Announce that no later question will use this frame. Answers based on it stay in the history.

        Args:
            frame: The number of the frame.
        """
        ...

    async def settled(self) -> None:
        """Wait until all frames so far are processed, for example until their text has been read. For callers without a
        live camera.
        """
        ...

    def forget(self, before_s: float) -> None:
        """Forget everything that was seen before `before_s` on the session's clock."""
        ...

    def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer a question, in the same way as `ConversationStream.respond`.

        Closing the generator ends the answer within one step.

        Args:
            question: The question, with its frames and audio.
            options: How to generate the text.
            voice: How to speak; None: the answer is text only.

        Returns:
            TextDelta and ResponseAudio as they are generated; ReplyDone is the last chunk.

        Raises:
            Refused: The model has no room.
            ModelError: The model failed.
            RemoteProtocolError: The question asks for something that the model cannot do.
        """
        ...

    def close(self) -> None:
        """End the session and free its resources. Does not wait."""
        ...


class VideoModel(Protocol):
    """A video model, shared by all sessions."""

    @property
    def profile(self) -> VideoProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, instructions: str, owner: Hashable | None = None) -> VideoStream:
        """Open a session.

        Args:
            instructions: The text that the model gets first.
            owner: The owner of the session. Sessions whose owners are equal may share KV. None: this session shares KV
                with no other.

        Raises:
            Refused: There is no room for its KV.
        """
        ...

    def close(self) -> None:
        """Stop the model's workers when the process ends. Streams must not be used afterwards."""
        ...
