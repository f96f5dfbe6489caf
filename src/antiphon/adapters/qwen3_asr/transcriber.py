"""Qwen3-ASR as a transcriber: a session's windows over one KV, of which only what is new is computed.

A window's rows are the prompt with the user's hint, the audio, and the prefix of the hypothesis. When the window grows,
the rows behind its finished encoder windows (8 s each) are rolled back, and the open encoder window and the text are
computed again. The makers' stream (qwen-asr 0.0.6, `streaming_transcribe`) computes all rows anew, with the same
result.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen3_asr.audio_encoder import EDGE_FRAMES, EncoderBatch, Features
from antiphon.adapters.qwen3_asr.checkpoint import END, Qwen3AsrParts, read
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    HypothesisWord,
    TranscriberProfile,
    TranscriptSegment,
    TuningLimits,
    Window,
)
from antiphon.engine.api import Sampling, Session, Token
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.threads import available_cores
from antiphon.errors import EngineError, ModelError
from antiphon.events.words import Word
from antiphon.modeling.token_words import UNSPACED, characters, spread, with_logprobs, words
from antiphon.shares.threads import in_thread

LANGUAGE_CODES = {name: code for code, name in LANGUAGE_CODE_TO_NAME.items()}
TEXT_MARK = "<asr_text>"
# Most tokens of a decode for each second of audio, and besides: fast Chinese has 8 a second.
TOKENS_PER_S, EXTRA_TOKENS = 14.0, 32
# A phrase of up to so many tokens that comes this often in a row is a loop (qwen-asr 0.0.6 removes what comes 20
# times).
LOOP_TOKENS, LOOP_REPEATS = 20, 20
# Files are decoded in parts of this length, cut at the quietest place of the slack.
PART_S, PART_SLACK_S = 24.0, 8.0
# What the model names as the language of audio without speech.
NO_LANGUAGE = "none"
# Rows a session is promised: a window of half a minute. Of a user's hint, no more than this is read.
RESERVE_ROWS = 1024
MAX_HINT_CHARS, MAX_HINT_TOKENS = 4000, 512
# Rows a second of audio. Of a session's rows, half are for its audio, a quarter for the text that is forced, and an
# eighth for what was said before; the model was made for 20 minutes of audio.
ROWS_PER_S, MAX_AUDIO_S = 13.0, 1200.0
MAX_NEW_TOKENS = 4096
# Encoder windows of one batch on a GPU.
MOST_ENCODED = 64

T = TypeVar("T")


@dataclass(slots=True)
class EncoderCounts:
    """How much of the work was new, over all sessions since the model was loaded.

    `finished`: encoder windows of 8 s that were computed and stay in the KV. `recomputed`: finished windows that were
    computed once more, because the audio behind them was louder and moved the floor of their features. `open`: encoder
    windows that had not ended yet. `decodes`: windows decoded.
    """

    finished: int = 0
    recomputed: int = 0
    open: int = 0
    decodes: int = 0


class Qwen3Asr:
    """A Transcriber on an engine of its own. It hears 30 languages, and neither translates nor places words in time.

    `source` is a checkpoint's folder, with its makers' names or those of `transformers`, or its parts on `device`.
    `counts` says how much was computed, and is only ever added to, by all sessions.
    """

    def __init__(self, source: Path | Qwen3AsrParts, model_id: str, options: EngineModelOptions) -> None:
        """Load the checkpoint and start the engine. Waits for seconds.

        int8 weights are those of the decoder only. Raises ModelError for a checkpoint that does not load.
        """
        device = options.device
        self.parts, compute_dtype, dtype = load_parts(
            model_id,
            source,
            options,
            lambda folder, dtype: read(folder, device, dtype),
            lambda parts: (parts.decoder,),
        )
        runner = Runner(self.parts.decoder, torch.device(device), compute_dtype, dtype)
        self.engine = LocalEngine(runner, options.settings, observe=options.observe)
        self.counts = EncoderCounts()
        on_cpu = device == "cpu"
        self.encoding = EncoderBatch(self.engine.thread, self.parts.audio_encoder, 1 if on_cpu else MOST_ENCODED)
        self._features_in_thread = on_cpu
        # So many generations at once and more count as busy.
        self._busy_from = available_cores() if device == "cpu" else 32
        self._profile = _profile(model_id, self.engine.context_rows)

    @property
    def profile(self) -> TranscriberProfile:
        """The facts of the model. Finals go on from the prefix that was sent, and partials come every second."""
        return self._profile

    async def features(self, function: Callable[[], T]) -> T:
        """Run what computes features: in the model's thread on a CPU, which has no core to spare for it, else beside.

        Raises ModelError where it fails, Refused, ModelLost.
        """
        if self._features_in_thread:
            return await self.engine.thread.call_model(function)
        try:
            return await in_thread(function)
        except Exception as error:
            raise ModelError(f"{type(error).__name__}: {error}") from error

    def busy(self) -> bool:
        """Return whether as many sessions generate as the machine serves without delay: one a core, or 32 on a GPU.

        As of the engine's last step; does not wait.
        """
        return self.engine.last_state.generating >= self._busy_from

    def overdue(self) -> bool:
        """Return False: the sessions of an engine share its steps, and none waits for another."""
        return False

    def open(self) -> Qwen3AsrStream:
        """Return a new session's stream. It takes room in the engine with its first window only."""
        return Qwen3AsrStream(self)

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Return (): this model does not know where words lie, as its profile says."""
        return ()

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Yield a segment for each part of the file, of at most 24 s, in which speech was heard, then one FileInfo.

        The language that the first part is found to be in holds for the rest. Closing it ends the decode within a step.
        Raises Refused where the engine has no room, ModelError.
        """
        stream, language, number, num_samples = self.open(), options.language, 0, 0
        try:
            async for start, part in split_at_quiet(slabs, PART_S, PART_SLACK_S):
                window = Window(
                    part,
                    prompt=options.prompt,
                    language=language,
                    final=True,
                    word_times=options.word_times,
                    start_sample=start,
                )
                found = await stream.decode(window, options.temperature)
                language = language or found.language or None
                if found.is_speech:
                    yield _segment(number, start, len(part), found, options.temperature)
                number, num_samples = number + 1, start + len(part)
            yield FileInfo(language or "", num_samples / SAMPLE_RATE_HZ)
        finally:
            stream.close()

    @property
    def engines(self) -> tuple[LocalEngine, ...]:
        """The engine of the decoder, for whoever watches its thread."""
        return (self.engine,)

    def close(self) -> None:
        """Stop the model's thread. Streams that are still open fail at their next window."""
        self.engine.close()


