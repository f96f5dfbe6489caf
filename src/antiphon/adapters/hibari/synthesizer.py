"""hibari (English, 24 kHz, int8 ONNX): text to audio in chunks that join without a seam, and the time of every word.

The published graph goes from phonemes to the spectrum of a whole sentence. It consists of two: the prosody reads the
sentence and gives each phoneme a duration and each frame its features; the decoder, convolutions only, turns frames
into spectra. The graph is cut in two there, so that the prosody runs once a sentence and the decoder chunk by chunk. A
chunk is given as many frames of context on either side as its convolutions reach, and is what the whole would have been
there (but for the rounding of int8 activations, whose scale is that of the chunk). Numbers of the model: hibari-tts
0.2.1, "ONNX interface" in its readme and `hibari/dsp.py`.

What is said for what is written is decided in `normalize.py`.
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

# Where the graph is cut, and the durations inside it.
FEATURES, F0, DURATIONS = "/Concat_43_output_0", "f0", "/Clip_output_0"
SPECTRUM = ("lh", "theta", "ln", "lr", "phi")
# Frames of context on either side: the decoder reaches 3 frames by its first convolution and 3 by each of 8 blocks.
CONTEXT_FRAMES = 27
# A unit of duration is two frames of 12.5 ms.
FRAME_S = dsp.HOP / dsp.SR
DURATION_S = 2 * FRAME_S
# How many frames the window of the inverse STFT spans.
WINDOW_HOPS = dsp.N_FFT // dsp.HOP
# Frames in a text's chunks: the first is 0.3 s of audio, made in a few milliseconds; a long chunk costs less a second.
CHUNK_FRAMES = (24, 60, 160, 240)
# Frames of audio before the first word. The third of a second of silence that the model begins with is left out.
LEAD_FRAMES = 6
# Most frames of silence after a part that does not end a sentence, which goes on in the next part.
TAIL_FRAMES = 8
SENTENCE_ENDS = frozenset(".!?…")
# Where words lie, by forced alignment of 15 sentences (bench/tts.py measures it on others): audio is this much ahead of
# the durations; a word reaches at most this far into the space before and after it; up to this energy (a feature) there
# is silence.
AUDIO_LEAD_S, WORD_MARGIN_S, SILENCE_LEVEL = 0.05, 0.04, 0.0
# The range of the model's own `speed` input.
SPEEDS = (0.5, 2.0)
# The lane's queue is at least so long: every text that is being spoken has a job in it, and a chunk takes milliseconds.
MIN_QUEUE = 1024
PAUSE_CHARS = frozenset(' ;:,.!?—…"“”()')


class Hibari:
    """A Synthesizer of English voices, which share a lane and, for each kind of English, a phonemizer.

    `folder` holds the default voice's `hibari.onnx`; `voices`: the folders of other voices, by their model ids. A
    voice is named in the profile as its id without "hibari-". Each voice's graphs compute on one core, in the lane's
    threads.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        voices: Mapping[str, Path] | None = None,
    ) -> None:
        """Load all voices, and their phonemizers. Waits for seconds.

        Raises ModelError for a voice that does not load.
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
                # onnx, onnxruntime and the phonemizer have no common class for what they raise over a file.
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
        """Yield the audio of a text, float32 at 24 kHz, from the first 0.3 s on; each chunk is one job of the lane.

        A text with nothing to say (emoji, marks) yields no samples. The `skipped` letters and words before the first
        sample come with it. Closing the generator ends the synthesis within a chunk. Raises RemoteProtocolError where
        letters were skipped and nothing is left to say, Refused where the lane is full, ModelError.
        """
        utterance = _Utterance(self._voices[options.voice], text, options)
        # What comes before the first samples is held back: if none follow, the text cannot be spoken.
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
    """The two halves of a voice's graph, each in a session of its own, and the phonemizer that the voice shares."""

    def __init__(self, path: Path, phonemizer: _Phonemizer) -> None:
        extractor = Extractor(onnx.load(str(path)))
        self.prosody = _session(extractor.extract_model(["ids", "speed"], [FEATURES, F0, DURATIONS]))
        self.decoder = _session(extractor.extract_model([FEATURES], list(SPECTRUM)))
        self.phonemizer = phonemizer


