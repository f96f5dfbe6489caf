"""Whisper by CTranslate2: windows for live sessions and whole files, through one lane and one copy of the weights.

Live windows are shorter than Whisper's 30 s, whose encoding is most of its cost on a CPU. Measured on read English
with the base model: windows of at least 15 s with 3 s of padding and a beam of 5 give the word errors of 30 s windows at a third of the
time (56 clips); of at least 10 s, 10.0 against 9.8 % in 0.25 s instead of 0.38 (97 clips); with a beam of 1 or less padding the errors
grow. Partials run on 5 s windows with 2 s of padding. A short window needs the padding
and a cap on tokens, else the decoder repeats itself.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Idle OpenMP threads of one worker must not spin on the core of another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    HypothesisWord,
    TranscriberProfile,
    TranscriptSegment,
    Urgency,
    Window,
)
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.events.words import Word
from antiphon.modeling.token_words import words

FRAMES_PER_S = 100
SAMPLES_PER_FRAME = 160
MAX_FRAMES = 3000
# Most tokens a second of speech, against endless repetition. English speech has 4 on average and 7 in fast passages; a cap
# of 7 cut the ends of long finals off. A partial of a second of sound says its two words again and again up to the cap.
FINAL_TOKENS_PER_S, FINAL_SPARE_TOKENS = 12.0, 16
PARTIAL_TOKENS_PER_S, PARTIAL_SPARE_TOKENS = 7.0, 2
# Scripts whose characters take a token or more each.
OTHER_TOKENS_PER_S = 14.0
# Both must hold before a window counts as noise; the first is OpenAI's threshold (whisper/transcribe.py).
NO_SPEECH = 0.6
NO_SPEECH_LOGPROB = -0.8
# Below this mean log-probability a window is noise whatever else the model says (whisper/transcribe.py uses -1.0).
UNLIKELY_LOGPROB = -1.2
MAX_PROMPT_TOKENS = 200
# A final that compresses better than this is a loop (whisper/transcribe.py); then no run of so many tokens may come twice.
LOOP_COMPRESSION = 2.4
LOOP_MIN_BYTES = 80
LOOP_NGRAM = 4
# A word is at most twice this or twice the median, if that is less.
MEDIAN_WORD_S = 0.7
PAUSE_MARKS = tuple(".,?!;:。，？！、")
# Files are decoded in slabs of this length, cut in a quiet place of the last SLAB_SLACK_S seconds.
SLAB_S = 120
SLAB_SLACK_S = 15


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a window is padded and searched. Seconds."""

    least_s: float
    pad_s: float
    beam: int


_PARTIAL = _Shape(least_s=5.0, pad_s=2.0, beam=1)
_FINAL = _Shape(least_s=10.0, pad_s=3.0, beam=5)

Work = Window | Callable[[], Any]


