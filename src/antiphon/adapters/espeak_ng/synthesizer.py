"""eSpeak NG (a program of the system's, GPLv3, which is run and not linked): formant synthesis, 22.05 kHz.

It makes 200 times the audio of real time, so a sentence is one chunk. It is understood, and nobody takes it for a
person; a neural voice of a language is better where there is one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.audio.pcm import from_pcm16
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.text.sentences import SentenceSplitter
from antiphon.text.word_timing import WordPacer

PROGRAM = "espeak-ng"
RATE_HZ = 22_050
# Words a minute at the voice's own tempo, and the range of tempos.
WORDS_A_MINUTE, SPEEDS = 150, (0.5, 2.5)
# Ideographs are left to neural voices: it spells most of them out.
LANGUAGES = (
    *("de", "es", "fr", "it", "nl", "pl", "sv", "da", "fi", "cs", "ro", "hu", "el", "ru", "uk", "tr", "ar", "hi", "ko"),
    *("pt", "no", "en"),
)
# What it calls the voices that it does not call by their languages.
VOICES = {"fr": "fr-fr", "en": "en-us", "no": "nb"}
# The size of a WAV file's header, which espeak-ng writes before the samples.
HEADER_BYTES = 44
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    language: str
    speed: float


class Espeak:
    """A Synthesizer with a voice for each of its languages. It loads nothing; each sentence runs the program once."""

    def __init__(self, options: LaneModelOptions) -> None:
        """Raises ModelError where the program is not installed."""
        if not is_installed():
            raise ModelError(f"{PROGRAM} is not installed (apt install {PROGRAM})")
        self.profile = SynthesizerProfile(
            PROGRAM, RATE_HZ, voices=(PROGRAM,), languages=LANGUAGES, speeds=SPEEDS, word_times=True
        )
        self.lane: Lane[_Sentence, Pcm] = Lane(
            "fallback voice", _work, max_queue=options.max_queue, observe=options.observe
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Yield the audio of a text, float32 at 22.05 kHz, a sentence at a time, with estimated word times.

        `options.language` is one of the profile's. Raises Refused where the lane is full, ModelError.
        """
        pacer, splitter = WordPacer(), SentenceSplitter()
        for sentence in [*splitter.feed(text), *splitter.flush()]:
            job = _Sentence(sentence, options.language or "en", options.speed)
            pcm = await self.lane.run(job, urgency())
            # All of its audio is there: its words share it.
            pacer.advance(len(pcm) / RATE_HZ)
            pacer.feed(sentence)
            yield SpeechChunk(pcm, pacer.finish(), num_symbols=len(sentence))


def is_installed() -> bool:
    """Whether the program is there."""
    return shutil.which(PROGRAM) is not None


def _work(batch: Sequence[_Sentence]) -> list[Pcm]:
    return [_spoken(one) for one in batch]


def _spoken(sentence: _Sentence) -> Pcm:
    tempo = str(round(WORDS_A_MINUTE * sentence.speed))
    command = [
        PROGRAM,
        "-v",
        VOICES.get(sentence.language, sentence.language),
        "-s",
        tempo,
        "-b",
        "1",
        "--stdin",
        "--stdout",
    ]
    try:
        done = subprocess.run(command, input=sentence.text.encode(), capture_output=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"{PROGRAM} failed: {error}") from None
    if done.returncode:
        raise ModelError(f"{PROGRAM} failed: {done.stderr.decode(errors='replace').strip()[:200]}")
    return from_pcm16(done.stdout[HEADER_BYTES : len(done.stdout) // 2 * 2])
