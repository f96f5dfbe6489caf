"""Commands and events of speech synthesis: text in as it is written, the audio of its sentences out.

Utterances and the sentences of each are numbered from 0.
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
    """A voice to speak with, given by the client: an audio file, or a speaker embedding.

    - `url`: where the audio is, until the server has fetched it; no session sees it.

    - `audio`: the bytes of an audio file in any container; empty where there is an embedding.
    - `text`: what the audio says, where that is known; cloning is better with it.
    - `embedding`: the voice as the model's own vector.
    """

    audio: bytes = b""
    text: str = ""
    embedding: tuple[float, ...] = ()
    url: str = ""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How text is to be spoken.

    - `voice`: a name out of the synthesizer's profile; None: its default.
    - `granularity`: what the text is split into before it is synthesized.
    - `format`: the encoding of the audio; with `stream` always raw PCM.
    - `speed`: 1.0 is the voice's own tempo.
    - `seed`: with one, the same text gives the same samples.
    - `stream`: PCM is sent as it is generated, instead of one file a sentence.
    - `word_times`: SentenceDone carries the time of every word.
    - `language`: ISO-639-1; None: the model finds out. For models that speak several.
    - `instructions`: how to speak, in words. For models that follow instructions.
    - `sample`: the voice to speak with. For models that clone voices.
    - `max_frames`: the most codec frames of one sentence. For models that speak in frames.
    - `first_frames`: the codec frames of the first chunk, fewer for audio sooner. For the same models.
    - `rate_hz`: samples a second of the audio; None: the voice's own.
    - `whole_text`: the model is given all of a text before it speaks (True), or a token of it with each frame (False);
      None: as the model was trained. For models that can do both.
    - `parameters`: how the model samples, by names out of the synthesizer's profile.
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
    rate_hz: int | None = None
    whole_text: bool | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigureSpeech:
    """Set how the utterances that follow are to be spoken. It is refused while an utterance is open."""

    config: SpeechConfig


@dataclass(frozen=True, slots=True)
class AppendText:
    """Add text to the utterance; it may end anywhere, also within a word. Sentences are spoken as they
    become complete.
    """

    text: str


@dataclass(frozen=True, slots=True)
class FlushText:
    """End the utterance's text: what is left of it is spoken, and the next text begins another utterance."""


@dataclass(frozen=True, slots=True)
class CancelSpeech:
    """Stop speaking, and drop all text that was sent so far. UtteranceDone with `cancelled` follows for what was under
    way.
    """


SpeechCommand = ConfigureSpeech | AppendText | FlushText | CancelSpeech


@dataclass(frozen=True, slots=True)
class SentenceStarted:
    """A sentence of an utterance is going to be spoken, with `config`. Its audio has `rate_hz` samples a second."""

    utterance: int
    sentence: int
    text: str
    config: SpeechConfig
    rate_hz: int


@dataclass(frozen=True, slots=True)
class SentenceAudio:
    """More audio of a sentence: `data` in the configured format, which covers `start_s` to `end_s` of the sentence in
    seconds. Without `stream` there is one for the whole file.
    """

    utterance: int
    sentence: int
    data: bytes
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SentenceDone:
    """The sentence's audio is complete, or has failed for the reason in `error`; the utterance then goes on with the
    next.

    - `words`: the words with their times in seconds from the sentence's start; empty unless they were asked for.
    - `skipped`: characters of its text that the voice cannot speak.
    - `error`: why there is no (more) audio; empty where all went well.
    """

    utterance: int
    sentence: int
    words: tuple[Word, ...] = ()
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class UtteranceDone:
    """Nothing more of the utterance follows: its `num_sentences` were all spoken, or it was cancelled."""

    utterance: int
    num_sentences: int
    cancelled: bool = False


SpeechEvent = SentenceStarted | SentenceAudio | SentenceDone | UtteranceDone
