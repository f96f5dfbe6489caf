"""Commands and events of video sessions. Commands add frames, audio and questions; events have the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm

FrameFilterName = Literal["evs", "blocks"]


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    """Sampling parameters for the text of an answer. None selects the model's default."""

    # Maximum number of tokens in the answer; None for the limit of the context.
    max_tokens: int | None = None
    # Sampling temperature; 0 always takes the most likely token.
    temperature: float | None = None
    # Top-p sampling: the total probability of the tokens to sample from, in [0, 1].
    top_p: float | None = None
    # Number of most likely tokens to sample from; 0: all.
    top_k: int | None = None
    # Repetition penalty. Above 1, tokens that already occurred become less likely.
    repetition_penalty: float | None = None
    # Random seed; None for an arbitrary seed.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """The configuration of one video session."""

    # Whether answers are spoken. At least one of `audio_output` and `text_output` is True.
    audio_output: bool = True
    # Whether answers are sent as text.
    text_output: bool = True
    # Maximum number of frames that the model gets with a question.
    num_frames: int = 4
    # Maximum number of frames to keep. At the limit, a new frame replaces the oldest.
    max_frames: int = 50
    # Instructions for the model, at the beginning of its prompt.
    instructions: str = ""
    # The filter that selects the frames to keep; None to keep all.
    filter: FrameFilterName | None = "evs"
    # Similarity to the last kept frame from which the filter drops a frame, in [0, 1].
    threshold: float = 0.95
    # Whether received audio becomes part of the next question.
    uses_audio: bool = True
    # Voice of spoken answers; None for the default.
    voice: str | None = None
    # Maximum age of frames and notes, in seconds. Older ones are forgotten. None to forget nothing.
    max_memory_s: float | None = None
    # Sampling parameters for the text of answers.
    sampling: AnswerSampling = AnswerSampling()


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """The client's description of a frame, which events about the frame return. All times are in milliseconds. Times
    that the client did not send are None.
    """

    # Time at which the frame was received, on the server's clock.
    received_ms: float
    # The client's id for the frame.
    id: str | None = None
    # Presentation time, on the client's clock.
    pts_ms: float | None = None
    # Presentation time in the source, on the client's clock.
    source_pts_ms: float | None = None
    # Capture time, on the client's clock.
    capture_ts_ms: float | None = None
    # The client's name for the quality of the frame.
    quality_profile: str | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AppendFrame:
    """Add a frame. `image` is the encoded image as it was received. `info` is the client's description of it.

    `is_known`: the client has received the result of this frame from another host, so that it is not reported again.
    """

    image: bytes
    info: FrameInfo
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class AppendVideoAudio:
    """Add audio of the video: float32 [num_samples], mono, 16 kHz. It is kept for the next question."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class AskQuestion:
    """Ask a question about the frames and audio so far. A question interrupts the answer in progress."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishVideo:
    """End the session's input. The answer in progress is completed, and then VideoEnded is reported."""


VideoCommand = AppendFrame | AppendVideoAudio | AskQuestion | FinishVideo

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame was received.

    - `info`: the client's description of it.
    - `accepted`: whether the frame is kept. If not, `reason` says why.
    - `buffered`: the number of frames that are kept now.
    - `dropped`: the description of the frame that this frame replaced, or None.
    """

    info: FrameInfo
    accepted: bool
    buffered: int
    reason: str | None = None
    dropped: FrameInfo | None = None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The model begins an answer, based on these frames (oldest first). `request_id` identifies the answer."""

    request_id: str
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class AnswerTextDelta:
    """Further text of the answer. The joined deltas are the text in AnswerDone."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerAudioDelta:
    """Further audio of the answer: float32 [num_samples], mono, at `rate_hz`."""

    pcm: Pcm
    rate_hz: int


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete.

    - `text`: the whole text of the answer.
    - `spoken`: whether the answer was spoken, so that audio was reported.
    - `token_counts`: prompt_tokens, cached_tokens and completion_tokens, if the model knows them.
    - `question`: the text of the question.
    """

    text: str
    spoken: bool
    token_counts: dict[str, int] = field(default_factory=dict)
    question: str = ""


@dataclass(frozen=True, slots=True)
class VideoFailed:
    """An error occurred. The session continues.

    - `message`: the error message that clients of this protocol look for.
    - `detail`: the specific cause.
    - `ends_answer`: whether the error ended the answer in progress.
    - `partial_text`: the text of that answer so far.
    - `refuses`: the kind of command that was refused, if it was one. A refused question gets no answer.
    """

    message: str
    detail: str = ""
    ends_answer: bool = False
    partial_text: str = ""
    refuses: Literal["frame", "audio", "question"] | None = None


@dataclass(frozen=True, slots=True)
class VideoEnded:
    """All questions were answered after FinishVideo. No event follows."""


VideoEvent = FrameReceived | AnswerStarted | AnswerTextDelta | AnswerAudioDelta | AnswerDone | VideoFailed | VideoEnded
