"""Commands and events of speech synthesis: text in as it is written, units of sound out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon.audio import SpeechFormat
from antiphon.events.words import Word

Granularity = Literal["sentence", "clause", "none"]


@dataclass(frozen=True, slots=True)
class VoiceSample:
    """A voice to speak with. `sound`: a sound file, `text` what it says, where that is known; or the voice as numbers, in `embedding`."""

    audio: bytes = b""
    text: str = ""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How text is to be spoken. `voice` None: the default one. `granularity`: the units text is cut into.

    `stream`: PCM as it is made instead of one file a unit. `words`: with the time of every word. The rest is for who has a use for it: the language
    (None: found out), how to speak, whose voice to speak with, and frames of the model: at most, and of the first chunk.
    """

    voice: str | None = None
    granularity: Granularity = "sentence"
    format: SpeechFormat = "wav"
    speed: float = 1.0
    seed: int | None = None
    stream: bool = False
    word_times: bool = False
    language: str | None = None
    instructions: str = ""
    sample: VoiceSample | None = None
    max_frames: int | None = None
    first_frames: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigureSpeech:
    """How what is said from now on is to be spoken."""

    config: SpeechConfig


@dataclass(frozen=True, slots=True)
class AppendText:
    """More of the utterance's text; it may end anywhere."""

    text: str


@dataclass(frozen=True, slots=True)
class FlushText:
    """The utterance's text is complete."""


@dataclass(frozen=True, slots=True)
class CancelSpeech:
    """Nothing more of what was said so far is to be heard."""


SpeechCommand = ConfigureSpeech | AppendText | FlushText | CancelSpeech


@dataclass(frozen=True, slots=True)
class SentenceStarted:
    """A unit of an utterance begins to be spoken. `rate_hz` is that of its sound. Both are counted from 0."""

    utterance: int
    sentence: int
    text: str
    config: SpeechConfig
    rate_hz: int


@dataclass(frozen=True, slots=True)
class SentenceAudio:
    """More of a unit: `data` in its format, which is sound from `start_s` to `end_s` of the unit."""

    utterance: int
    sentence: int
    data: bytes
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SentenceDone:
    """The unit's sound is complete, or failed for the reason of `error`. `words`: in seconds from the unit's start.

    `skipped`: letters of its text that the voice cannot speak.
    """

    utterance: int
    sentence: int
    words: tuple[Word, ...] = ()
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class UtteranceDone:
    """Nothing more comes of the utterance: all `units` were spoken, or it was cancelled."""

    utterance: int
    num_sentences: int
    cancelled: bool = False


SpeechEvent = SentenceStarted | SentenceAudio | SentenceDone | UtteranceDone
