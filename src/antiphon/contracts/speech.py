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
    """What a caller waits for. The lane serves the smaller value first.

    - FINAL: the end of a turn, or the first audio of a response.
    - PARTIAL: a partial, or audio that is soon due.
    - BULK: a file, which is not heard live.
    """

    FINAL = 0
    PARTIAL = 1
    BULK = 2


@dataclass(frozen=True, slots=True)
class SynthesizerProfile:
    """Facts of a synthesizer.

    - `id`: its name for clients.
    - `sample_rate_hz`: of its audio.
    - `voices`: by name, the first is the default.
    - `languages`: ISO-639-1.
    - `speeds`: the slowest and the fastest tempo that it makes itself; for others its audio is stretched.
    - `word_times`: its chunks say where words lie.
    - `clones_voices`: it speaks with the voice of a sample.
    - `follows_instructions`: it follows instructions on how to speak.
    - `streams_text`: it begins to speak a text that is still being written (`speak_live`).
    - `tasks`: what it does, by the names that requests have for it.
    - `parameters`: the numbers that a request may set of how it samples, by name, each with the least and the greatest.
    """

    id: str
    sample_rate_hz: int
    voices: tuple[str, ...]
    languages: tuple[str, ...]
    speeds: tuple[float, float]
    word_times: bool
    clones_voices: bool = False
    follows_instructions: bool = False
    streams_text: bool = False
    tasks: tuple[str, ...] = ("CustomVoice",)
    parameters: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VoiceOptions:
    """How to speak.

    - `voice`: a name out of the profile.
    - `speed`: 1.0 is the voice's own tempo.
    - `seed`: with one, the same text gives the same samples.
    - `language`: ISO-639-1; None: the model finds out. For models that speak several.
    - `instructions`: how to speak, in words. For models that follow them.
    - `sample`: the voice to speak with. For models that clone.
    - `max_frames`, `first_frames`: the most codec frames in all, and the frames of the first chunk. For models that
      speak in frames.
    - `whole_text`: whether the model is given all of a text before it speaks; None: as it was trained. For models that
      can also be given it while they speak.
    - `parameters`: how it samples, by names out of the profile; the others are as its makers have them.
    - `spoken_before`: what was spoken before it in the same response, by which the language of a short text is found.
    """

    voice: str
    speed: float = 1.0
    seed: int | None = None
    language: str | None = None
    instructions: str = ""
    sample: VoiceSample | None = None
    max_frames: int | None = None
    first_frames: int | None = None
    whole_text: bool | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    spoken_before: str = ""


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """More of a text's audio. pcm: float32 [num_samples], mono, at the profile's rate.

    - `words`: words of the text that begin in audio not given before, with their times in seconds from the start of the
      text's audio. With a profile of `word_times`, each word comes before its audio or with it.
    - `skipped`: characters of the text that the voice cannot speak.
    - `num_symbols`, `num_frames`: what the model read and generated for it, in its own units; for metrics.
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
        """Synthesize a text of any length, in chunks. Waits in the model's lane, where `urgency` is asked before each
        chunk, so that a stream can fall back while its listener still has audio.

        Closing the generator ends it within a chunk. Raises RemoteProtocolError where nothing of the text can be
        spoken, Refused, ModelError.
        """
        ...


class LiveSynthesizer(Synthesizer, Protocol):
    """A synthesizer whose profile says `streams_text`."""

    def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """Synthesize a text that is still being written, beginning with its first word. `texts` yields chunks of it
        that may end anywhere. Otherwise as `speak`, always at the urgency of a live response.
        """
        ...