def _profile(model_id: str, context_rows: int) -> TranscriberProfile:
    """The facts of the model, and what a session may raise them to within the rows that the engine holds for one."""
    return TranscriberProfile(
        id=model_id,
        languages=tuple(LANGUAGE_CODE_TO_NAME),
        step_s=1.0,
        first_step_s=0.5,
        agreement_s=0.0,
        first_agreement_s=0.0,
        rollback_tokens=5,
        min_probability=0.0,
        unfixed_chunks=2,
        settle_s=0.5,
        context_pause_s=1.5,
        pause_s=0.8,
        long_window_s=14.0,
        long_pause_s=0.3,
        max_window_s=30.0,
        context_tokens=0,
        max_tokens=32,
        max_prefix_tokens=384,
        translates=False,
        final_keeps_prefix=True,
        aligns_words=False,
        limits=TuningLimits(
            max_audio_s=max(30.0, min(MAX_AUDIO_S, context_rows // 2 // ROWS_PER_S)),
            max_prefix_tokens=max(384, context_rows // 4),
            max_tokens=MAX_NEW_TOKENS,
            context_tokens=context_rows // 8,
            context_audio=True,
        ),
    )


@dataclass(slots=True)
class _EncodedWindow:
    """A finished encoder window in the KV: the features it was made of, and the row behind it."""

    features: Features
    end_row: int


class Qwen3AsrStream:
    """A TranscriptionStream: one session's windows, decoded one at a time over one KV.

    A window that begins where the last one began, under the same hint, is computed only from its open encoder window
    on. Any other window, and one after a failure, is computed from its start.
    """

    def __init__(self, model: Qwen3Asr) -> None:
        self._model = model
        self._session: Session | None = None
        # What the KV begins with: the sample of the session at which its audio starts, the hint, and what was said.
        self._audio_key: tuple[int, str, str] | None = None
        self._head_rows = 0
        self._encoded: list[_EncodedWindow] = []
        # The name of the language that the model wrote last.
        self._language = ""

    @property
    def head_rows(self) -> int:
        """How many rows the prompt has, which come before the audio and stay for as long as the hint is the same."""
        return self._head_rows

    @property
    def num_encoded_windows(self) -> int:
        """How many finished encoder windows the KV holds; the next window computes those that follow."""
        return len(self._encoded)

    async def decode(self, window: Window, temperature: float = 0.0) -> Hypothesis:
        """Decode one window, whether it is a partial or a final: the two are decoded in the same way here.

        Tokens are the likeliest ones at `temperature` 0. A decode that loops ends, and keeps the phrase once. A
        cancelled call leaves the stream usable. Waits for the engine. Raises Refused where it has no room, ModelError.
        """
        try:
            return await self._decode(window, temperature)
        except (ModelError, EngineError) as error:
            # Whatever is in the KV now, the next window is computed from its start.
            self.close()
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"the engine failed: {error}") from error

    async def _decode(self, window: Window, temperature: float) -> Hypothesis:
        model = self._model
        session = self._session = self._session or await model.engine.open(RESERVE_ROWS)
        self._append_head(session, window)
        await self._append_audio(session, window.pcm)
        vocabulary, name = model.parts.vocabulary, LANGUAGE_CODE_TO_NAME.get(window.language or "", "")
        language = name or (self._language if window.prefix else "")
        session.append(vocabulary.control(f"<|audio_end|>{END}\n<|im_start|>assistant\n"))
        if language:
            session.append(vocabulary.control(f"language {language}{TEXT_MARK}"))
        session.append(window.prefix)
        num_prompt = session.length
        tokens = await self.generate(session, _max_tokens(window), temperature)
        model.counts.decodes += 1
        text = [t for t in tokens if t.id not in vocabulary.stop]
        found = self._hypothesis(window, text, language, forced=bool(name))
        return replace(found, prompt_tokens=num_prompt, completion_tokens=len(tokens))

    def _append_head(self, session: Session, window: Window) -> None:
        """Make the KV begin with this window's prompt; where it does already, its encoded audio stays."""
        key = (window.start_sample, window.prompt, window.context)
        # Where the context had no room for all of the audio, some of it has left.
        if self._audio_key != key or session.context_start > self._head_rows:
            vocabulary = self._model.parts.vocabulary
            session.rollback(0)
            if self._audio_key is None or self._audio_key[1] != window.prompt or not window.prefix:
                self._language = ""
            session.append(vocabulary.control("<|im_start|>system\n"))
            session.append(vocabulary.plain(window.prompt.strip()[:MAX_HINT_CHARS])[:MAX_HINT_TOKENS])
            if context := window.context.strip():
                session.append(vocabulary.plain("\n" + context if window.prompt.strip() else context))
            session.append(vocabulary.control(f"{END}\n<|im_start|>user\n<|audio_start|>"))
            session.pin()
            self._audio_key, self._head_rows, self._encoded = key, session.length, []

    async def _append_audio(self, session: Session, pcm: Pcm) -> None:
        """Append the audio's rows; those of finished encoder windows stay while their features are the same."""
        encoder, counts = self._model.parts.audio_encoder, self._model.counts
        size = encoder.window_frames
        parts, same = await self._model.features(partial(self._fresh_parts, pcm, size))
        made = list(zip(parts[same:], await self._model.encoding.encode(parts[same:]), strict=True))
        counts.recomputed += max(0, len(self._encoded) - same)
        del self._encoded[same:]
        session.rollback(self._encoded[-1].end_row if self._encoded else self._head_rows)
        frames = same * size + sum(part.shape[1] for part, _ in made)
        for number, (part, rows) in enumerate(made, same):
            session.append_embeddings(rows)
            if (number + 1) * size + EDGE_FRAMES <= frames:
                self._encoded.append(_EncodedWindow(part.copy(), session.length))
                counts.finished += 1
            else:
                counts.open += 1

    def _fresh_parts(self, pcm: Pcm, size: int) -> tuple[list[Features], int]:
        """Return the features of each encoder window, and how many at the start are in the KV already."""
        features = self._model.parts.audio_encoder.features(pcm)
        parts = [features[:, at : at + size] for at in range(0, features.shape[1], size)]
        same = 0
        while same < min(len(parts), len(self._encoded)) and np.array_equal(parts[same], self._encoded[same].features):
            same += 1
        return parts, same

    async def generate(self, session: Session, max_tokens: int, temperature: float) -> list[Token]:
        """Sample the tokens behind the rows of `session`, tags and stop token included, until they end or loop.

        Of a loop the phrase is left once. Waits for the engine. Raises ModelError, EngineError.
        """
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, stop=self._model.parts.vocabulary.stop, logprobs=True
        )
        out: list[Token] = []
        async with aclosing(session.generate(sampling)) as tokens:
            async for token in tokens:
                out.append(token)
                if loop := loop_length([t.id for t in out]):
                    del out[-loop * (LOOP_REPEATS - 1) :]
                    break
        return out

    def _hypothesis(self, window: Window, tokens: Sequence[Token], language: str, *, forced: bool) -> Hypothesis:
        """Read the tokens: `language X<asr_text>`, where `language` is "", and the text behind it."""
        vocabulary = self._model.parts.vocabulary
        decode = vocabulary.text
        mark, certainty = vocabulary.tokenizer.token_to_id(TEXT_MARK), 1.0
        at = next((i for i, t in enumerate(tokens) if t.id == mark), None)
        if language:
            # A second tag would be the model's mistake: what follows it is text.
            tokens = [t for t in tokens if t.id != mark]
        elif at is not None:
            tag = decode([t.id for t in tokens[:at]]).strip()
            language = tag.splitlines()[0].strip().removeprefix("language").strip() if tag else ""
            certainty = _least_probability(tokens[:at])
            tokens = tokens[at + 1 :]
        elif decode([t.id for t in tokens]).lstrip().startswith("language"):
            # The decode was cut inside the tag: there is no text.
            tokens = []
        if not forced:
            self._language = language
        code = "" if language.lower() == NO_LANGUAGE else LANGUAGE_CODES.get(language, language.lower())
        pieces = self._words(tokens, code, first=not window.prefix, logprobs=window.logprobs)
        times = self._times(window, pieces, code) if window.word_times else ()
        return Hypothesis(tuple(pieces), code, certainty, bool(pieces), 0, 0, tuple(times))

    def _words(self, tokens: Sequence[Token], code: str, *, first: bool, logprobs: bool) -> list[HypothesisWord]:
        """Return the words of text tokens. `first`: they begin the window. `logprobs`: with those of their tokens."""
        vocabulary = self._model.parts.vocabulary
        plain = [t for t in tokens if t.id not in vocabulary.special]
        texts, groups = characters([t.id for t in plain], vocabulary.text)
        pieces = words(texts, groups, [math.exp(t.logprob or 0.0) for t in plain], code)
        if logprobs:
            pieces = with_logprobs(pieces, [t.logprob or 0.0 for t in plain], vocabulary.tokenizer.id_to_token)
        if pieces and first and code not in UNSPACED and not pieces[0].text.startswith(" "):
            # Other models begin with a space too: what one window said is followed by what the next does.
            pieces[0] = replace(pieces[0], text=" " + pieces[0].text)
        return pieces

    def _times(self, window: Window, pieces: Sequence[HypothesisWord], language: str) -> list[Word]:
        """Guess where the words lie: those of the prefix and these are spread over the window, where it is loud."""
        texts, groups = characters(window.prefix, self._model.parts.vocabulary.text)
        known = words(texts, groups, [1.0] * len(window.prefix), language)
        return spread([*known, *pieces], window.pcm)[len(known) :]

    def replace(self, window: Window) -> bool:
        """Return False: an engine does not queue windows that could be replaced."""
        return False

    def close(self) -> None:
        """Close the session in the engine, if there is one, and free its KV. The next window would open another."""
        session, self._session, self._audio_key, self._encoded = self._session, None, None, []
        if session:
            session.close()


def _max_tokens(window: Window) -> int:
    by_length = int(len(window.pcm) / SAMPLE_RATE_HZ * TOKENS_PER_S) + EXTRA_TOKENS
    return max(1, min(by_length, window.max_tokens or by_length))


def loop_length(ids: Sequence[int]) -> int:
    """Return the length of the phrase that these tokens end with LOOP_REPEATS times in a row; 0 where there is none.

    The shortest such phrase counts, of at most LOOP_TOKENS tokens.
    """
    for size in range(1, min(LOOP_TOKENS, len(ids) // LOOP_REPEATS) + 1):
        tail = list(ids[-size * LOOP_REPEATS :])
        if tail == tail[:size] * LOOP_REPEATS:
            return size
    return 0


def _least_probability(tokens: Sequence[Token]) -> float:
    return math.exp(min((t.logprob or 0.0 for t in tokens), default=0.0))


def _segment(number: int, start: int, samples: int, found: Hypothesis, temperature: float) -> TranscriptSegment:
    shift_s = start / SAMPLE_RATE_HZ
    probabilities = [max(p.probability, 1e-9) for p in found.pieces]
    return TranscriptSegment(
        id=number,
        seek=start // (SAMPLE_RATE_HZ // 100),
        start_s=shift_s,
        end_s=shift_s + samples / SAMPLE_RATE_HZ,
        text="".join(p.text for p in found.pieces),
        tokens=tuple(t for p in found.pieces for t in p.tokens),
        temperature=temperature,
        avg_logprob=sum(math.log(p) for p in probabilities) / max(1, len(probabilities)),
        compression_ratio=1.0,
        no_speech_prob=0.0,
        words=tuple(Word(w.text, w.start_s + shift_s, w.end_s + shift_s, w.probability) for w in found.words),
    )
