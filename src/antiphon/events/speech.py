"""Commands and events of speech synthesis. Commands add text while it is written; events have audio for sentences.

Utterances are numbered from 0, and so are the sentences in each utterance.
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
    """A voice that the client has sent: an audio file or a speaker embedding.

    - `audio`: an audio file in any container; empty if there is an embedding.
    - `text`: the words that are spoken in the audio, if known. They improve the clone.
    - `embedding`: the voice as a vector of the model.
    - `url`: the URL of the audio until the server has fetched it. Sessions never see it.
    """

    audio: bytes = b""
    text: str = ""
    embedding: tuple[float, ...] = ()
    url: str = ""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """The configuration for speaking an utterance."""

    # One of the synthesizer's voices; None for the default.
    voice: str | None = None
    # The unit into which text is split before it is synthesized.
    granularity: Granularity = "sentence"
    # Format of the audio; always raw PCM with `stream`.
    format: SpeechFormat = "wav"
    # Speaking rate; 1.0 is the voice's normal speed.
    speed: float = 1.0
    # Random seed. The same seed and text give the same samples.
    seed: int | None = None
    # Whether PCM is sent while it is generated, instead of one file for each sentence.
    stream: bool = False
    # Whether SentenceDone has word times.
    word_times: bool = False
    # ISO-639-1 code of the language; None to detect it. For models with several languages.
    language: str | None = None
    # Description of how to speak. For models that follow instructions.
    instructions: str = ""
    # The voice to clone. For models that clone voices.
    sample: VoiceSample | None = None
    # Maximum number of codec frames in a sentence. For models that generate codec frames.
    max_frames: int | None = None
    # Number of codec frames in the first chunk. With fewer frames, audio starts sooner. For models that generate codec
    # frames.
    first_frames: int | None = None
    # Sample rate of the audio, in Hz; None for the voice's own rate.
    rate_hz: int | None = None
    # Whether the model gets the whole text before it speaks (True), or one text token with each frame (False). None
    # selects the mode in which the model was trained. For models that support both.
    whole_text: bool | None = None
    # Sampling parameters, by their names in the synthesizer's profile.
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigureSpeech:
    """Configure the next utterances. This is refused while an utterance is open."""

    config: SpeechConfig


@dataclass(frozen=True, slots=True)
class AppendText:
    """Add text to the utterance. It may end anywhere, even within a word. Complete sentences are spoken at once."""

    text: str


@dataclass(frozen=True, slots=True)
class FlushText:
    """End the utterance. Its remaining text is spoken, and the next text begins another utterance."""


@dataclass(frozen=True, slots=True)
class CancelSpeech:
    """Stop speaking, and drop all text received so far. UtteranceDone with `cancelled` ends an open utterance."""


@dataclass(frozen=True, slots=True)
class ContinueSpeech:
    """Continue another session, before any text. The first utterance has the number `utterance`. Its first `sentence`
    sentences are not spoken, and of the next one, the first `num_bytes` bytes of audio are left out.
    """

    utterance: int
    sentence: int
    num_bytes: int


SpeechCommand = ConfigureSpeech | AppendText | FlushText | CancelSpeech | ContinueSpeech


@dataclass(frozen=True, slots=True)
class SentenceStarted:
    """A sentence of an utterance will now be spoken with `config`. `rate_hz` is the sample rate of its audio."""

    utterance: int
    sentence: int
    text: str
    config: SpeechConfig
    rate_hz: int


@dataclass(frozen=True, slots=True)
class SentenceAudio:
    """Further audio of a sentence, from `start_s` to `end_s` in seconds. `data` is in the configured format.

    Without `stream`, a single SentenceAudio has the whole file.
    """

    utterance: int
    sentence: int
    data: bytes
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SentenceDone:
    """The sentence's audio is complete, or failed. After a failure the utterance continues with the next sentence.

    - `words`: the words, with times in seconds from the start of the sentence; empty unless requested.
    - `skipped`: characters of the text that the voice cannot speak.
    - `error`: the reason of a failure; empty on success.
    """

    utterance: int
    sentence: int
    words: tuple[Word, ...] = ()
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class UtteranceDone:
    """The utterance ended: all `num_sentences` were spoken, or it was cancelled. No event about it follows."""

    utterance: int
    num_sentences: int
    cancelled: bool = False


SpeechEvent = SentenceStarted | SentenceAudio | SentenceDone | UtteranceDone
