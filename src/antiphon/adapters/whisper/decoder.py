"""Whisper on CTranslate2, in the worker's thread: languages, prompts, search, times of words.

Live windows are shorter than Whisper's 30 s, because encoding is most of the cost on a CPU. The following was measured
on read English with the base model, 3 s of padding and a beam of 5. Padding windows to 15 s instead of 30 s gives the
same word errors in a third of the time (56 clips). Padding to 10 s instead of 15 s increases the errors from 9.8 % to
10.0 %, and reduces the time from 0.38 s to 0.25 s (97 clips). With a beam of 1, or with less padding, there are more
errors. Partials are decoded in windows of 5 s with 2 s of padding. A short window needs padding and a token limit;
otherwise the decoder repeats itself.

No session state is kept between windows. `outputs.py` turns outputs into words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
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
from antiphon.adapters.whisper.guard import (
    MIN_LOGPROB,
    NO_SPEECH_LOGPROB,
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
    one_of,
    token_probabilities,
    token_starts,
    without_control_tokens,
    without_pauses,
)
from antiphon.adapters.whisper.windows import (
    MAX_FRAMES,
    MAX_PROMPT_TOKENS,
    Search,
    chosen_language,
    is_aligned,
    next_language,
    num_frames,
    profile_of,
    search_of,
    token_cap,
)
from antiphon.adapters.whisper.word_edges import with_edges
from antiphon.audio import Pcm
from antiphon.audio.leveller import raised
from antiphon.contracts import Hypothesis, HypothesisWord, Window
from antiphon.errors import ModelError
from antiphon.events.words import Word
from antiphon.modeling.token_words import with_logprobs

# Lower bound of a probability before its logarithm is taken.
MIN_PROBABILITY = 1e-10
# Only the end of a prompt is encoded: PROMPT_CHARS_PER_TOKEN characters for each allowed token. KEPT_PROMPTS is the
# limit of cached encoded texts, because a session passes the same prompt with each window.
PROMPT_CHARS_PER_TOKEN, KEPT_PROMPTS = 16, 256
# If a final is a loop, it is decoded again in such a way that no run of LOOP_TOKENS tokens repeats.
LOOP_TOKENS = 4


class WhisperDecoder:
    """One CTranslate2 model. Its methods are called in the threads of a lane, except `key`.

    `profile`: the properties of the model. `partials`: the model that decodes partials; None: this one.
    """

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions, *, partials: Path | None = None) -> None:
        """Load the model, and the model of the folder `partials`, which decodes partials in its languages.

        Takes several seconds. Raises ModelError if a folder does not load, or the device does not support the compute
        type.
        """
        # CTranslate2 takes only the kind of the device here; its index is a separate argument.
        device, compute_type, workers = options.device.partition(":")[0], options.compute_type, options.workers
        try:
            self.whisper = WhisperModel(
                str(folder), device=device, compute_type=compute_type, cpu_threads=1, num_workers=workers
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{model_id} does not load on {device} as {compute_type}: {error}") from error
        self._model = self.whisper.model
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}
        self._prompt_text_tokens = lru_cache(KEPT_PROMPTS)(self._text_tokens)
        self.profile = profile_of(model_id, tuple(self.whisper.supported_languages))
        self.partials = WhisperDecoder(partials, partials.name, options) if partials else None

    def key(self, window: Window) -> tuple[int, int, bool, bool, bool]:
        """Return a window's batch key. Windows with equal keys have equal frames, prompt length, search and model."""
        tokens = self._num_prompt_tokens(window)
        return (num_frames(window), tokens, window.final, is_aligned(window), self._is_for_partials(window))

    def _is_for_partials(self, window: Window) -> bool:
        """Return whether the model for partials decodes a window.

        It does not decode windows of unknown language, because a model of one language would take any other language
        for its own.
        """
        model = self.partials
        return model is not None and not window.final and window.language in model.profile.languages

    def _decode_partials(self, model: WhisperDecoder, windows: Sequence[Window]) -> list[Hypothesis]:
        """Decode partials with another model. Its vocabulary may differ, so tokens are converted through text."""
        asked = [
            replace(w, prefix=model.text_ids(self.tokenizer(w.language or "en").decode(list(w.prefix))))
            for w in windows
        ]
        return [
            replace(found, pieces=tuple(replace(p, tokens=self.text_ids(p.text)) for p in found.pieces))
            for found in model.decode(asked)
        ]

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, with its leading space. None of them is a control token."""
        return tuple(self.whisper.hf_tokenizer.encode(without_control_tokens(text), add_special_tokens=False).ids)

    def _num_prompt_tokens(self, window: Window) -> int:
        return len(self.prompt_tokens(window)) if window.context or window.prompt else 0

    def decode(self, windows: Sequence[Window]) -> list[Hypothesis]:
        """Return the hypotheses of windows with equal keys. Partials are decoded greedily, finals with a beam of 5.

        A final that loops is decoded again with repetitions forbidden.
        """
        if self.partials and self._is_for_partials(windows[0]):
            return self._decode_partials(self.partials, windows)
        frames = num_frames(windows[0])
        encoded = self._model.encode(
            ctranslate2.StorageView.from_array(np.stack([self._features(w.pcm, frames) for w in windows])),
            to_cpu=self._model.device == "cuda" and len(self._model.device_index) > 1,
        )
        languages = self._languages(windows, encoded)
        prompts = [self._prompt(w, lang) + list(w.prefix) for w, (lang, _) in zip(windows, languages, strict=True)]
        cap = max(token_cap(w, lang, self.profile.max_tokens) for w, (lang, _) in zip(windows, languages, strict=True))
        found = self._search(encoded, windows, languages, prompts, cap)
        if windows[0].final and any(is_loop("".join(p.text for p in h.pieces)) for h in found):
            # The decoder fell into a loop. OpenAI's code retries at a higher temperature; forbidding repetitions is
            # deterministic.
            found = self._search(encoded, windows, languages, prompts, cap, no_repeat_ngram_size=LOOP_TOKENS)
        for i, (window, first) in enumerate(zip(windows, found, strict=True)):
            if window.final and self._model.is_multilingual and not (first.is_speech or window.language):
                found[i] = self._in_next_language(one_of(encoded, i), window, first)
        return found

    def _in_next_language(self, encoded: Any, window: Window, first: Hypothesis) -> Hypothesis:
        """Return a final of unlikely words again in the language that is the next likely one, if that fits well.

        An accent may be taken for another language. The text is then so unlikely that it counts as noise, and a turn
        without words gets no answer.
        """
        ranked = [(token[2:-2], float(p)) for token, p in self._model.detect_language(encoded)[0]]
        if (other := next_language(ranked, window.languages, first.language)) is None:
            return first
        prompt = self._prompt(window, other[0]) + list(window.prefix)
        cap = token_cap(window, other[0], self.profile.max_tokens)
        (again,) = self._search(encoded, [window], [other], [prompt], cap, min_logprob=NO_SPEECH_LOGPROB)
        return again if again.is_speech else first

    def _search(
        self,
        encoded: Any,
        windows: Sequence[Window],
        languages: Sequence[tuple[str, float]],
        prompts: list[list[int]],
        cap: int,
        *,
        no_repeat_ngram_size: int = 0,
        min_logprob: float = MIN_LOGPROB,
    ) -> list[Hypothesis]:
        """Search once for the texts of encoded windows. Repeated words without sound are removed.

        A text with a lower mean log-probability than `min_logprob` counts as noise.
        """
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
            # scores[0]: mean of the sequence
            is_speech = not is_noise(output.scores[0], output.no_speech_prob, min_logprob)
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
        """Return the words without repetitions that have no sound, and their times if the window asks for them.

        The words have log-probabilities if the window asks for them. Words are aligned if the window asks for times or
        for a final's probabilities, or if some are repeated. `index`: the index of the window in `encoded`.
        `probabilities`: the probability of each token of the words.
        """
        given = hypothesis_words(self.tokenizer(language), list(window.prefix), [1.0] * len(window.prefix), language)
        texts = [p.text for p in (*given, *pieces)]
        doubtful = says_twice(texts)
        words, cut = list[Word](), set[int]()
        if pieces and (doubtful or is_aligned(window)):
            tokens = [t for p in (*given, *pieces) for t in p.tokens]
            spans = self._token_spans(one_of(encoded, index), window, language, tokens)
            words = aligned_words((*given, *pieces), spans)
            if doubtful:
                sound_s = seconds_of_sound(window.pcm, [(w.start_s, w.end_s) for w in words])
                cut = unspoken_copies(texts, sound_s, len(given))
            if window.final and is_aligned(window):
                # The alignment is a forced decode, which also returns the probabilities of the tokens.
                probabilities = [s[2] for s in spans[len(tokens) - sum(len(p.tokens) for p in pieces) :]]
                pieces = tuple(
                    replace(p, probability=w.probability) for p, w in zip(pieces, words[len(given) :], strict=True)
                )
        if window.logprobs:
            logprobs = [math.log(max(p, MIN_PROBABILITY)) for p in probabilities]
            pieces = tuple(with_logprobs(pieces, logprobs, self.whisper.hf_tokenizer.id_to_token))
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
        """Return the tokens before a window's start token: its hint, and the context of earlier text.

        They are plain text, without control tokens. There are at most MAX_PROMPT_TOKENS. The hint comes first and has
        priority; of both, the newest tokens are kept.
        """
        out: list[int] = []
        for text in (window.prompt.strip(), window.context.strip()):
            most = MAX_PROMPT_TOKENS - len(out)
            if text and most:
                out += self._prompt_text_tokens(text[-PROMPT_CHARS_PER_TOKEN * most :])[-most:]
        return out

    def _text_tokens(self, text: str) -> list[int]:
        # The tokenizer parses "<|...|>" as a control token, so only ids of text are kept.
        ids = self.whisper.hf_tokenizer.encode(without_control_tokens(" " + text), add_special_tokens=False).ids
        return [i for i in ids if i < self.tokenizer("en").eot]

    def tokenizer(self, language: str) -> Tokenizer:
        """Return the cached tokenizer of a language. Its ids from `eot` on are control tokens."""
        key = (language, "transcribe")
        if key not in self._tokenizers:
            self._tokenizers[key] = Tokenizer(
                self.whisper.hf_tokenizer, self._model.is_multilingual, task="transcribe", language=language
            )
        return self._tokenizers[key]

    def _text_ids(self, output: Any, language: str) -> list[int]:
        return [t for t in output.sequences_ids[0] if t < self.tokenizer(language).eot]

    def _features(self, pcm: Pcm, frames: int) -> Pcm:
        padded = np.zeros(frames * SAMPLES_PER_FRAME, np.float32)
        # Quiet speech would be below the floor of Whisper's features: "No." at -42 dB was taken for noise.
        padded[: len(pcm)] = raised(pcm[: len(padded)])
        features = self.whisper.feature_extractor(padded, padding=0)
        return np.ascontiguousarray(features[:, :frames], np.float32)

    def align(self, pcm: Pcm, words: tuple[str, ...], language: str) -> tuple[Word, ...]:
        """Return the times of words in a forced decode of their tokens, processed like those of a transcript.

        The audio has at most 30 s. Returns () if there are more words than a window may have.
        """
        window = Window(pcm, language=language if self._model.is_multilingual else "en")
        ids = [
            self.whisper.hf_tokenizer.encode(without_control_tokens(" " + w), add_special_tokens=False).ids
            for w in words
        ]
        flat = [i for word in ids for i in word]
        if not flat or len(flat) > self.profile.max_tokens:
            return ()
        encoded = self._model.encode(ctranslate2.StorageView.from_array(self._features(pcm, num_frames(window))[None]))
        spans = self._token_spans(encoded, window, window.language or "en", flat)
        pieces = [HypothesisWord(w, tuple(i), 1.0) for w, i in zip(words, ids, strict=True) if i]
        return with_edges(without_pauses(aligned_words(pieces, spans)), pcm)

    def _with_keyterms(self, encoded: Any, index: int, window: Window, language: str, ids: list[int]) -> list[int]:
        """Return a final's tokens with the keyterms that win; see `keyterms.search`.

        `index`: the window's index in `encoded`.
        """
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
        """Return the spans of text tokens from the decoder's cross-attention. `encoded` has this window only."""
        found = self._model.align(
            encoded,
            self.tokenizer(language).sot_sequence,
            [tokens],
            [min(len(window.pcm) // SAMPLES_PER_FRAME, MAX_FRAMES)],
            median_filter_width=7,
        )[0]
        starts = token_starts(found.alignments, len(tokens))
        return [(starts[k], starts[k + 1], float(p)) for k, p in enumerate(found.text_token_probs[: len(tokens)])]