class WhisperTranscriber:
    """One CTranslate2 Whisper model and its lane of `workers` single-threaded workers."""

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        device: str = "cpu",
        compute_type: str = "int8",
        workers: int = 2,
        max_batch: int = 1,
        max_queue: int = 256,
        observe: Callable[[int, float, float], None] | None = None,
    ) -> None:
        try:
            self._whisper = WhisperModel(
                str(folder), device=device, compute_type=compute_type, cpu_threads=1, num_workers=workers
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{model_id} does not load on {device} as {compute_type}: {error}") from error
        self._model = self._whisper.model
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}
        self._profile = TranscriberProfile(
            id=model_id,
            languages=tuple(self._whisper.supported_languages),
            step_s=0.3,
            first_step_s=0.2,
            agreement_s=0.9,
            first_agreement_s=0.2,
            rollback_tokens=1,
            min_probability=0.3,
            unfixed_chunks=0,
            settle_s=0.5,
            context_pause_s=1.5,
            pause_s=0.8,
            long_window_s=10.0,
            long_pause_s=0.3,
            max_window_s=22.0,
            context_tokens=0,
            max_tokens=224,
            max_prefix_tokens=180,
        )
        # One job a batch on a CPU: batches of 2 to 8 measured no faster than one after another (docs/architecture.md).
        self.lane: Lane[Work, Any] = Lane(
            "transcriber", self._work, workers=workers, max_batch=max_batch, max_queue=max_queue, observe=observe
        )

    @property
    def profile(self) -> TranscriberProfile:
        return self._profile

    def busy(self) -> bool:
        """Somebody waits for a worker."""
        return self.lane.depth > 0

    def close(self) -> None:
        self.lane.close()

    def open(self) -> WhisperStream:
        """See Transcriber. Nothing of a session is kept."""
        return WhisperStream(self)

    async def decode(self, window: Window) -> Hypothesis:
        """One window; see Hearing.decode."""
        urgency = Urgency.FINAL if window.final else Urgency.PARTIAL
        result = await self.lane.run(window, urgency, self._key(window))
        assert isinstance(result, Hypothesis)
        return result

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Where each word lies; see Transcriber.align."""
        if not words or len(pcm) > MAX_FRAMES * SAMPLES_PER_FRAME:
            return ()
        found: tuple[Word, ...] = await self.lane.run(
            partial(self._align, pcm, tuple(words), language), Urgency.PARTIAL
        )
        return found

    async def transcribe(self, pcm: Pcm, options: FileOptions) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """A file in slabs of two minutes, each window of a slab one lane job: live sessions get their turn between."""
        language, number, begun = options.language, 0, False
        for slab in split_at_quiet(pcm, SLAB_S, SLAB_SLACK_S):
            segments, info = await self.lane.run(self._opener(pcm[slab], options, language), Urgency.BULK)
            language = info.language
            if not begun:
                begun = True
                yield FileInfo(info.language, len(pcm) / SAMPLE_RATE_HZ)
            while (raw := await self.lane.run(partial(next, segments, None), Urgency.BULK)) is not None:
                yield _segment(number, raw, slab.start)
                number += 1

    def _opener(self, pcm: Pcm, options: FileOptions, language: str | None) -> Callable[[], tuple[Iterator[Any], Any]]:
        def begin() -> tuple[Iterator[Any], Any]:
            segments, info = self._whisper.transcribe(
                pcm,
                language=language,
                task=options.task,
                initial_prompt=_defused(options.prompt) or None,
                # A temperature of 0 means: 0, and higher only where the decode fails (OpenAI's own fallback).
                temperature=options.temperature or (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
                word_timestamps=options.word_times,
                condition_on_previous_text=False,
                beam_size=_FINAL.beam,
            )
            return iter(segments), info

        return begin

    # --- in a worker's thread ------------------------------------------------------------------------------------

    def _work(self, jobs: Sequence[Work]) -> list[Any]:
        windows = [j for j in jobs if isinstance(j, Window)]
        if len(windows) == len(jobs):
            return self._decode(windows)
        return [job() for job in jobs if not isinstance(job, Window)]

    def _key(self, window: Window) -> tuple[int, int, bool, bool]:
        """Windows with equal keys may share a batch: same frames, same search, no text before the start token."""
        return (_num_frames(window), self._num_text_tokens(window), window.final, window.word_times)

    def _num_text_tokens(self, window: Window) -> int:
        return len(self._text_tokens(window)) if window.context or window.prompt else 0

    def _decode(self, windows: Sequence[Window]) -> list[Hypothesis]:
        frames = _num_frames(windows[0])
        shape = _FINAL if windows[0].final else _PARTIAL
        encoded = self._model.encode(
            ctranslate2.StorageView.from_array(np.stack([self._features(w.pcm, frames) for w in windows])),
            to_cpu=self._model.device == "cuda" and len(self._model.device_index) > 1,
        )
        languages = self._languages(windows, encoded)
        prompts = [self._prompt(w, lang) + list(w.prefix) for w, (lang, _) in zip(windows, languages, strict=True)]
        cap = max(self._token_cap(w, lang) for w, (lang, _) in zip(windows, languages, strict=True))
        outputs = self._generate(encoded, prompts, cap, shape)
        tokens = self._new_ids(outputs, windows, languages)
        if shape is _FINAL and any(_repeats(self._tokenizer("en").decode(ids)) for ids in tokens):
            # The decoder fell into a loop; where OpenAI tries again with chance, forbidding the loop is deterministic.
            outputs = self._generate(encoded, prompts, cap, shape, no_repeat_ngram_size=LOOP_NGRAM)
            tokens = self._new_ids(outputs, windows, languages)
        ends = self._token_ends(encoded, windows, languages, tokens) if windows[0].word_times else [()] * len(windows)
        results = []
        for (language, sureness), output, ids, prompt, times in zip(
            languages, outputs, tokens, prompts, ends, strict=True
        ):
            likely = _probabilities(output, len(ids)) if shape.beam == 1 else [1.0] * len(ids)
            pieces = _pieces(self._tokenizer(language), ids, likely, language)
            logprob = output.scores[0]  # the mean over the sequence
            heard = logprob >= UNLIKELY_LOGPROB and not (
                output.no_speech_prob > NO_SPEECH and logprob < NO_SPEECH_LOGPROB
            )
            results.append(Hypothesis(pieces, language, sureness, heard, len(prompt), len(ids), _words(pieces, times)))
        return results

    def _generate(
        self, encoded: Any, prompts: list[list[int]], cap: int, shape: _Shape, *, no_repeat_ngram_size: int = 0
    ) -> list[Any]:
        return self._model.generate(  # type: ignore[no-any-return]
            encoded,
            prompts,
            beam_size=shape.beam,
            max_length=max(len(p) for p in prompts) + cap,
            no_repeat_ngram_size=no_repeat_ngram_size,
            return_scores=True,
            return_no_speech_prob=True,
            return_logits_vocab=shape.beam == 1,
            suppress_blank=True,
        )

    def _new_ids(
        self, outputs: Sequence[Any], windows: Sequence[Window], languages: Sequence[tuple[str, float]]
    ) -> list[list[int]]:
        """The text tokens after each window's prefix."""
        return [
            self._text_ids(o, lang)[len(w.prefix) :]
            for o, w, (lang, _) in zip(outputs, windows, languages, strict=True)
        ]

    def _languages(self, windows: Sequence[Window], encoded: Any) -> list[tuple[str, float]]:
        if not self._model.is_multilingual:
            return [("en", 1.0)] * len(windows)
        if all(w.language for w in windows):
            return [(w.language or "en", 1.0) for w in windows]
        found = [(token[2:-2], float(p)) for ((token, p), *_) in self._model.detect_language(encoded)]
        return [(w.language, 1.0) if w.language else f for w, f in zip(windows, found, strict=True)]

    def _prompt(self, window: Window, language: str) -> list[int]:
        tokenizer = self._tokenizer(language)
        text = self._text_tokens(window)
        head = [tokenizer.sot_prev, *text] if text else []
        return head + list(tokenizer.sot_sequence) + [tokenizer.no_timestamps]

    def _text_tokens(self, window: Window) -> list[int]:
        """The hint and what was said before, as plain text tokens, the newest kept."""
        out: list[int] = []
        for text, most in ((window.prompt, MAX_PROMPT_TOKENS), (window.context, self._profile.context_tokens)):
            if text.strip() and most:
                # encode() of the tokenizer behind would read "<|...|>" as a control token: take the ordinary ids only.
                ids = self._whisper.hf_tokenizer.encode(_defused(" " + text.strip()), add_special_tokens=False).ids
                out += [i for i in ids if i < self._tokenizer("en").eot][-most:]
        return out[-MAX_PROMPT_TOKENS:]

    def _token_cap(self, window: Window, language: str) -> int:
        if window.final:
            rate, spare = FINAL_TOKENS_PER_S, FINAL_SPARE_TOKENS
        else:
            rate, spare = PARTIAL_TOKENS_PER_S, PARTIAL_SPARE_TOKENS
        if language != "en":
            rate = max(rate, OTHER_TOKENS_PER_S)
        cap = int(len(window.pcm) / SAMPLE_RATE_HZ * rate) + spare
        return min(max(1, cap - len(window.prefix)), window.max_tokens or self._profile.max_tokens)

    def _tokenizer(self, language: str) -> Tokenizer:
        key = (language, "transcribe")
        if key not in self._tokenizers:
            self._tokenizers[key] = Tokenizer(
                self._whisper.hf_tokenizer, self._model.is_multilingual, task="transcribe", language=language
            )
        return self._tokenizers[key]

    def _text_ids(self, output: Any, language: str) -> list[int]:
        return [t for t in output.sequences_ids[0] if t < self._tokenizer(language).eot]

    def _features(self, pcm: Pcm, frames: int) -> Pcm:
        padded = np.zeros(frames * SAMPLES_PER_FRAME, np.float32)
        padded[: len(pcm)] = pcm[: len(padded)]
        features = self._whisper.feature_extractor(padded, padding=0)
        return np.ascontiguousarray(features[:, :frames], np.float32)

    def _align(self, pcm: Pcm, words: tuple[str, ...], language: str) -> tuple[Word, ...]:
        """The words' tokens forced on the sound; times by cross-attention, as of a transcript's words."""
        window = Window(pcm, language=language if self._model.is_multilingual else "en")
        ids = [self._whisper.hf_tokenizer.encode(_defused(" " + w), add_special_tokens=False).ids for w in words]
        flat = [i for word in ids for i in word]
        if not flat or len(flat) > self._profile.max_tokens:
            return ()
        encoded = self._model.encode(ctranslate2.StorageView.from_array(self._features(pcm, _num_frames(window))[None]))
        (spans,) = self._token_ends(encoded, [window], [(window.language or "en", 1.0)], [flat])
        pieces = [HypothesisWord(w, tuple(i), 1.0) for w, i in zip(words, ids, strict=True) if i]
        return _words(pieces, spans)

    def _token_ends(
        self, encoded: Any, windows: Sequence[Window], languages: Sequence[tuple[str, float]], tokens: list[list[int]]
    ) -> list[tuple[tuple[float, float, float], ...]]:
        """(start, end, probability) of each token after the prefix, from the decoder's cross-attention; seconds."""
        out: list[tuple[tuple[float, float, float], ...]] = []
        for i, (window, (language, _), ids) in enumerate(zip(windows, languages, tokens, strict=True)):
            if not ids:
                out.append(())
                continue
            one = encoded if len(windows) == 1 else ctranslate2.StorageView.from_array(np.asarray(encoded)[i : i + 1])
            text = [*window.prefix, *ids]
            found = self._model.align(
                one,
                self._tokenizer(language).sot_sequence,
                [text],
                [min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)],
                median_filter_width=7,
            )[0]
            starts = _first_times(found.alignments, len(text))
            likely = found.text_token_probs
            spans = [(starts[k], starts[k + 1], float(likely[k])) for k in range(len(text))]
            out.append(tuple(spans[len(window.prefix) :]))
        return out


