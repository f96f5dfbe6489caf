"""A synthesizer whose audio is known exactly: each word is 0.3 s of noise that depends on the seed and on the word."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable

import anyio
import numpy as np
from numpy.typing import NDArray

from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.events.words import Word

RATE_HZ, WORD_S = 24_000, 0.3


def sound_of(text: str, seed: int) -> NDArray[np.float32]:
    """Return the audio of a text: float32 [num_samples] at RATE_HZ."""
    size = int(WORD_S * RATE_HZ)
    words = [np.random.default_rng([seed, zlib.crc32(w.encode())]).normal(0.0, 0.1, size) for w in text.split()]
    return np.concatenate([np.zeros(0), *words]).astype(np.float32)


class ScriptedVoice:
    """Takes `pace_s` seconds for each word. Without a seed, its audio is different each time."""

    def __init__(self, pace_s: float, voices: tuple[str, ...] = ("one", "two")) -> None:
        self.profile = SynthesizerProfile("scripted-voice", RATE_HZ, voices, ("en",), (0.5, 2.0), word_times=True)
        self._pace_s = pace_s

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        seed = int(np.random.default_rng().integers(1 << 31)) if options.seed is None else options.seed
        for number, word in enumerate(text.split()):
            await anyio.sleep(self._pace_s)
            start_s = number * WORD_S
            yield SpeechChunk(sound_of(word, seed), (Word(word, start_s, start_s + WORD_S, 1.0),))

    def close(self) -> None:
        """Do nothing."""
