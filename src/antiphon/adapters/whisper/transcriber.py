"""Whisper by CTranslate2: windows of live sessions and whole files, through one lane and one copy of the weights.

Live windows are shorter than Whisper's 30 s, whose encoding is most of its cost on a CPU. Measured on read English with
the base model: windows of at least 15 s with 3 s of padding and a beam of 5 give the word errors of 30 s windows at a
third of the time (56 clips); of at least 10 s, 10.0 against 9.8 % in 0.25 s instead of 0.38 (97 clips); with a beam of
1 or less padding the errors grow. Partials are decoded in windows of 5 s with 2 s of padding. A short window needs the
padding and a cap on tokens, else the decoder repeats itself.

Nothing of a session is kept between windows. How outputs become words is in `outputs.py`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
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
from antiphon.adapters.whisper.files import FileDecoder
from antiphon.adapters.whisper.guard import (
    is_loop,
    is_noise,
    says_twice,
    seconds_of_sound,
    unspoken_copies,
)
from antiphon.adapters.whisper.outputs import (
    SAMPLES_PER_FRAME,
    TokenSpan,
    aligned_words,
    hypothesis_words,
    token_probabilities,
    token_starts,
    without_control_tokens,
    without_pauses,
)
from antiphon.adapters.whisper.windows import (
    FRAMES_PER_S,
    MAX_FRAMES,
    MAX_PROMPT_TOKENS,
    Search,
    chosen_language,
    is_aligned,
    num_frames,
    profile_of,
    search_of,
    token_cap,
)
from antiphon.adapters.whisper.word_edges import with_edges
from antiphon.audio import Pcm
from antiphon.audio.leveller import raised
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
from antiphon.modeling.token_words import with_logprobs

# The least probability whose logarithm is reported.
MIN_PROBABILITY = 1e-10
# What is encoded of a prompt for each of its tokens, from the end, and how many encoded texts are kept: a session gives
# the same prompt with each of its windows.
PROMPT_CHARS_PER_TOKEN, KEPT_PROMPTS = 16, 256
# A final that is a loop is decoded again, and then no run of so many tokens may come twice.
LOOP_TOKENS = 4


# A job of the lane: a window, or another call of the model, in the worker's thread.
Work = Window | Callable[[], Any]


class WhisperTranscriber:
    """A Transcriber: one CTranslate2 model, and a lane whose `workers` threads each compute on one core.

    `max_batch`: windows in one call of the model. `lane` is public for statistics,
    `partials` is the model that decodes partials; None: this one does.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        partials: Path | None = None,
        max_batch: int = 1,
    ) -> None:
        """Load the folder's model, and that of the folder `partials`, which then decodes partials in the languages that
        it knows. Waits for seconds.

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
        self._profile = profile_of(model_id, tuple(self._whisper.supported_languages))
        # Its jobs run in this transcriber's lane, so that finals and partials have one order; its own lane stays empty.
        self.partials = WhisperTranscriber(partials, partials.name, options) if partials else None
        # One job a batch on a CPU: batches of 2 to 8 measured no faster than one after another (docs/architecture.md).
        self.lane: Lane[Work, Any] = Lane(
            "transcriber",
            self._work,
            workers=workers,
            max_batch=max_batch,
            max_queue=options.max_queue,
            observe=options.observe,
        )
        self._files = FileDecoder(self._whisper, self.lane, self._align, self.tokenizer)

    @property
    def profile(self) -> TranscriberProfile:
        """The facts of the model. Finals do not keep the prefix that was sent, and its words are aligned."""
        return self._profile

    def busy(self) -> bool:
        """Return whether any job waits in the lane, so that one more would delay others. Does not wait."""
        return self.lane.depth > 0

    def overdue(self) -> bool:
        """Return whether a final or the first words of a turn wait in the lane past their deadline. Does not wait."""
        return self.lane.overdue_s() > 0

    def close(self) -> None:
        """Close the lane: waiting jobs are cancelled, running ones are waited for, and the threads end."""
        self.lane.close()
        if self.partials:
            self.partials.close()

    def open(self) -> WhisperStream:
        """Return a stream, which keeps nothing: every window is decoded from its start."""
        return WhisperStream(self)

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window, as `submit`, and wait for it in the lane. Raises Refused where that is full, ModelError.

        Partials are decoded greedily, with each word's probability; finals with a beam of 5, and probabilities of 1.0
        unless the window asks for word times or log-probabilities. A final that loops is decoded again with the loop
        forbidden.
        """
        return await asyncio.wrap_future(self.submit(window))

    def submit(self, window: Window) -> Future[Hypothesis]:
        """Queue one window, to be decoded in a batch with others of the same shape, and return its future at once.

        Finals and urgent partials come before other partials. Raises Refused where the lane is full; the future may
        have ModelError.
        """
        urgency = Urgency.FINAL if window.final or window.urgent else Urgency.PARTIAL
        return self.lane.submit(window, urgency, self._key(window), deadline_s=window.deadline_s)

    def replace(self, waiting: Future[Hypothesis], window: Window) -> bool:
        """Have a window that waits in the lane replaced by another one. Returns False where it has begun."""
        return self.lane.replace(waiting, window, self._key(window))

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

    def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Yield the segments of a file, then one FileInfo, as `files.py` (`FileDecoder`) says.

        Each window of 30 s is one job of the lane, behind all live ones. Raises Refused, ModelError.
        """
        return self._files.transcribe(slabs, options)

    def encoded_s(self, window: Window) -> float:
        """Return how many seconds a window is padded to, by which its encoding costs."""
        return num_frames(window) / FRAMES_PER_S

    # The methods from here on are called in the workers' threads, but for _key and what it calls.

    def _work(self, jobs: Sequence[Work]) -> list[Any]:
        windows = [j for j in jobs if isinstance(j, Window)]
        if len(windows) == len(jobs):
            return self._decode(windows)
        return [job() for job in jobs if not isinstance(job, Window)]

    def _key(self, window: Window) -> tuple[int, int, bool, bool, bool]:
        """Windows with equal keys may share a batch: same frames, same search, as many tokens before the start, and the
        same model.
        """
        tokens = self._num_prompt_tokens(window)
        return (num_frames(window), tokens, window.final, is_aligned(window), self._is_for_partials(window))

    def _is_for_partials(self, window: Window) -> bool:
        """Whether the model for partials decodes a window: not where its language is unknown, since a model of one
        language would take any other for its own.
        """
        model = self.partials
        return model is not None and not window.final and window.language in model.profile.languages

    def _decode_partials(self, model: WhisperTranscriber, windows: Sequence[Window]) -> list[Hypothesis]:
        """Decode partials with another model, whose vocabulary may be another one: tokens are translated as text."""
        asked = [
            replace(w, prefix=model.text_ids(self.tokenizer(w.language or "en").decode(list(w.prefix))))
            for w in windows
        ]
        return [
            replace(found, pieces=tuple(replace(p, tokens=self.text_ids(p.text)) for p in found.pieces))
            for found in model._decode(asked)
        ]

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text as it is spelled, with its leading space; none of them is a control token."""
        return tuple(self._whisper.hf_tokenizer.encode(without_control_tokens(text), add_special_tokens=False).ids)

    def _num_prompt_tokens(self, window: Window) -> int:
        return len(self.prompt_tokens(window)) if window.context or window.prompt else 0

    def _decode(self, windows: Sequence[Window]) -> list[Hypothesis]:
        if self.partials and self._is_for_partials(windows[0]):
            return self._decode_partials(self.partials, windows)
        frames = num_frames(windows[0])
        encoded = self._model.encode(
            ctranslate2.StorageView.from_array(np.stack([self._features(w.pcm, frames) for w in windows])),
            to_cpu=self._model.device == "cuda" and len(self._model.device_index) > 1,
        )
        languages = self._languages(windows, encoded)
        prompts = [self._prompt(w, lang) + list(w.prefix) for w, (lang, _) in zip(windows, languages, strict=True)]
        cap = max(token_cap(w, lang, self._profile.max_tokens) for w, (lang, _) in zip(windows, languages, strict=True))
        found = self._search(encoded, windows, languages, prompts, cap)
        if windows[0].final and any(is_loop("".join(p.text for p in h.pieces)) for h in found):
            # The decoder fell into a loop; where OpenAI tries again with chance, forbidding the loop is deterministic.
            found = self._search(encoded, windows, languages, prompts, cap, no_repeat_ngram_size=LOOP_TOKENS)
        return found

    def _search(
        self,
        encoded: Any,
        windows: Sequence[Window],
        languages: Sequence[tuple[str, float]],
        prompts: list[list[int]],
        cap: int,
        *,
        no_repeat_ngram_size: int = 0,
    ) -> list[Hypothesis]:
        """Search once for the texts of encoded windows. Copies of words without sound of their own are cut."""
        search = search_of(windows[0])
        outputs = self._generate(encoded, prompts, cap, search, no_repeat_ngram_size=no_repeat_ngram_size)
        found = []
        for i, (output, window, language, prompt) in enumerate(zip(outputs, windows, languages, prompts, strict=True)):
            ids = self._text_ids(output, language[0])[len(window.prefix) :]
            if window.final and window.keyterms:
                ids = self._with_keyterms(encoded, i, window, language[0], ids)
            # Only a greedy search returns logits.
            probabilities = token_probabilities(output, len(ids)) if search.beam_size == 1 else [1.0] * len(ids)
            pieces = hypothesis_words(self.tokenizer(language[0]), ids, probabilities, language[0])
            pieces, timed = self._spoken(encoded, i, window, language[0], pieces, probabilities)
            is_speech = not is_noise(output.scores[0], output.no_speech_prob)  # the first is the mean of the sequence
            found.append(Hypothesis(pieces, *language, is_speech, len(prompt), len(ids), timed))
        return found

    def _spoken(
        self,
        encoded: Any,
        index: int,
        window: Window,
        language: str,
        pieces: tuple[HypothesisWord, ...],
        probabilities: list[float],
    ) -> tuple[tuple[HypothesisWord, ...], tuple[Word, ...]]:
        """Return the words without copies that have no sound of their own, and their times and log-probabilities if the
        window asks for them.

        Words are aligned where times, or a final's probabilities, are asked for, or where any come twice. `index`: the
        window's in `encoded`. `probabilities`: of each token of the words.
        """
        given = hypothesis_words(self.tokenizer(language), list(window.prefix), [1.0] * len(window.prefix), language)
        texts = [p.text for p in (*given, *pieces)]
        doubtful = says_twice(texts)
        words, cut = list[Word](), set[int]()
        if pieces and (doubtful or is_aligned(window)):
            tokens = [t for p in (*given, *pieces) for t in p.tokens]
            one = encoded
            if encoded.shape[0] > 1:
                one = ctranslate2.StorageView.from_array(np.asarray(encoded)[index, None])
            spans = self._token_spans(one, window, language, tokens)
            words = aligned_words((*given, *pieces), spans)
            if doubtful:
                sound_s = seconds_of_sound(window.pcm, [(w.start_s, w.end_s) for w in words])
                cut = unspoken_copies(texts, sound_s, len(given))
            if window.final and is_aligned(window):
                # The alignment is a forced decode, and gives the tokens their probabilities.
                probabilities = [s[2] for s in spans[len(tokens) - sum(len(p.tokens) for p in pieces) :]]
                pieces = tuple(
                    replace(p, probability=w.probability) for p, w in zip(pieces, words[len(given) :], strict=True)
                )
        if window.logprobs:
            logprobs = [math.log(max(p, MIN_PROBABILITY)) for p in probabilities]
            pieces = tuple(with_logprobs(pieces, logprobs, self._whisper.hf_tokenizer.id_to_token))
        kept = [k for k in range(len(given), len(texts)) if k not in cut]
        pieces = tuple(pieces[k - len(given)] for k in kept)
        timed = [words[k] for k in kept] if window.word_times and words else []
        return pieces, with_edges(without_pauses(timed), window.pcm)

    def _generate(
        self, encoded: Any, prompts: list[list[int]], cap: int, search: Search, *, no_repeat_ngram_size: int = 0
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

    def _languages(self, windows: Sequence[Window], encoded: Any) -> list[tuple[str, float]]:
        if not self._model.is_multilingual:
            return [("en", 1.0)] * len(windows)
        if all(w.language for w in windows):
            return [(w.language or "en", 1.0) for w in windows]
        ranked = [[(token[2:-2], float(p)) for token, p in all_] for all_ in self._model.detect_language(encoded)]
        return [
            (w.language, 1.0) if w.language else chosen_language(r, w.languages, w.likely_language)
            for w, r in zip(windows, ranked, strict=True)
        ]

    def _prompt(self, window: Window, language: str) -> list[int]:
        tokenizer = self.tokenizer(language)
        text = self.prompt_tokens(window)
        head = [tokenizer.sot_prev, *text] if text else []
        return head + list(tokenizer.sot_sequence) + [tokenizer.no_timestamps]

    def prompt_tokens(self, window: Window) -> list[int]:
        """Return the tokens that come before a window's start token: its hint, and what was said before it.

        They are plain text, none of them a control token. Of each of the two the newest tokens are kept, at most
        MAX_PROMPT_TOKENS in all, the hint's before those of what was said.
        """
        out: list[int] = []
        for text in (window.prompt.strip(), window.context.strip()):
            most = MAX_PROMPT_TOKENS - len(out)
            if text and most:
                out += self._prompt_text_tokens(text[-PROMPT_CHARS_PER_TOKEN * most :])[-most:]
        return out

    def _text_tokens(self, text: str) -> list[int]:
        # The tokenizer reads "<|...|>" as a control token: only the ids of text are taken.
        ids = self._whisper.hf_tokenizer.encode(without_control_tokens(" " + text), add_special_tokens=False).ids
        return [i for i in ids if i < self.tokenizer("en").eot]

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
        # Whisper's features have a floor that quiet speech would fall below: "No." at -42 dB was taken for noise.
        padded[: len(pcm)] = raised(pcm[: len(padded)])
        features = self._whisper.feature_extractor(padded, padding=0)
        return np.ascontiguousarray(features[:, :frames], np.float32)

    def _align(self, pcm: Pcm, words: tuple[str, ...], language: str) -> tuple[Word, ...]:
        """Force the words' tokens on the audio, and take their times as those of a transcript's words."""
        window = Window(pcm, language=language if self._model.is_multilingual else "en")
        ids = [
            self._whisper.hf_tokenizer.encode(without_control_tokens(" " + w), add_special_tokens=False).ids
            for w in words
        ]
        flat = [i for word in ids for i in word]
        if not flat or len(flat) > self._profile.max_tokens:
            return ()
        encoded = self._model.encode(ctranslate2.StorageView.from_array(self._features(pcm, num_frames(window))[None]))
        spans = self._token_spans(encoded, window, window.language or "en", flat)
        pieces = [HypothesisWord(w, tuple(i), 1.0) for w, i in zip(words, ids, strict=True) if i]
        return with_edges(without_pauses(aligned_words(pieces, spans)), pcm)

    def _with_keyterms(self, encoded: Any, index: int, window: Window, language: str, ids: list[int]) -> list[int]:
        """Return a final's tokens with the keyterms that win their place. `index`: the window's in `encoded`."""
        tokenizer = self.tokenizer(language)

        def score(hypotheses: list[list[int]]) -> list[list[float]]:
            frames = min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)
            one = np.asarray(encoded)[index, None]
            repeated = ctranslate2.StorageView.from_array(np.repeat(one, len(hypotheses), axis=0))
            texts = [[*window.prefix, *tokens] for tokens in hypotheses]
            found = self._model.align(repeated, tokenizer.sot_sequence, texts, [frames] * len(texts))
            return [list(f.text_token_probs)[len(window.prefix) :] for f in found]

        pieces = hypothesis_words(tokenizer, ids, [1.0] * len(ids), language)
        terms = tuple(without_control_tokens(t) for t in window.keyterms)
        return [t for piece in keyterms.search(pieces, terms, tokenizer.encode, score) for t in piece.tokens]

    def _token_spans(self, encoded: Any, window: Window, language: str, tokens: list[int]) -> list[TokenSpan]:
        """Return the spans of text tokens in a window, by itself encoded, from the decoder's cross-attention."""
        found = self._model.align(
            encoded,
            self.tokenizer(language).sot_sequence,
            [tokens],
            [min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)],
            median_filter_width=7,
        )[0]
        starts = token_starts(found.alignments, len(tokens))
        return [(starts[k], starts[k + 1], float(p)) for k, p in enumerate(found.text_token_probs[: len(tokens)])]


class WhisperStream:
    """A TranscriptionStream that keeps nothing of its session: each window is decoded from its start."""

    def __init__(self, model: WhisperTranscriber) -> None:
        self._model = model
        self._waiting: Future[Hypothesis] | None = None

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window, as WhisperTranscriber.decode. Waits in the lane. Raises Refused, ModelError."""
        self._waiting = self._model.submit(window)
        try:
            return await asyncio.wrap_future(self._waiting)
        finally:
            self._waiting = None

    def replace(self, window: Window) -> bool:
        """Replace the window that waits in the lane. Returns False where none waits, or it has begun."""
        return self._waiting is not None and self._model.replace(self._waiting, window)

    def close(self) -> None:
        """Do nothing: a stream holds neither memory nor a place in the lane."""
