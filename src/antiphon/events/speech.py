"""Commands and events of speech synthesis: text in while it is being written, the audio of its sentences out.

Utterances, and the sentences of each, are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import SpeechFormat
from antiphon.events.words import Word

Granularity = Literal["sentence", "clause", "none"]


@dataclass(frozen=True, slots=True)
class VoiceSample:
    """A voice to speak with, sent by the client: an audio file, or a speaker embedding.

    - `audio`: the bytes of an audio file in any container; empty if an embedding is given.
    - `text`: what the audio says, if known; it improves the clone.
    - `embedding`: the voice as the model's own vector.
    - `url`: where the audio is until the server has fetched it; no session sees it.
    """

    audio: bytes = b""
    text: str = ""
    embedding: tuple[float, ...] = ()
    url: str = ""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How the text of an utterance is spoken."""

    # One of the synthesizer's voices; None: its default.
    voice: str | None = None
    # The unit that the text is split into before it is synthesized.
    granularity: Granularity = "sentence"
    # The encoding of the audio; with `stream` always raw PCM.
    format: SpeechFormat = "wav"
    # The tempo; 1.0 is the voice's own.
    speed: float = 1.0
    # With a seed, the same text gives the same samples.
    seed: int | None = None
    # PCM is sent as it is generated, instead of one file for each sentence.
    stream: bool = False
    # SentenceDone carries word times.
    word_times: bool = False
    # The language as ISO-639-1; None: the model detects it. For models that speak several.
    language: str | None = None
    # How to speak, in words. For models that follow instructions.
    instructions: str = ""
    # The voice to speak with. For models that clone voices.
    sample: VoiceSample | None = None
    # The most codec frames of one sentence. For models that speak in frames.
    max_frames: int | None = None
    # The number of codec frames in the first chunk; fewer make audio start sooner. For models that speak in frames.
    first_frames: int | None = None
    # Sample rate of the audio; None: the voice's own.
    rate_hz: int | None = None
    # The model is given the whole text before it speaks (True), or a token of it with each frame (False); None: as the
    # model was trained. For models that can do both.
    whole_text: bool | None = None
    # Sampling parameters by their names in the synthesizer's profile.
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigureSpeech:
    """Set how the utterances that follow are spoken. It is refused while an utterance is open."""

    config: SpeechConfig


@dataclass(frozen=True, slots=True)
class AppendText:
    """Add text to the utterance, which may end anywhere, even within a word. Complete sentences are spoken at once."""

    text: str


@dataclass(frozen=True, slots=True)
class FlushText:
    """End the utterance's text: its rest is spoken, and the next text begins another utterance."""


@dataclass(frozen=True, slots=True)
class CancelSpeech:
    """Stop speaking, and drop all text received so far. UtteranceDone with `cancelled` ends an open utterance."""


SpeechCommand = ConfigureSpeech | AppendText | FlushText | CancelSpeech


@dataclass(frozen=True, slots=True)
class SentenceStarted:
    """A sentence of an utterance is about to be spoken with `config`. `rate_hz` is the sample rate of its audio."""

    utterance: int
    sentence: int
    text: str
    config: SpeechConfig
    rate_hz: int


@dataclass(frozen=True, slots=True)
class SentenceAudio:
    """More audio of a sentence: `data` in the configured format, which covers `start_s` to `end_s` of the sentence in
    seconds.

    Without `stream`, one SentenceAudio holds the whole file.
    """

    utterance: int
    sentence: int
    data: bytes
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SentenceDone:
    """The sentence's audio is complete, or failed. After a failure the utterance continues with the next sentence.

    - `words`: the words with their times in seconds from the sentence's start; empty unless requested.
    - `skipped`: characters of its text that the voice cannot speak.
    - `error`: why its audio failed; empty on success.
    """

    utterance: int
    sentence: int
    words: tuple[Word, ...] = ()
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class UtteranceDone:
    """The utterance ended: all its `num_sentences` were spoken, or it was cancelled. No event of it follows."""

    utterance: int
    num_sentences: int
    cancelled: bool = False


SpeechEvent = SentenceStarted | SentenceAudio | SentenceDone | UtteranceDone
