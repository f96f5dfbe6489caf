"""Commands and events of video sessions: frames, audio and questions in, answers out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm

FrameFilterName = Literal["evs", "blocks"]


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    """How the text of an answer is sampled. None uses the model's own setting."""

    # The most tokens of the answer; None: as many as the context allows.
    max_tokens: int | None = None
    # 0 samples the likeliest token.
    temperature: float | None = None
    # The share of probability that may be sampled, from 0 to 1.
    top_p: float | None = None
    # Number of most likely tokens to sample from; 0: all.
    top_k: int | None = None
    # Above 1, tokens that already occurred are less likely.
    repetition_penalty: float | None = None
    # Seed of the random numbers; None: a random seed.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """The configuration of one video session."""

    # Answers are spoken. At least one of `audio_output` and `text_output` is True.
    audio_output: bool = True
    # Answers are sent as text.
    text_output: bool = True
    # The most frames that an answer is based on.
    num_frames: int = 4
    # The most frames that are kept. A new one replaces the oldest.
    max_frames: int = 50
    # The text that the model is given first.
    instructions: str = ""
    # The filter that selects the frames to keep; None: all are kept.
    filter: FrameFilterName | None = "evs"
    # The filter drops a frame whose similarity to the last kept frame reaches this value, from 0 to 1.
    threshold: float = 0.95
    # Received audio becomes part of the next question.
    uses_audio: bool = True
    # The voice of spoken answers; None: the default.
    voice: str | None = None
    # What was seen longer ago is forgotten; None: nothing is forgotten.
    max_memory_s: float | None = None
    # How the text of answers is sampled.
    sampling: AnswerSampling = AnswerSampling()


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """The client's description of a frame, returned in events about it. All times are in milliseconds. The client's
    times are None if it sent none.
    """

    # When the frame was received, by the server's clock.
    received_ms: float
    # The client's id of the frame.
    id: str | None = None
    # Presentation time, by the client's clock.
    pts_ms: float | None = None
    # Presentation time in the source, by the client's clock.
    source_pts_ms: float | None = None
    # Capture time, by the client's clock.
    capture_ts_ms: float | None = None
    # The client's name for the quality of the frame.
    quality_profile: str | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AppendFrame:
    """Add a frame. `image` is the encoded image as received, `info` the client's description of it."""

    image: bytes
    info: FrameInfo


@dataclass(frozen=True, slots=True)
class AppendVideoAudio:
    """Add audio of the video: float32 [num_samples], mono, 16 kHz. It is kept for the next question."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class AskQuestion:
    """Ask about what was seen and heard. A question interrupts the answer in progress."""

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
    - `accepted`: it is kept; otherwise `reason` says why not.
    - `buffered`: the number of frames that are kept now.
    - `dropped`: the description of the frame that this one replaced; None if it replaced none.
    """

    info: FrameInfo
    accepted: bool
    buffered: int
    reason: str | None = None
    dropped: FrameInfo | None = None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The model begins to answer from these frames, the oldest first. `request_id` identifies the answer."""

    request_id: str
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class AnswerTextDelta:
    """More of the answer's text. The joined deltas are the text of its AnswerDone."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerAudioDelta:
    """More of the answer's audio: float32 [num_samples], mono, at `rate_hz`."""

    pcm: Pcm
    rate_hz: int


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete.

    - `text`: all of its text.
    - `spoken`: it was spoken, so audio was reported.
    - `token_counts`: prompt_tokens, cached_tokens and completion_tokens, if the model knows them.
    """

    text: str
    spoken: bool
    token_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VideoFailed:
    """Something failed; the session continues.

    - `message`: the error in the words that clients of this protocol match on.
    - `detail`: the particular cause.
    - `ends_answer`: the failure ended the answer in progress.
    - `partial_text`: the text of that answer so far.
    """

    message: str
    detail: str = ""
    ends_answer: bool = False
    partial_text: str = ""


@dataclass(frozen=True, slots=True)
class VideoEnded:
    """All questions were answered after FinishVideo. No event follows."""


VideoEvent = FrameReceived | AnswerStarted | AnswerTextDelta | AnswerAudioDelta | AnswerDone | VideoFailed | VideoEnded
