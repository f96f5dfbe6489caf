"""hibari (English, 24 kHz, int8 ONNX): text to audio in chunks that join seamlessly, and the time of every word.

The published graph maps phonemes to the spectrum of a whole sentence. It has two stages. The prosody stage reads the
sentence and computes a duration for each phoneme and features for each frame. The decoder, which has only convolutions,
turns frames into spectra. This module splits the graph between the two, so that the prosody runs once per sentence and
the decoder once per chunk. Each chunk is decoded with the context that the convolutions reach on either side. So the
chunk equals the same stretch of the sentence decoded at once, except for the rounding of int8 activations, which are
scaled per chunk. The constants of the model are from hibari-tts 0.2.1: "ONNX interface" in its readme, and
`hibari/dsp.py`.

`normalize.py` maps written text to spoken text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from hibari import dsp
from hibari.g2p import G2P
from hibari.g2p.normalize import normalize
from hibari.tts import ASSETS
from hibari.voices import VOICES
from numpy.typing import NDArray
from onnx.utils import Extractor

from antiphon.adapters.hibari.normalize import SpokenPart, parts, source_words
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.words import Word

Floats = NDArray[np.float32]

# The tensors at which the graph is split, and the tensor of the durations.
FEATURES, F0, DURATIONS = "/Concat_43_output_0", "f0", "/Clip_output_0"
SPECTRUM = ("lh", "theta", "ln", "lr", "phi")
# Frames of context on either side: the decoder's first convolution and each of its 8 blocks reach 3 frames.
CONTEXT_FRAMES = 27
# One unit of duration is two frames of 12.5 ms.
FRAME_S = dsp.HOP / dsp.SR
DURATION_S = 2 * FRAME_S
# Frames that the window of the inverse STFT spans.
WINDOW_HOPS = dsp.N_FFT // dsp.HOP
# Frames in the chunks of a text. The first chunk, 0.3 s of audio, takes a few milliseconds to compute. Longer chunks
# cost less per second of audio.
CHUNK_FRAMES = (24, 60, 160, 240)
# Frames of audio before the first word of a part. The rest of the model's initial silence, a third of a second, is cut.
# If nothing was spoken before, there are FIRST_LEAD_FRAMES, because the silence would delay the response.
LEAD_FRAMES, FIRST_LEAD_FRAMES = 6, 2
# Limit of silent frames at the end of a part, if its sentence continues in the next part.
TAIL_FRAMES = 8
SENTENCE_ENDS = frozenset(".!?…")
# Placement of words, tuned by forced alignment of 15 sentences (bench/tts.py measures it on others).
# AUDIO_LEAD_S: how far the audio is ahead of the durations. WORD_MARGIN_S: how far a word may extend into the gaps
# around it. SILENCE_LEVEL: the energy (a feature of the frames) up to which a frame is silent.
AUDIO_LEAD_S, WORD_MARGIN_S, SILENCE_LEVEL = 0.05, 0.04, 0.0
# The range of the model's own `speed` input.
SPEEDS = (0.5, 2.0)
# Lower bound of the lane's queue limit. It is high, because every text in progress has a job in the queue, and a chunk
# takes only milliseconds.
MIN_QUEUE = 1024
PAUSE_CHARS = frozenset(' ;:,.!?—…"“”()')


class Hibari:
    """A Synthesizer with English voices. They share a lane, and a phonemizer for British or American English.

    `folder` contains the default voice's `hibari.onnx`. `voices` maps the model ids of other voices to their folders.
    The profile names a voice by its id without "hibari-". Each voice's graphs run on one core, in the lane's threads.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        voices: Mapping[str, Path] | None = None,
    ) -> None:
        """Load all voices and their phonemizers. Takes several seconds.

        Raises ModelError if a voice does not load.
        """
        self._voices: dict[str, _Voice] = {}
        phonemizers: dict[bool, _Phonemizer] = {}
        for voice_id, where in ({model_id: folder} | dict(voices or {})).items():
            name = voice_id.removeprefix("hibari-")
            british = bool(VOICES.get(name, {}).get("british", False))
            try:
                if british not in phonemizers:
                    phonemizers[british] = _Phonemizer(british)
                self._voices[name] = _Voice(where / "hibari.onnx", phonemizers[british])
            except Exception as error:
                # The errors that onnx, onnxruntime and the phonemizer raise for a bad file have no common base class.
                raise ModelError(f"{voice_id} does not load: {error}") from error
        self.profile = SynthesizerProfile(
            model_id, dsp.SR, voices=tuple(self._voices), languages=("en",), speeds=SPEEDS, word_times=True
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
        """Yield the audio of a text, float32 at 24 kHz. The first chunk has 0.3 s. Each chunk is one job of the lane.

        A text without speakable characters, such as emoji, yields no samples. The first chunk with samples also has the
        words and the `skipped` letters of the earlier chunks without samples. Closing the generator stops the synthesis
        after the current chunk. Raises RemoteProtocolError if letters were skipped and nothing is left to speak,
        Refused if the lane is full, and ModelError.
        """
        utterance = _Utterance(self._voices[options.voice], text, options)
        # Chunks without samples are held back until the first chunk with samples. If no chunk has samples, but letters
        # were skipped, the text cannot be spoken.
        held, words, spoke = "", tuple[Word, ...](), False
        while (chunk := await self.lane.run(utterance, urgency())) is not None:
            if spoke:
                yield chunk
                continue
            held, words, spoke = held + chunk.skipped, words + chunk.words, len(chunk.pcm) > 0
            if spoke:
                yield replace(chunk, skipped=held, words=words)
        if held and not spoke:
            raise RemoteProtocolError(
                "unsupported_text", f"the voice speaks English, and none of this text: {held[:40]}", "input"
            )


def _step(batch: Sequence[_Utterance]) -> list[SpeechChunk | None]:
    return [utterance.step() for utterance in batch]


class _Voice:
    """The two halves of a voice's graph, each in its own onnxruntime session, and the shared phonemizer."""

    def __init__(self, path: Path, phonemizer: _Phonemizer) -> None:
        extractor = Extractor(onnx.load(str(path)))
        self.prosody = _session(extractor.extract_model(["ids", "speed"], [FEATURES, F0, DURATIONS]))
        self.decoder = _session(extractor.extract_model([FEATURES], list(SPECTRUM)))
        self.phonemizer = phonemizer


class _Phonemizer:
    """The phonemizer of British or American English. Thread-safe: a lock serializes its calls."""

    def __init__(self, british: bool) -> None:
        self._g2p = G2P(british=british)
        self._vocabulary = dict(json.loads((Path(ASSETS) / "vocab.json").read_text(encoding="utf-8")))
        # Accessing `oov` loads the out-of-vocabulary network, which would otherwise load with the first text, and
        # possibly in several threads.
        _ = self._g2p.oov
        self._lock = threading.Lock()

    def phonemes(self, part: SpokenPart) -> tuple[list[int], list[int | None]]:
        """Return a part's phoneme ids, padded at both ends, and the index of each one's written word, or None."""
        with self._lock:
            tokens = self._g2p.phonemize_tokens(self._g2p.tokenize(normalize(part.text)))
        words = [list(group) for _, group in groupby(tokens, key=_WordKey())]
        said = [i for i, s in enumerate(part.spoken) if s]
        sources = source_words([part.spoken[i] for i in said], ["".join(t.text for t in word) for word in words])
        ids, written = [0], list[int | None]([None])
        for word, source in zip(words, sources, strict=True):
            phonemes = "".join(t.phonemes or "" for t in word) + (" " if word[-1].whitespace else "")
            for phoneme in phonemes:
                if phoneme in self._vocabulary:
                    ids.append(self._vocabulary[phoneme])
                    written.append(None if phoneme in PAUSE_CHARS else said[source])
        return [*ids, 0], [*written, None]


class _WordKey:
    """A key for `groupby` that numbers the words: tokens without white space between them get the same number."""

    def __init__(self) -> None:
        self._word = 0

    def __call__(self, token: Any) -> int:
        number = self._word
        self._word += bool(token.whitespace)
        return number


def _session(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class _Utterance:
    """The synthesis of one text. Its steps run in the lane's threads, one at a time."""

    def __init__(self, voice: _Voice, text: str, options: VoiceOptions) -> None:
        self._voice = voice
        self._speed = options.speed
        self._random = np.random.default_rng(options.seed)
        self._parts = parts(text)
        self._part: _Part | None = None
        self._lead = LEAD_FRAMES if options.spoken_before else FIRST_LEAD_FRAMES
        self._done_s = 0.0
        self._chunks: Iterator[int] = _sizes()

    def step(self) -> SpeechChunk | None:
        """Return the next chunk, or None at the end of the text. The chunk of a silent part has no samples."""
        skipped, words, num_symbols = "", tuple[Word, ...](), 0
        if self._part is None:
            spoken = next(self._parts, None)
            if spoken is None:
                return None
            skipped = spoken.skipped
            ids, written = self._voice.phonemizer.phonemes(spoken)
            # A part with only punctuation is silent.
            if all(word is None for word in written):
                mute = tuple(Word(w, self._done_s, self._done_s, 1.0) for w in spoken.written)
                return SpeechChunk(np.zeros(0, np.float32), mute, skipped)
            ends = spoken.text.rstrip("\"'”’)]")[-1:] in SENTENCE_ENDS
            self._part = _Part(self._voice, ids, self._speed, self._random, lead=self._lead, ends=ends)
            self._lead = LEAD_FRAMES
            words, num_symbols = self._words(spoken, written, self._part), len(ids) - 2
        before = self._part.at
        pcm = self._part.decode(next(self._chunks))
        num_frames = self._part.at - before
        if self._part.over:
            self._done_s += self._part.seconds
            self._part = None
        return SpeechChunk(pcm, words, skipped, num_symbols, num_frames)

    def _words(self, spoken: SpokenPart, written: list[int | None], part: _Part) -> tuple[Word, ...]:
        """Return every written word in order. A silent word has zero duration, at the end of the word before it."""
        phonemes: dict[int, tuple[int, int]] = {}
        for phoneme, word in enumerate(written):
            if word is not None:
                phonemes[word] = (phonemes[word][0] if word in phonemes else phoneme, phoneme)
        times = dict(zip(phonemes, part.spans(list(phonemes.values())), strict=True))
        out, at_s = [], 0.0
        for i, text in enumerate(spoken.written):
            start_s, end_s = times.get(i, (at_s, at_s))
            start_s = max(start_s, at_s)
            at_s = max(start_s, end_s)
            out.append(Word(text, self._done_s + start_s, self._done_s + at_s, 1.0))
        return tuple(out)


def _sizes() -> Iterator[int]:
    yield from CHUNK_FRAMES
    while True:
        yield CHUNK_FRAMES[-1]


class _Part:
    """The features of one part, from one pass of the prosody, and the state of their decoding.

    `at`: the number of frames decoded so far.
    """

    def __init__(
        self, voice: _Voice, ids: list[int], speed: float, random: np.random.Generator, *, lead: int, ends: bool = True
    ) -> None:
        features, f0, durations = voice.prosody.run(
            [FEATURES, F0, DURATIONS], {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        )
        self._decoder = voice.decoder
        self._features: Floats = features
        loud = np.nonzero(features[0, -1] > SILENCE_LEVEL)[0]
        # Silent frames that are cut at the start. Frame numbers are counted from the first frame after them.
        self._skipped_frames = max(0, int(loud[0]) - lead) if len(loud) else 0
        last = len(f0[0]) if ends or not len(loud) else min(len(f0[0]), int(loud[-1]) + 1 + TAIL_FRAMES)
        self._f0: Floats = f0[0, self._skipped_frames : last]
        self._random = random
        self._pulses = np.zeros(0, np.float32)
        self.num_frames = len(self._f0)
        self.at = 0
        self._sum = np.zeros((WINDOW_HOPS - 1, dsp.HOP), np.float32)
        # The end of each phoneme in seconds.
        self._ends_s = np.cumsum(durations.reshape(-1), dtype=np.float64) * DURATION_S - self._skipped_frames * FRAME_S

    @property
    def seconds(self) -> float:
        """The duration of the whole part, without the silence that is cut at its start."""
        return float(self.num_frames * FRAME_S)

    @property
    def over(self) -> bool:
        """Whether all frames of the part are decoded."""
        return self.at >= self.num_frames

    def spans(self, words: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """Return the start and end in seconds of each word, given the indices of its first and last phoneme."""
        out = []
        loud = self._features[0, -1, self._skipped_frames :] > SILENCE_LEVEL
        for k, (first, last) in enumerate(words):
            start_s, end_s = self._ends_s[first - 1], self._ends_s[last]
            if k:
                start_s -= min(WORD_MARGIN_S, (start_s - self._ends_s[words[k - 1][1]]) / 2)
            if k + 1 < len(words):
                end_s += min(WORD_MARGIN_S, (self._ends_s[words[k + 1][0] - 1] - end_s) / 2)
            start, end = (min(max(0.0, s - AUDIO_LEAD_S), self.seconds) for s in (start_s, end_s))
            # A word before a pause ends with its audio, not at the end of the pause.
            from_frame = int(start / FRAME_S)
            heard = np.nonzero(loud[from_frame : int(end / FRAME_S) + 1])[0]
            if len(heard):
                end = min(end, (from_frame + int(heard[-1]) + 1) * FRAME_S)
            out.append((float(start), float(max(start, end))))
        return out

    def decode(self, num_frames: int) -> Pcm:
        """Return the audio of the next frames. It lags WINDOW_HOPS / 2 frames behind them until the last chunk."""
        start, end = self.at, min(self.at + num_frames, self.num_frames)
        # A remainder much shorter than a chunk's context is not worth a pass of its own.
        if self.num_frames - end < CONTEXT_FRAMES // 2:
            end = self.num_frames
        # The context may include frames that were cut.
        low, high = max(-self._skipped_frames, start - CONTEXT_FRAMES), min(self.num_frames, end + CONTEXT_FRAMES)
        seen = self._features[:, :, low + self._skipped_frames : high + self._skipped_frames]
        out = self._decoder.run(list(SPECTRUM), {FEATURES: seen})
        harmonics, theta, noise, rest, phase = (o[0][:, start - low : end - low] for o in out)
        spectrum = self._excitation(start, end)
        turn = np.empty(harmonics.shape, np.complex64)
        angle = np.tanh(theta)
        angle *= np.float32(np.pi)
        np.cos(angle, out=turn.real)
        np.sin(angle, out=turn.imag)
        turn *= dsp.ex(harmonics)
        spectrum *= turn
        # Drawn frame by frame, so that the noise of a seed does not depend on the chunk sizes.
        gauss = self._random.standard_normal((end - start, 2 * len(noise)), dtype=np.float32).view(np.complex64).T
        spectrum += gauss * dsp.ex(noise)
        np.cos(phase, out=turn.real)
        np.sin(phase, out=turn.imag)
        turn *= dsp.ex(rest)
        spectrum += turn
        self.at = end
        return self._overlap_add(spectrum, start, end)

    def _excitation(self, start: int, end: int) -> Any:
        """Return the STFT of the pulse train at frames [start, end): complex64 [bins, frames]."""
        low, high = max(0, start - WINDOW_HOPS), min(self.num_frames, end + WINDOW_HOPS)
        if len(self._pulses) < high * dsp.HOP:
            # The phase accumulates from the start. The first chunk computes only the pulses that it needs. The second
            # computes all pulses.
            f0 = self._f0 if len(self._pulses) else self._f0[: high + 1]
            whole = len(f0) == self.num_frames
            self._pulses = dsp.pulses(f0)[: None if whole else high * dsp.HOP]
        piece = self._pulses[low * dsp.HOP : high * dsp.HOP]
        if len(piece) <= dsp.N_FFT // 2:
            piece = np.pad(piece, (0, dsp.N_FFT))
        return dsp.stft(piece, high - low)[:, start - low : end - low]

    def _overlap_add(self, spectrum: Any, start: int, end: int) -> Pcm:
        frames = dsp.irfft(spectrum.T, dsp.N_FFT, 1)
        frames *= dsp.WIN
        frames = frames.reshape(end - start, WINDOW_HOPS, dsp.HOP)
        total = np.zeros((end - start + WINDOW_HOPS - 1, dsp.HOP), np.float32)
        total[: WINDOW_HOPS - 1] = self._sum
        for k in range(WINDOW_HOPS):
            total[k : k + end - start] += frames[:, k]
        done = len(total) if end == self.num_frames else end - start
        self._sum = total[done:]
        # Hop j of the part begins at sample (j - WINDOW_HOPS / 2) * HOP. The first WINDOW_HOPS / 2 hops lie before the
        # audio, and the last ones after it.
        first = max(0, WINDOW_HOPS // 2 - start)
        last = min(done, self.num_frames + WINDOW_HOPS // 2 - start)
        return np.asarray((total[first:last] * self._norm(start + first, start + last)).reshape(-1))

    def _norm(self, first: int, last: int) -> Floats:
        """Return 1 / the sum of the squared windows over hops [first, last)."""
        squared = (dsp.WIN * dsp.WIN).reshape(WINDOW_HOPS, dsp.HOP)
        block = np.arange(first, last)
        out = np.zeros((last - first, dsp.HOP), np.float32)
        for k in range(WINDOW_HOPS):
            inside = (block - k >= 0) & (block - k < self.num_frames)
            out[inside] += squared[k]
        return np.asarray(1.0 / np.maximum(out, 1e-11), np.float32)
