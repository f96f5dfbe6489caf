"""Whisper by CTranslate2: windows of live sessions and whole files, through one lane and one copy of the weights.

Live windows are shorter than Whisper's 30 s, whose encoding is most of its cost on a CPU. Measured on read English with
the base model: windows of at least 15 s with 3 s of padding and a beam of 5 give the word errors of 30 s windows at a
third of the time (56 clips); of at least 10 s, 10.0 against 9.8 % in 0.25 s instead of 0.38 (97 clips); with a beam of
1 or less padding the errors grow. Partials are decoded in windows of 5 s with 2 s of padding. A short window needs the
padding and a cap on tokens, else the decoder repeats itself.

Nothing of a session is kept between windows. How outputs become words is in `outputs.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

# Idle OpenMP threads of one worker must not spin on the core of another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.whisper import keyterms
from antiphon.adapters.whisper.outputs import (
    SAMPLES_PER_FRAME,
    TokenSpan,
    file_segment,
    hypothesis_words,
    is_loop,
    timed_words,
    token_probabilities,
    token_starts,
)
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

# Mel frames a second, and the most that the encoder takes: 30 s.
FRAMES_PER_S = 100
MAX_FRAMES = 3000
# Most tokens a second of speech, and besides, against endless repetition. English speech has 4 on average and 7 in fast
# passages; a cap of 7 cut the ends of long finals off. A partial of a second of audio says its two words again and
# again up to the cap.
FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS = 12.0, 16
PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS = 7.0, 2
# Scripts whose characters take a token or more each.
NON_LATIN_TOKENS_PER_S = 14.0
# A window counts as noise above this probability and below this mean log-probability; the first is OpenAI's threshold
# (whisper/transcribe.py).
NO_SPEECH_PROBABILITY = 0.6
NO_SPEECH_LOGPROB = -0.8
# Below this mean log-probability a window is noise in any case (whisper/transcribe.py uses -1.0).
MIN_LOGPROB = -1.2
MAX_PROMPT_TOKENS = 200
# What is encoded of a prompt for each of its tokens, from the end, and how many encoded texts are kept: a session gives
# the same prompt with each of its windows.
PROMPT_CHARS_PER_TOKEN, KEPT_PROMPTS = 16, 256
# A final that is a loop is decoded again, and then no run of so many tokens may come twice.
LOOP_TOKENS = 4
# Files are decoded in parts of this length, cut at the quietest place of the last PART_SLACK_S seconds.
PART_S = 120
PART_SLACK_S = 15


@dataclass(frozen=True, slots=True)
class _Search:
    """How a window is padded and searched: to at least `min_s`, with `pad_s` of silence, in seconds."""

    min_s: float
    pad_s: float
    beam_size: int


_PARTIAL = _Search(min_s=5.0, pad_s=2.0, beam_size=1)
_FINAL = _Search(min_s=10.0, pad_s=3.0, beam_size=5)

# A job of the lane: a window, or another call of the model, in the worker's thread.
Work = Window | Callable[[], Any]


class WhisperTranscriber:
    """A Transcriber: one CTranslate2 model, and a lane whose `workers` threads each compute on one core.

    `max_batch`: windows in one call of the model. `lane` is public for statistics.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        max_batch: int = 1,
    ) -> None:
        """Load the folder's model. Waits for seconds.

        Raises ModelError for a folder that does not load, or a type that the device does not have.
        """
        # CTranslate2 names the kind of device here and its number elsewhere.
        device, compute_type, workers = options.device.partition(":")[0], options.compute_type, options.workers
        try:
            self._whisper = WhisperModel(
                str(folder), device=device, compute_type=compute_type, cpu_threads=1, num_workers=workers
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{model_id} does not load on {device} as {compute_type}: {error}") from error
        self._model = self._whisper.model
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}
        self._prompt_text_tokens = lru_cache(KEPT_PROMPTS)(self._text_tokens)
        self._profile = _profile(model_id, tuple(self._whisper.supported_languages))
        # One job a batch on a CPU: batches of 2 to 8 measured no faster than one after another (docs/architecture.md).
        self.lane: Lane[Work, Any] = Lane(
            "transcriber",
            self._work,
            workers=workers,
            max_batch=max_batch,
            max_queue=options.max_queue,
            observe=options.observe,
        )

    @property
    def profile(self) -> TranscriberProfile:
        """The facts of the model. Finals do not keep the prefix that was sent, and its words are aligned."""
        return self._profile

    def busy(self) -> bool:
        """Return whether any job waits in the lane, so that one more would delay others. Does not wait."""
        return self.lane.depth > 0

    def close(self) -> None:
        """Close the lane: waiting jobs are cancelled, running ones are waited for, and the threads end."""
        self.lane.close()

    def open(self) -> WhisperStream:
        """Return a stream, which keeps nothing: every window is decoded from its start."""
        return WhisperStream(self)

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window, in a batch with others of the same shape. Finals come before partials.

        Partials are decoded greedily, with each word's probability; finals with a beam of 5, and probabilities of 1.0.
        A final that loops is decoded again with the loop forbidden. Waits in the lane. Raises Refused where it is full,
        ModelError.
        """
        urgency = Urgency.FINAL if window.final else Urgency.PARTIAL
        result = await self.lane.run(window, urgency, self._key(window))
        assert isinstance(result, Hypothesis)
        return result

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Return where each word lies, from the decoder's cross-attention with the words forced on the audio.

        Returns () for audio of more than 30 s and for more words than one window may have. Waits in the lane as a
        partial does. Raises Refused, ModelError.
        """
        if not words or len(pcm) > MAX_FRAMES * SAMPLES_PER_FRAME:
            return ()
        found: tuple[Word, ...] = await self.lane.run(
            partial(self._align, pcm, tuple(words), language), Urgency.PARTIAL
        )
        return found

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Yield the segments of a file, which is decoded in parts of about two minutes, then one FileInfo.

        The language found in the first part holds for the rest. Each window of 30 s is one job of the lane, behind all
        live ones. A `temperature` of 0 means OpenAI's own fallback: higher ones where the decode fails. Raises Refused,
        ModelError.
        """
        language, number, num_samples = options.language, 0, 0
        async for start, part in split_at_quiet(slabs, PART_S, PART_SLACK_S):
            segments, info = await self.lane.run(self._opener(part, options, language), Urgency.BULK)
            language, num_samples = info.language, start + len(part)
            while (raw := await self.lane.run(partial(next, segments, None), Urgency.BULK)) is not None:
                yield file_segment(number, raw, start)
                number += 1
        yield FileInfo(language or "en", num_samples / SAMPLE_RATE_HZ)

    def _opener(self, pcm: Pcm, options: FileOptions, language: str | None) -> Callable[[], tuple[Iterator[Any], Any]]:
        def begin() -> tuple[Iterator[Any], Any]:
            segments, info = self._whisper.transcribe(
                pcm,
                language=language,
                task=options.task,
                initial_prompt=_without_control_tokens(options.prompt) or None,
                temperature=options.temperature or (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
                word_timestamps=options.word_times,
                condition_on_previous_text=False,
                beam_size=_FINAL.beam_size,
            )
            return iter(segments), info

        return begin

    # The methods from here on are called in the workers' threads, but for _key and what it calls.

    def _work(self, jobs: Sequence[Work]) -> list[Any]:
        windows = [j for j in jobs if isinstance(j, Window)]
        if len(windows) == len(jobs):
            return self._decode(windows)
        return [job() for job in jobs if not isinstance(job, Window)]

    def _key(self, window: Window) -> tuple[int, int, bool, bool]:
        """Windows with equal keys may share a batch: same frames, same search, as many tokens before the start."""
        return (_num_frames(window), self._num_prompt_tokens(window), window.final, window.word_times)

    def _num_prompt_tokens(self, window: Window) -> int:
        return len(self.prompt_tokens(window)) if window.context or window.prompt else 0

    def _decode(self, windows: Sequence[Window]) -> list[Hypothesis]:
        frames = _num_frames(windows[0])
        search = _FINAL if windows[0].final else _PARTIAL
        encoded = self._model.encode(
            ctranslate2.StorageView.from_array(np.stack([self._features(w.pcm, frames) for w in windows])),
            to_cpu=self._model.device == "cuda" and len(self._model.device_index) > 1,
        )
        languages = self._languages(windows, encoded)
        prompts = [self._prompt(w, lang) + list(w.prefix) for w, (lang, _) in zip(windows, languages, strict=True)]
        cap = max(self._token_cap(w, lang) for w, (lang, _) in zip(windows, languages, strict=True))
        outputs = self._generate(encoded, prompts, cap, search)
        tokens = self._new_ids(outputs, windows, languages)
        if search is _FINAL and any(is_loop(self.tokenizer("en").decode(ids)) for ids in tokens):
            # The decoder fell into a loop; where OpenAI tries again with chance, forbidding the loop is deterministic.
            outputs = self._generate(encoded, prompts, cap, search, no_repeat_ngram_size=LOOP_TOKENS)
            tokens = self._new_ids(outputs, windows, languages)
        if search is _FINAL and any(w.keyterms for w in windows):
            tokens = [
                self._with_keyterms(encoded, i, *a) for i, a in enumerate(zip(windows, languages, tokens, strict=True))
            ]
        timed = windows[0].word_times
        spans = self._token_spans(encoded, windows, languages, tokens) if timed else [()] * len(windows)
        return [
            self._hypothesis(output, ids, language, len(prompt), own, greedy=search.beam_size == 1)
            for language, output, ids, prompt, own in zip(languages, outputs, tokens, prompts, spans, strict=True)
        ]

    def _hypothesis(
        self,
        output: Any,
        ids: list[int],
        language: tuple[str, float],
        num_prompt: int,
        spans: tuple[TokenSpan, ...],
        *,
        greedy: bool,
    ) -> Hypothesis:
        code, certainty = language
        # Only a greedy search returns logits.
        probabilities = token_probabilities(output, len(ids)) if greedy else [1.0] * len(ids)
        pieces = hypothesis_words(self.tokenizer(code), ids, probabilities, code)
        logprob = output.scores[0]  # the mean over the sequence
        is_noise = output.no_speech_prob > NO_SPEECH_PROBABILITY and logprob < NO_SPEECH_LOGPROB
        is_speech = logprob >= MIN_LOGPROB and not is_noise
        return Hypothesis(pieces, code, certainty, is_speech, num_prompt, len(ids), timed_words(pieces, spans))

    def _generate(
        self, encoded: Any, prompts: list[list[int]], cap: int, search: _Search, *, no_repeat_ngram_size: int = 0
    ) -> list[Any]:
        return self._model.generate(  # type: ignore[no-any-return]
            encoded,
            prompts,
            beam_size=search.beam_size,
            max_length=max(len(p) for p in prompts) + cap,
            no_repeat_ngram_size=no_repeat_ngram_size,
            return_scores=True,
            return_no_speech_prob=True,
            return_logits_vocab=search.beam_size == 1,
            suppress_blank=True,
        )

    def _new_ids(
        self, outputs: Sequence[Any], windows: Sequence[Window], languages: Sequence[tuple[str, float]]
    ) -> list[list[int]]:
        """Return the text tokens after each window's prefix."""
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
        tokenizer = self.tokenizer(language)
        text = self.prompt_tokens(window)
        head = [tokenizer.sot_prev, *text] if text else []
        return head + list(tokenizer.sot_sequence) + [tokenizer.no_timestamps]

    def prompt_tokens(self, window: Window) -> list[int]:
        """Return the tokens that come before a window's start token: its hint, and what was said before it.

        They are plain text, none of them a control token. Of each of the two the newest tokens are kept, at most
        MAX_PROMPT_TOKENS in all.
        """
        out: list[int] = []
        for text, most in ((window.prompt, MAX_PROMPT_TOKENS), (window.context, self._profile.context_tokens)):
            if text.strip() and most:
                out += self._prompt_text_tokens(text.strip()[-PROMPT_CHARS_PER_TOKEN * most :])[-most:]
        return out[-MAX_PROMPT_TOKENS:]

    def _text_tokens(self, text: str) -> list[int]:
        # The tokenizer reads "<|...|>" as a control token: only the ids of text are taken.
        ids = self._whisper.hf_tokenizer.encode(_without_control_tokens(" " + text), add_special_tokens=False).ids
        return [i for i in ids if i < self.tokenizer("en").eot]

    def _token_cap(self, window: Window, language: str) -> int:
        if window.final:
            rate, spare = FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS
        else:
            rate, spare = PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS
        if language != "en":
            rate = max(rate, NON_LATIN_TOKENS_PER_S)
        cap = int(len(window.pcm) / SAMPLE_RATE_HZ * rate) + spare
        return min(max(1, cap - len(window.prefix)), window.max_tokens or self._profile.max_tokens)

    def tokenizer(self, language: str) -> Tokenizer:
        """Return the tokenizer for a language, which is made once. From `eot` on, its ids are control tokens."""
        key = (language, "transcribe")
        if key not in self._tokenizers:
            self._tokenizers[key] = Tokenizer(
                self._whisper.hf_tokenizer, self._model.is_multilingual, task="transcribe", language=language
            )
        return self._tokenizers[key]

    def _text_ids(self, output: Any, language: str) -> list[int]:
        return [t for t in output.sequences_ids[0] if t < self.tokenizer(language).eot]

    def _features(self, pcm: Pcm, frames: int) -> Pcm:
        padded = np.zeros(frames * SAMPLES_PER_FRAME, np.float32)
        padded[: len(pcm)] = pcm[: len(padded)]
        features = self._whisper.feature_extractor(padded, padding=0)
        return np.ascontiguousarray(features[:, :frames], np.float32)

    def _align(self, pcm: Pcm, words: tuple[str, ...], language: str) -> tuple[Word, ...]:
        """Force the words' tokens on the audio, and take their times as those of a transcript's words."""
        window = Window(pcm, language=language if self._model.is_multilingual else "en")
        ids = [
            self._whisper.hf_tokenizer.encode(_without_control_tokens(" " + w), add_special_tokens=False).ids
            for w in words
        ]
        flat = [i for word in ids for i in word]
        if not flat or len(flat) > self._profile.max_tokens:
            return ()
        encoded = self._model.encode(ctranslate2.StorageView.from_array(self._features(pcm, _num_frames(window))[None]))
        (spans,) = self._token_spans(encoded, [window], [(window.language or "en", 1.0)], [flat])
        pieces = [HypothesisWord(w, tuple(i), 1.0) for w, i in zip(words, ids, strict=True) if i]
        return timed_words(pieces, spans)

    def _with_keyterms(
        self, encoded: Any, row: int, window: Window, language: tuple[str, float], ids: list[int]
    ) -> list[int]:
        """Return a final's tokens with the keyterms that win their place."""
        tokenizer = self.tokenizer(language[0])

        def score(hypotheses: list[list[int]]) -> list[list[float]]:
            frames = min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)
            one = np.asarray(encoded)[row : row + 1]
            repeated = ctranslate2.StorageView.from_array(np.repeat(one, len(hypotheses), axis=0))
            texts = [[*window.prefix, *tokens] for tokens in hypotheses]
            found = self._model.align(repeated, tokenizer.sot_sequence, texts, [frames] * len(texts))
            return [list(f.text_token_probs)[len(window.prefix) :] for f in found]

        pieces = hypothesis_words(tokenizer, ids, [1.0] * len(ids), language[0])
        terms = tuple(_without_control_tokens(t) for t in window.keyterms)
        return [t for piece in keyterms.search(pieces, terms, tokenizer.encode, score) for t in piece.tokens]

    def _token_spans(
        self, encoded: Any, windows: Sequence[Window], languages: Sequence[tuple[str, float]], tokens: list[list[int]]
    ) -> list[tuple[TokenSpan, ...]]:
        """Return the spans of each window's tokens after its prefix, from the decoder's cross-attention."""
        out: list[tuple[TokenSpan, ...]] = []
        for i, (window, (language, _), ids) in enumerate(zip(windows, languages, tokens, strict=True)):
            if not ids:
                out.append(())
                continue
            one = encoded if len(windows) == 1 else ctranslate2.StorageView.from_array(np.asarray(encoded)[i : i + 1])
            text = [*window.prefix, *ids]
            found = self._model.align(
                one,
                self.tokenizer(language).sot_sequence,
                [text],
                [min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)],
                median_filter_width=7,
            )[0]
            starts = token_starts(found.alignments, len(text))
            probabilities = found.text_token_probs
            spans = [(starts[k], starts[k + 1], float(probabilities[k])) for k in range(len(text))]
            out.append(tuple(spans[len(window.prefix) :]))
        return out


class WhisperStream:
    """A TranscriptionStream that keeps nothing of its session: each window is decoded from its start."""

    def __init__(self, model: WhisperTranscriber) -> None:
        self._model = model

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window, as WhisperTranscriber.decode. Waits in the lane. Raises Refused, ModelError."""
        return await self._model.decode(window)

    def close(self) -> None:
        """Do nothing: a stream holds neither memory nor a place in the lane."""


def _profile(model_id: str, languages: tuple[str, ...]) -> TranscriberProfile:
    return TranscriberProfile(
        id=model_id,
        languages=languages,
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
        keyterms=True,
    )


def _num_frames(window: Window) -> int:
    """The mel frames that a window is padded to: a whole number of half seconds, so that windows can share a batch."""
    search = _FINAL if window.final else _PARTIAL
    seconds = max(search.min_s, len(window.pcm) / SAMPLE_RATE_HZ + search.pad_s)
    return min(MAX_FRAMES, math.ceil(seconds * 2) * FRAMES_PER_S // 2)


def _without_control_tokens(text: str) -> str:
    """The text with a space in every `<|`, so that none of it can become a control token."""
    return text.replace("<|", "< |")
