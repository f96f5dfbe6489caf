"""What speaks: synthesizers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from antiphon.audio import Pcm
from antiphon.events.speech import VoiceSample
from antiphon.events.words import Word


class Urgency(IntEnum):
    """What a caller waits for: the end of a turn or a first sound; a partial or sound that is soon due; a file."""

    FINAL = 0
    PARTIAL = 1
    BULK = 2


@dataclass(frozen=True, slots=True)
class SynthesizerProfile:
    """Facts of a synthesizer. `voices`: by name, the first is the default. `languages`: ISO-639-1.

    `speeds`: the tempo it makes itself; sound is stretched for what lies outside. `word_times`: its sound says where words lie.
    `clones`: speaks with the voice of a sample. `instructed`: follows instructions on how to speak. `streams_text`: begins to speak a text that is
    still being written, word by word (`speak_live`). `tasks`: what it does, by the names that requests have for it.
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


@dataclass(frozen=True, slots=True)
class VoiceOptions:
    """How to speak. `speed` 1.0 is the voice's own tempo; with a `seed` the same text gives the same samples. `language` (ISO-639-1; None: the voice
    finds out), `instructions` and `sample` are for who knows several, follows them, and clones; `max_frames` and `first_frames` (of the first chunk) for
    who speaks in frames."""

    voice: str
    speed: float = 1.0
    seed: int | None = None
    language: str | None = None
    instructions: str = ""
    sample: VoiceSample | None = None
    max_frames: int | None = None
    first_frames: int | None = None


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """More of a text's sound. pcm: float32 [num_samples], mono, at the profile's rate.

    `words`: words of the text that begin in sound not given before, with their places in the text's sound in seconds; of a
    profile with `word_times` each word comes before its sound or with it. `skipped`: letters of the text that the voice cannot speak.
    `num_symbols` and `num_frames`: what the model read and made for it, in its own units.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()
    skipped: str = ""
    num_symbols: int = 0
    num_frames: int = 0


class Synthesizer(Protocol):
    """One loaded speech synthesizer, shared by all sessions."""

    @property
    def profile(self) -> SynthesizerProfile: ...

    def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """The sound of a text of any length, in chunks. `urgency` is asked before each chunk. Waits in the model's lane.

        Closing the generator ends it within a chunk. Raises RemoteProtocolError where nothing of the text can be spoken,
        Refused, ModelError.
        """
        ...


class LiveSynthesizer(Synthesizer, Protocol):
    """One whose profile `streams_text`."""

    def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """The sound of a text that is still being written, from its first word on: pieces that may end anywhere. As `speak`."""
        ...
