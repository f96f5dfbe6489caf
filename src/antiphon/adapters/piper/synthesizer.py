"""Piper's voices: text to audio in pieces that join seamlessly, and the time of every word from its phonemes.

`files.py` reads the folders, `phonemes.py` makes the phonemes, and `graph.py` computes the audio.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from antiphon.adapters.espeak import require_espeak
from antiphon.adapters.piper.files import VoiceFile, voice_files
from antiphon.adapters.piper.graph import Sentence, VoiceGraph
from antiphon.adapters.piper.phonemes import Phonemes, Phonemizer
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio.pcm import Resampler
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.events.words import Word
from antiphon.text.sentences import spoken_parts

# A longer sentence is synthesized in several parts.
MAX_PART_CHARS = 240
# Frames in the pieces of a sentence. The first one, 0.3 s of audio, takes some tens of milliseconds to compute. Longer
# pieces cost less per second of audio.
PIECE_FRAMES = (24, 80, 200)
# The rate at which clients get audio unless they ask for another. The voices' own are 16,000 and 22,050 Hz.
RATE_HZ = 24_000
# The range of tempos for which the durations of phonemes are scaled.
SPEEDS = (0.5, 2.0)
# Lower bound of the lane's queue limit: every text in progress has a job in the queue, and a piece takes little time.
MIN_QUEUE = 1024


@dataclass(frozen=True, slots=True)
class _Voice:
    """A speaker of a voice's file."""

    file: VoiceFile
    graph: VoiceGraph
    phonemizer: Phonemizer
    speaker: int | None

    @property
    def rate_hz(self) -> int:
        """The sample rate of its audio, in Hz."""
        return self.file.fields.audio.sample_rate


class Piper:
    """A Synthesizer with the voices of one or more folders. They share a lane.

    A voice has the name of its file without `.onnx`, and a speaker's voice NAME:SPEAKER. The audio of all is resampled
    to RATE_HZ.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        voices: Mapping[str, Path] | None = None,
    ) -> None:
        """Load all voices of `folder` and of the folders in `voices`. Takes about a second for each.

        Raises ModelError if a voice does not load, two have the same name, or eSpeak NG is not installed.
        """
        self._voices: dict[str, _Voice] = {}
        try:
            files = [file for where in (folder, *(voices or {}).values()) for file in voice_files(where)]
            if any(file.fields.phoneme_type != "text" for file in files):
                require_espeak()
            for file in files:
                # eSpeak NG may not have the voice that the file names.
                phonemizer = Phonemizer(file.fields)
                phonemizer.phonemes(["a"])
                graph = VoiceGraph(file.graph, speakers=file.fields.num_speakers)
                for name, speaker in file.speakers.items():
                    if name in self._voices:
                        raise ModelError(f"two voices are named {name}: {self._voices[name].file.graph}, {file.graph}")
                    self._voices[name] = _Voice(file, graph, phonemizer, speaker)
        except ModelError as error:
            raise ModelError(f"{model_id} does not load: {error}") from None
        except Exception as error:
            # The errors that onnx and onnxruntime raise for a bad file have no common base class.
            raise ModelError(f"{model_id} does not load: {error}") from error
        languages = {name: (voice.file.language,) for name, voice in self._voices.items()}
        self.profile = SynthesizerProfile(
            model_id,
            RATE_HZ,
            voices=tuple(self._voices),
            languages=tuple(dict.fromkeys(chain.from_iterable(languages.values()))),
            speeds=SPEEDS,
            word_times=True,
            voice_languages=languages,
        )
        self.lane: Lane[_Utterance, SpeechChunk | None] = Lane(
            "synthesizer",
            _step,
            workers=options.workers,
            max_queue=max(MIN_QUEUE, options.max_queue),
            observe=options.observe,
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Yield the audio of a text, float32 at RATE_HZ. The first chunk has 0.3 s. Each chunk is one job of the lane.

        A text that has no phonemes, such as emoji, yields no samples. Closing the generator stops the synthesis after
        the current chunk. Raises Refused if the lane is full, and ModelError.
        """
        utterance = _Utterance(self._voices[options.voice], text, options)
        while (chunk := await self.lane.run(utterance, urgency())) is not None:
            yield chunk


def _step(batch: Sequence[_Utterance]) -> list[SpeechChunk | None]:
    return [next(utterance.chunks, None) for utterance in batch]


class _Utterance:
    """The synthesis of one text. The lane's threads take its chunks, one at a time."""

    def __init__(self, voice: _Voice, text: str, options: VoiceOptions) -> None:
        self._voice = voice
        self._resampler = Resampler(voice.rate_hz, RATE_HZ)
        self._random = np.random.default_rng(options.seed)
        scales = voice.file.fields.inference
        self._scales = (scales.noise_scale, scales.length_scale / options.speed, scales.noise_w)
        self.chunks = self._spoken(text)

    def _spoken(self, text: str) -> Iterator[SpeechChunk]:
        at_s, pieces = 0.0, chain(PIECE_FRAMES, repeat(PIECE_FRAMES[-1]))
        for part in spoken_parts(text, MAX_PART_CHARS):
            written = part.split()
            phonemes = self._voice.phonemizer.phonemes(written)
            if not phonemes.ids:
                yield SpeechChunk(np.zeros(0, np.float32), tuple(Word(word, at_s, at_s, 1.0) for word in written))
                continue
            graph = self._voice.graph
            sentence = graph.sentence(phonemes.ids, self._scales, self._voice.speaker, self._random)
            frame_s = graph.frame_samples / self._voice.rate_hz
            words, num_symbols = tuple(_words(written, phonemes, sentence, at_s, frame_s)), len(phonemes.ids)
            at_s += sentence.num_frames * frame_s
            start = 0
            while start < sentence.num_frames:
                end = min(start + next(pieces), sentence.num_frames)
                # A remainder shorter than what is computed around a piece is not worth a pass of its own.
                end = sentence.num_frames if sentence.num_frames - end < graph.reach else end
                pcm = self._resampler.feed(np.clip(graph.audio(sentence, start, end), -1.0, 1.0))
                yield SpeechChunk(pcm, words, num_symbols=num_symbols, num_frames=end - start)
                words, num_symbols, start = (), 0, end
        if len(rest := self._resampler.flush()):
            yield SpeechChunk(rest)


def _words(
    written: Sequence[str], phonemes: Phonemes, sentence: Sentence, at_s: float, frame_s: float
) -> Iterator[Word]:
    """Yield the words of a sentence that begins at `at_s`. A silent word takes no time, after the word before it."""
    ends_s = at_s + np.cumsum(sentence.durations) * frame_s
    spans: dict[int, tuple[float, float]] = {}
    for k, word in enumerate(phonemes.words):
        if word is not None:
            start_s = spans[word][0] if word in spans else float(ends_s[k - 1])
            spans[word] = (start_s, float(ends_s[k]))
    end_s = at_s
    for k, text in enumerate(written):
        start_s, end_s = spans.get(k, (end_s, end_s))
        yield Word(text, start_s, end_s, 1.0)