class _Phonemizer:
    """The phonemizer of one kind of English. Its methods may be called from several threads: a lock serializes them."""

    def __init__(self, british: bool) -> None:
        self._g2p = G2P(british=british)
        self._vocabulary = dict(json.loads((Path(ASSETS) / "vocab.json").read_text(encoding="utf-8")))
        # Its out-of-vocabulary net is made on first use: made here, that is in one thread and before the first text.
        _ = self._g2p.oov
        self._lock = threading.Lock()

    def phonemes(self, part: SpokenPart) -> tuple[list[int], list[int | None]]:
        """Return a part's phoneme ids, padded at both ends, and for each the index of its written word, or None."""
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
    """A key for `groupby`: tokens of one word, as white space divides them, have the same number."""

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
    """One text that is being synthesized, in the lane's threads; at most one step runs at a time."""

    def __init__(self, voice: _Voice, text: str, options: VoiceOptions) -> None:
        self._voice = voice
        self._speed = options.speed
        self._random = np.random.default_rng(options.seed)
        self._parts = parts(text)
        self._part: _Part | None = None
        self._done_s = 0.0
        self._chunks: Iterator[int] = _sizes()

    def step(self) -> SpeechChunk | None:
        """Return the next chunk, which has no samples for a part that is not heard; None at the end of the text."""
        skipped, words, num_symbols = "", tuple[Word, ...](), 0
        if self._part is None:
            spoken = next(self._parts, None)
            if spoken is None:
                return None
            skipped = spoken.skipped
            ids, written = self._voice.phonemizer.phonemes(spoken)
            # A part of nothing but marks is not heard.
            if all(word is None for word in written):
                mute = tuple(Word(w, self._done_s, self._done_s, 1.0) for w in spoken.written)
                return SpeechChunk(np.zeros(0, np.float32), mute, skipped)
            ends = spoken.text.rstrip("\"'”’)]")[-1:] in SENTENCE_ENDS
            self._part = _Part(self._voice, ids, self._speed, self._random, ends=ends)
            words, num_symbols = self._words(spoken, written, self._part), len(ids) - 2
        before = self._part.at
        pcm = self._part.decode(next(self._chunks))
        num_frames = self._part.at - before
        if self._part.over:
            self._done_s += self._part.seconds
            self._part = None
        return SpeechChunk(pcm, words, skipped, num_symbols, num_frames)

    def _words(self, spoken: SpokenPart, written: list[int | None], part: _Part) -> tuple[Word, ...]:
        """Return every written word in order; one that is not said is at the end of the one before, for no time."""
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
    """One pass of the prosody, which is decoded a few frames at a time. `at`: frames decoded so far."""

    def __init__(
        self, voice: _Voice, ids: list[int], speed: float, random: np.random.Generator, *, ends: bool = True
    ) -> None:
        features, f0, durations = voice.prosody.run(
            [FEATURES, F0, DURATIONS], {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        )
        self._decoder = voice.decoder
        self._features: Floats = features
        loud = np.nonzero(features[0, -1] > SILENCE_LEVEL)[0]
        # Frames that are left out at the start. All others are counted from there on.
        self._skipped_frames = max(0, int(loud[0]) - LEAD_FRAMES) if len(loud) else 0
        last = len(f0[0]) if ends or not len(loud) else min(len(f0[0]), int(loud[-1]) + 1 + TAIL_FRAMES)
        self._f0: Floats = f0[0, self._skipped_frames : last]
        self._random = random
        self._pulses = np.zeros(0, np.float32)
        self.num_frames = len(self._f0)
        self.at = 0
        self._sum = np.zeros((WINDOW_HOPS - 1, dsp.HOP), np.float32)
        # Where each phoneme ends.
        self._ends_s = np.cumsum(durations.reshape(-1), dtype=np.float64) * DURATION_S - self._skipped_frames * FRAME_S

    @property
    def seconds(self) -> float:
        """The duration of the whole part, without the silence that is left out at its start."""
        return float(self.num_frames * FRAME_S)

    @property
    def over(self) -> bool:
        """Whether all frames are decoded."""
        return self.at >= self.num_frames

    def spans(self, words: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """Return the start and end of words in seconds, given the first and last phoneme of each."""
        out = []
        loud = self._features[0, -1, self._skipped_frames :] > SILENCE_LEVEL
        for k, (first, last) in enumerate(words):
            start_s, end_s = self._ends_s[first - 1], self._ends_s[last]
            if k:
                start_s -= min(WORD_MARGIN_S, (start_s - self._ends_s[words[k - 1][1]]) / 2)
            if k + 1 < len(words):
                end_s += min(WORD_MARGIN_S, (self._ends_s[words[k + 1][0] - 1] - end_s) / 2)
            start, end = (min(max(0.0, s - AUDIO_LEAD_S), self.seconds) for s in (start_s, end_s))
            # A word before a pause ends where its audio does, not where the pause is over.
            from_frame = int(start / FRAME_S)
            heard = np.nonzero(loud[from_frame : int(end / FRAME_S) + 1])[0]
            if len(heard):
                end = min(end, (from_frame + int(heard[-1]) + 1) * FRAME_S)
            out.append((float(start), float(max(start, end))))
        return out

    def decode(self, num_frames: int) -> Pcm:
        """Return the audio of the next frames. It is WINDOW_HOPS / 2 frames behind them until the last chunk."""
        start, end = self.at, min(self.at + num_frames, self.num_frames)
        # A rest shorter than a chunk's own context is not worth a pass.
        if self.num_frames - end < CONTEXT_FRAMES // 2:
            end = self.num_frames
        # The context may reach into the frames that are left out.
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
        # Frame by frame, so that the noise of a seed does not depend on the chunks.
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
            # The phase runs from the start: the head is made for the first chunk, the whole for the others.
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
        # Hop j of the whole is sample (j - WINDOW_HOPS / 2) * HOP: the first WINDOW_HOPS / 2 hops lie before the audio,
        # the last after it.
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
