"""The contract of synthesizers, which speak text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.events.speech import VoiceSample
from antiphon.events.words import Word


class Urgency(IntEnum):
    """How urgently the caller waits. The lane serves the smaller value first.

    - FINAL: the end of a turn, or the first audio of a response.
    - PARTIAL: a partial, or audio that will be due shortly.
    - BULK: a file, which no listener hears live.
    """

    FINAL = 0
    PARTIAL = 1
    BULK = 2


@dataclass(frozen=True, slots=True)
class SynthesizerProfile:
    """Facts of a synthesizer, which do not change while it is loaded."""

    # The model's name for clients.
    id: str
    # Sample rate of its audio, in Hz.
    sample_rate_hz: int
    # Names of its voices, the default first.
    voices: tuple[str, ...]
    # Languages that it speaks, as ISO-639-1 codes. Empty: unknown; it gets texts in all languages.
    languages: tuple[str, ...]
    # The slowest and the fastest tempo that it generates itself. For other tempos, its audio is stretched.
    speeds: tuple[float, float]
    # True if its chunks have word times.
    word_times: bool
    # True if it can speak with the voice of a sample.
    clones_voices: bool = False
    # True if it follows instructions on how to speak.
    follows_instructions: bool = False
    # True if it can speak a text that is still being written (`speak_live`).
    streams_text: bool = False
    # The number of further texts that a caller may have it speak before it has taken the audio of one, so that there is
    # no gap between them. 0: the model computes in this process, where a text ahead would delay other sessions.
    texts_ahead: int = 0
    # The tasks that it performs, by their names in requests.
    tasks: tuple[str, ...] = ("CustomVoice",)
    # The sampling parameters that a request may set: the least and the greatest value of each, by name.
    parameters: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # The languages of the voices that do not speak all of `languages`, by the voice's name.
    voice_languages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def languages_of(self, voice: str) -> tuple[str, ...]:
        """Return the languages that a voice speaks, as ISO-639-1 codes."""
        return self.voice_languages.get(voice, self.languages)


@dataclass(frozen=True, slots=True)
class VoiceOptions:
    """How a synthesizer speaks a text."""

    # One of the profile's voices.
    voice: str
    # The tempo; 1.0 is the normal tempo of the voice.
    speed: float = 1.0
    # The random seed. With the same seed, the same text gives the same samples. None: a random seed.
    seed: int | None = None
    # The language as ISO-639-1; None: the model detects it. For models that speak several languages.
    language: str | None = None
    # How to speak, in words. For models that follow instructions.
    instructions: str = ""
    # The voice to speak with. For models that clone voices.
    sample: VoiceSample | None = None
    # The most codec frames in all. For models that speak in frames.
    max_frames: int | None = None
    # The number of codec frames in the first chunk. For models that speak in frames.
    first_frames: int | None = None
    # Whether the model gets the whole text before it begins to speak; None: as it was trained. For models that can also
    # take text while they speak.
    whole_text: bool | None = None
    # Sampling parameters by their names in the profile. Missing parameters have the model's defaults.
    parameters: Mapping[str, float] = field(default_factory=dict)
    # The text that the same response spoke before. It helps to detect the language of a short text.
    spoken_before: str = ""


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """The next piece of a text's audio. pcm: float32 [num_samples], mono, at the profile's rate.

    - `words`: words whose audio earlier chunks did not contain, with times in seconds from the start of the text's
      audio. If the profile has `word_times`, each word arrives before its audio or with it.
    - `skipped`: characters of the text that the voice cannot speak.
    - `num_symbols`, `num_frames`: the amounts of text read and of audio generated for this chunk, in the model's own
      units; for metrics.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()
    skipped: str = ""
    num_symbols: int = 0
    num_frames: int = 0


class Synthesizer(Protocol):
    """One loaded synthesizer, shared by all sessions."""

    @property
    def profile(self) -> SynthesizerProfile:
        """The synthesizer's facts, which do not change while it is loaded."""
        ...

    def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Synthesize a text of any length, in chunks.

        Waits in the model's lane. Closing the generator ends the synthesis within a chunk.

        Args:
            text: The text to speak.
            options: How to speak it.
            urgency: Called before each chunk, so that a stream can lower its urgency while its listener still has
                audio.

        Raises:
            RemoteProtocolError: Nothing of the text can be spoken.
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...


class LiveSynthesizer(Synthesizer, Protocol):
    """A synthesizer that can speak a text while it is still being written (`SynthesizerProfile.streams_text`)."""

    def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """Synthesize a text that is still being written, from its first word on.

        Otherwise the same as `speak`, always with the urgency of a live response.

        Args:
            texts: Yields chunks of the text, which may end anywhere.
            options: How to speak it.
        """
        ...