class WhisperStream:
    """See Hearing."""

    def __init__(self, model: WhisperTranscriber) -> None:
        self._model = model

    async def decode(self, window: Window) -> Hypothesis:
        """See Hearing."""
        return await self._model.decode(window)

    def close(self) -> None:
        """See Hearing."""


def _repeats(text: str) -> bool:
    """The text says the same over and over: it compresses too well (whisper/transcribe.py, the same measure)."""
    data = text.encode()
    return len(data) > LOOP_MIN_BYTES and len(data) / len(zlib.compress(data)) > LOOP_COMPRESSION


def _num_frames(window: Window) -> int:
    """Mel frames the window is padded to: a whole number of half seconds, so that windows can share a batch."""
    shape = _FINAL if window.final else _PARTIAL
    seconds = max(shape.least_s, len(window.pcm) / SAMPLE_RATE_HZ + shape.pad_s)
    return min(MAX_FRAMES, math.ceil(seconds * 2) * FRAMES_PER_S // 2)


def _defused(text: str) -> str:
    """Text in which no `<|` can start a control token."""
    return text.replace("<|", "< |")


def _probabilities(output: Any, count: int) -> list[float]:
    """Softmax probability of each of the last `count` text tokens of a greedy output."""
    ids = output.sequences_ids[0]
    rows = output.logits[0]
    # One row a generated token; the end token's row is there when the decoder reached it.
    first = len(ids) - count if len(rows) >= len(ids) else 0
    likely = []
    for token, row in zip(ids[len(ids) - count :], rows[first:], strict=False):
        logits = np.asarray(row, np.float32).reshape(-1)
        likely.append(float(1.0 / np.exp(logits - logits[token]).sum()))
    return likely + [0.0] * (count - len(likely))


def _pieces(tokenizer: Tokenizer, ids: list[int], likely: list[float], language: str) -> tuple[HypothesisWord, ...]:
    texts, groups = tokenizer.split_tokens_on_unicode(ids) if ids else ([], [])
    pieces = words(texts, groups, likely, language)
    # Half a character at the end of a hypothesis is not text yet.
    if pieces and "\ufffd" in pieces[-1].text:
        pieces.pop()
    return tuple(pieces)


def _first_times(alignments: Sequence[tuple[int, int]], count: int) -> list[float]:
    """Start of each of `count` tokens and the end of the last, in seconds, from (token, frame) pairs of 20 ms frames."""
    starts: dict[int, int] = {}
    last = 0
    for token, frame in alignments:
        starts.setdefault(token, frame)
        last = max(last, frame + 1)
    times, now = [], 0
    for k in range(count + 1):
        now = max(now, starts.get(k, last if k == count else now))
        times.append(now * 0.02)
    return times


def _words(pieces: Sequence[HypothesisWord], times: Sequence[tuple[float, float, float]]) -> tuple[Word, ...]:
    """Words with their times. The silence before a word is aligned with its beginning: a word that is far longer than the

    others and follows a pause mark is given the length of a long word (as openai/whisper, timing.py, add_word_timestamps).
    """
    if not times:
        return ()
    words, at = [], 0
    for piece in pieces:
        spans = times[at : at + len(piece.tokens)]
        at += len(piece.tokens)
        words.append(Word(piece.text.strip(), spans[0][0], spans[-1][1], min(s[2] for s in spans)))
    lengths = sorted(w.end_s - w.start_s for w in words if w.end_s > w.start_s)
    longest = 2 * min(MEDIAN_WORD_S, lengths[len(lengths) // 2]) if lengths else math.inf
    for k, word in enumerate(words):
        after_pause = k == 0 or words[k - 1].text[-1:] in PAUSE_MARKS
        if after_pause and word.end_s - word.start_s > longest:
            words[k] = replace(word, start_s=word.end_s - longest)
    return tuple(words)


def _segment(number: int, raw: Any, offset: int) -> TranscriptSegment:
    shift_s = offset / SAMPLE_RATE_HZ
    words = tuple(
        Word(w.word.strip(), float(w.start) + shift_s, float(w.end) + shift_s, float(w.probability))
        for w in raw.words or ()
    )
    return TranscriptSegment(
        id=number,
        seek=int(raw.seek) + offset // SAMPLES_PER_FRAME,
        start_s=float(raw.start) + shift_s,
        end_s=float(raw.end) + shift_s,
        text=raw.text,
        tokens=tuple(raw.tokens),
        temperature=float(raw.temperature or 0.0),
        avg_logprob=float(raw.avg_logprob),
        compression_ratio=float(raw.compression_ratio),
        no_speech_prob=float(raw.no_speech_prob),
        words=words,
    )
