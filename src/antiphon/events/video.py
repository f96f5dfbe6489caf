"""The vocabulary of video sessions: what a client may send of frames, sound and questions, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm

FrameFilterName = Literal["evs", "blocks"]


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """One session. `speaks`, `writes`: what answers are made of. `num_frames`: most a question is answered from; `max_frames`: most that are kept.

    `filter` None keeps every frame; else one at or above `threshold` in likeness to the last that was kept is dropped. `hears`: sound that came belongs
    to the next question. `max_memory_s`: what was seen longer ago is forgotten; None: nothing is.
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


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """What the client says of a frame. Milliseconds; `received_ms` by the server's clock."""

    received_ms: float
    id: str | None = None
    pts_ms: float | None = None
    source_pts_ms: float | None = None
    capture_ts_ms: float | None = None
    quality_profile: str | None = None


# --- from the client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AppendFrame:
    """An encoded image."""

    image: bytes
    info: FrameInfo


@dataclass(frozen=True, slots=True)
class AppendVideoAudio:
    """float32 [num_samples], mono, 16 kHz."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class AskQuestion:
    """A question about what was seen and heard; it interrupts the answer under way."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishVideo:
    """No more comes: the answer under way is completed."""


VideoCommand = AppendFrame | AppendVideoAudio | AskQuestion | FinishVideo

# --- to the client ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame was kept, or not: `reason`. `dropped`: the facts of one that had to leave for it."""

    info: FrameInfo
    accepted: bool
    buffered: int
    reason: str | None = None
    dropped: FrameInfo | None = None


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """An answer is being made from these frames."""

    request_id: str
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class AnswerTextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class AnswerAudioDelta:
    """More of the answer's sound: float32 [num_samples]."""

    pcm: Pcm
    rate_hz: int


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """All of it. `counts`: prompt_tokens, cached_tokens, completion_tokens, where the partner knows."""

    text: str
    spoken: bool
    token_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VideoFailed:
    """`message` in the words clients know; `detail`: what just went wrong. `answer`: it ends the answer under way, of which `said` was said."""

    message: str
    detail: str = ""
    ends_answer: bool = False
    partial_text: str = ""


@dataclass(frozen=True, slots=True)
class VideoEnded:
    """All that was asked is answered."""


VideoEvent = FrameReceived | AnswerStarted | AnswerTextDelta | AnswerAudioDelta | AnswerDone | VideoFailed | VideoEnded
