"""eSpeak NG: formant synthesis at 22.05 kHz, by a system program (`adapters/espeak.py`).

It runs at 200 times real time, so each sentence is one chunk. The voice is intelligible but robotic: prefer a neural
voice if one is available for the language.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from antiphon.adapters.espeak import PROGRAM, require_espeak, run_espeak
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.audio.pcm import from_pcm16
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.lane import Lane
from antiphon.text.sentences import SentenceSplitter
from antiphon.text.word_timing import WordPacer

RATE_HZ = 22_050
# Words per minute at speed 1, and the range of speeds.
WORDS_A_MINUTE, SPEEDS = 150, (0.5, 2.5)
# Languages written with ideographs are missing, because eSpeak NG spells out most ideographs instead of reading them.
LANGUAGES = (
    *("de", "es", "fr", "it", "nl", "pl", "sv", "da", "fi", "cs", "ro", "hu", "el", "ru", "uk", "tr", "ar", "hi", "ko"),
    *("pt", "no", "en"),
)
# The names of those voices whose name differs from their language code.
VOICES = {"fr": "fr-fr", "en": "en-us", "no": "nb"}
# The size of the WAV header that espeak-ng writes before the samples.
HEADER_BYTES = 44


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    language: str
    speed: float


class Espeak:
    """A Synthesizer with one voice for each language. It loads nothing, and runs the program once for each sentence."""

    def __init__(self, options: LaneModelOptions) -> None:
        """Raises ModelError if the program is not installed."""
        require_espeak()
        self.profile = SynthesizerProfile(
            PROGRAM, RATE_HZ, voices=(PROGRAM,), languages=LANGUAGES, speeds=SPEEDS, word_times=True
        )
        self.lane: Lane[_Sentence, Pcm] = Lane(
            "fallback voice", _work, max_queue=options.max_queue, observe=options.observe
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Yield the audio of a text, float32 at 22.05 kHz, one sentence at a time, with estimated word times.

        `options.language` is one of the profile's languages. Raises Refused if the lane is full, and ModelError.
        """
        pacer, splitter = WordPacer(), SentenceSplitter()
        for sentence in [*splitter.feed(text), *splitter.flush()]:
            job = _Sentence(sentence, options.language or "en", options.speed)
            pcm = await self.lane.run(job, urgency())
            # The sentence's audio is complete, so its words are spread over all of it.
            pacer.advance(len(pcm) / RATE_HZ)
            pacer.feed(sentence)
            yield SpeechChunk(pcm, pacer.finish(), num_symbols=len(sentence))


def _work(batch: Sequence[_Sentence]) -> list[Pcm]:
    return [_spoken(one) for one in batch]


def _spoken(sentence: _Sentence) -> Pcm:
    tempo = str(round(WORDS_A_MINUTE * sentence.speed))
    voice = VOICES.get(sentence.language, sentence.language)
    wav = run_espeak(["-v", voice, "-s", tempo, "-b", "1", "--stdin", "--stdout"], sentence.text)
    return from_pcm16(wav[HEADER_BYTES : len(wav) // 2 * 2])
