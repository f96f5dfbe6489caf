"""Commands and events of video sessions: frames, audio and questions in, answers out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm

FrameFilterName = Literal["evs", "blocks"]


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    """How the text of an answer is sampled. None: as the model's own settings have it; a `temperature` of 0 takes the
    likeliest token, a `top_k` of 0 all of them. `max_tokens` None: as the context allows.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """The configuration of one video session.

    - `audio_output`, `text_output`: what answers are made of; at least one is True.
    - `num_frames`: the most frames that a question is answered from.
    - `max_frames`: the most frames that are kept; the oldest leaves for a new one.
    - `instructions`: what the model is told first.
    - `filter`: which frames are kept; None: all of them.
    - `threshold`: the likeness to the last kept frame at or above which the filter drops a frame, from 0 to 1.
    - `uses_audio`: audio that was received belongs to the next question.
    - `voice`: the voice of spoken answers; None: the default.
    - `max_memory_s`: what was seen longer ago is forgotten; None: nothing is.
    - `sampling`: how answers are sampled.
    """

    audio_output: bool = True
    text_output: bool = True
    num_frames: int = 4
    max_frames: int = 50
    instructions: str = ""
    filter: FrameFilterName | None = "evs"
    threshold: float = 0.95
    uses_audio: bool = True
    voice: str | None = None
    max_memory_s: float | None = None
    sampling: AnswerSampling = AnswerSampling()


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """What the client says about a frame, passed back with events about it. All times are in milliseconds;
    `received_ms` is by the server's clock, the others (presentation, source, capture) are the client's and None where
    it gave none.
    """

    received_ms: float
    id: str | None = None
    pts_ms: float | None = None
    source_pts_ms: float | None = None
    capture_ts_ms: float | None = None
    quality_profile: str | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AppendFrame:
    """Add a frame: `image` is an encoded image as it was received, `info` what the client says about it."""

    image: bytes
    info: FrameInfo


@dataclass(frozen=True, slots=True)
class AppendVideoAudio:
    """Add audio that belongs to the video: float32 [num_samples], mono, 16 kHz. It is kept for the next question."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class AskQuestion:
    """Ask about what was seen and heard. A question interrupts the answer that is under way."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishVideo:
    """End the session's input. The answer that is under way is completed, and then VideoEnded is reported."""


VideoCommand = AppendFrame | AppendVideoAudio | AskQuestion | FinishVideo

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame was received.

    - `info`: what the client said about it.
    - `accepted`: it is kept; otherwise `reason` says why not.
    - `buffered`: how many frames are kept now.
    - `dropped`: what the client said about a frame that had to leave for this one; None where none had to.
    """

    info: FrameInfo
    accepted: bool
    buffered: int
    reason: str | None = None
    dropped: FrameInfo | None = None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """An answer is being made from these frames, the oldest first. `request_id` names the answer."""

    request_id: str
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class AnswerTextDelta:
    """More of the answer's text; joined, the deltas are the text of its AnswerDone."""

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
    - `token_counts`: prompt_tokens, cached_tokens and completion_tokens, where the model knows them.
    """

    text: str
    spoken: bool
    token_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VideoFailed:
    """Something failed; the session goes on.

    - `message`: the error in the words that clients of this protocol match on.
    - `detail`: what went wrong in particular.
    - `ends_answer`: it ends the answer that was under way.
    - `partial_text`: the text of that answer so far.
    """

    message: str
    detail: str = ""
    ends_answer: bool = False
    partial_text: str = ""


@dataclass(frozen=True, slots=True)
class VideoEnded:
    """All questions are answered after FinishVideo; nothing follows."""


VideoEvent = FrameReceived | AnswerStarted | AnswerTextDelta | AnswerAudioDelta | AnswerDone | VideoFailed | VideoEnded
