"""Qwen3-ASR as a transcriber: a session's windows on one KV. What an encoder window has finished is computed once; the open one, and the text, anew.

A window's rows: the prompt with the user's hint, the sound, and what the hypothesis must begin with. When it grows, the rows behind its finished
encoder windows (8 s each) are rolled back. Its makers' stream (qwen-asr 0.0.6, `streaming_transcribe`) computes all of them anew, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

from antiphon.adapters.qwen3_asr.audio_encoder import UNSURE_FRAMES, Features
from antiphon.adapters.qwen3_asr.checkpoint import END, Qwen3AsrParts, read
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    HypothesisWord,
    TranscriberProfile,
    TranscriptSegment,
    Window,
)
from antiphon.engine.api import EngineSettings, Sampling, Token
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import quantize_linear_layers, weights_for
from antiphon.engine.threads import available_cores, load_errors, load_in_own_thread
from antiphon.errors import EngineError, ModelError
from antiphon.events.words import Word
from antiphon.modeling.token_words import UNSPACED, characters, spread, words

CODES = {name: code for code, name in LANGUAGE_CODE_TO_NAME.items()}
TEXT_MARK = "<asr_text>"
# Tokens a final may have for each second of sound, and more: fast Chinese has 8.
TOKENS_PER_S, SPARE_TOKENS = 14.0, 32
# A phrase of up to so many tokens that comes this often in a row is a loop (qwen-asr 0.0.6 takes out what comes 20 times).
LOOP_TOKENS, LOOP_TIMES = 20, 20
# Files are decoded in parts of this length, cut in a quiet place.
SLAB_S, SLAB_SLACK_S = 24.0, 8.0
# Of sound that was told to be of no language.
NOTHING = "none"
# A session is promised the rows of a window of half a minute; of a user's hint so much is read.
RESERVE_ROWS = 1024
MAX_HINT_CHARS, MAX_HINT_TOKENS = 4000, 512


@dataclass(slots=True)
class EncoderCounts:
    """What was computed: encoder windows that were whole, of these again because the sound grew louder, and open ones; decodes."""

    whole: int = 0
    again: int = 0
    open: int = 0
    decodes: int = 0


class Qwen3Asr:
    """See Transcriber. `source` is a checkpoint's folder, with its makers' names or those of `transformers`, or its parts on `device`."""

    def __init__(
        self,
        source: Path | Qwen3AsrParts,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Raises ModelError for a checkpoint that does not load."""
        kind, dtype = weights_for(device, weights)
        with load_errors(model_id, source):
            self.parts = load_in_own_thread(
                lambda: _load(source, device, dtype, rounded=kind == "int8"), device=device, threads=threads
            )
        runner = Runner(self.parts.decoder, torch.device(device), torch.float32 if kind == "int8" else dtype, dtype)
        self.engine = Engine(runner, settings, observe=observe)
        self.counts = EncoderCounts()
        self._many = available_cores() if device == "cpu" else 32
        self._profile = TranscriberProfile(
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
        )

    @property
    def profile(self) -> TranscriberProfile:
        """See Transcriber."""
        return self._profile

    def busy(self) -> bool:
        """See Transcriber."""
        return self.engine.last_state.generating >= self._many

    def open(self) -> Qwen3AsrStream:
        """See Transcriber."""
        return Qwen3AsrStream(self)

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """See Transcriber: this model does not know where words lie."""
        return ()

    async def transcribe(self, pcm: Pcm, options: FileOptions) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """See Transcriber. A segment for each part of the file."""
        listening, language, begun = self.open(), options.language, False
        try:
            for number, part in enumerate(split_at_quiet(pcm, SLAB_S, SLAB_SLACK_S)):
                window = Window(
                    pcm[part],
                    prompt=options.prompt,
                    language=language,
                    final=True,
                    word_times=options.word_times,
                    start_sample=part.start,
                )
                found = await listening.decode(window, options.temperature)
                language = language or found.language or None
                if not begun:
                    begun = True
                    yield FileInfo(found.language, len(pcm) / SAMPLE_RATE_HZ)
                if found.is_speech:
                    yield _segment(number, part.start, len(pcm[part]), found, options.temperature)
        finally:
            listening.close()

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def _load(source: Path | Qwen3AsrParts, device: str, dtype: torch.dtype, *, rounded: bool) -> Qwen3AsrParts:
    parts = source if isinstance(source, Qwen3AsrParts) else read(source, device, dtype)
    if rounded:
        quantize_linear_layers(parts.decoder)
    return parts


@dataclass(slots=True)
class _Finished:
    """An encoder window in the KV: what it was made of, and the row behind it."""

    features: Features
    end_row: int


class Qwen3AsrStream:
    """See Hearing."""

    def __init__(self, model: Qwen3Asr) -> None:
        self._model = model
        self._session: EngineSession | None = None
        # The sound that the KV begins with: where in the session, under which prompt.
        self._of: tuple[int, str] | None = None
        self._head_rows = 0
        self._finished: list[_Finished] = []
        # What the model last said the language is, in its own words.
        self._language = ""

    async def decode(self, window: Window, temperature: float = 0.0) -> Hypothesis:
        """See Hearing."""
        try:
            return await self._decode(window, temperature)
        except (ModelError, EngineError) as error:
            # Whatever state it is in: the next window begins anew.
            self.close()
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"the engine failed: {error}") from error

    async def _decode(self, window: Window, temperature: float) -> Hypothesis:
        model = self._model
        session = self._session = self._session or await model.engine.open(RESERVE_ROWS)
        self._begin(session, window)
        await self._hear(session, window.pcm)
        vocabulary, name = model.parts.vocabulary, LANGUAGE_CODE_TO_NAME.get(window.language or "", "")
        said = name or (self._language if window.prefix else "")
        session.append(vocabulary.control(f"<|audio_end|>{END}\n<|im_start|>assistant\n"))
        if said:
            session.append(vocabulary.control(f"language {said}{TEXT_MARK}"))
        session.append(window.prefix)
        prompt = session.length
        tokens = await self._generate(session, _most(window), temperature)
        model.counts.decodes += 1
        found = self._read(window, [t for t in tokens if t.id not in vocabulary.stop], said, forced=bool(name))
        return replace(found, prompt_tokens=prompt, completion_tokens=len(tokens))

    def _begin(self, session: EngineSession, window: Window) -> None:
        """Make the session hold just the prompt, and of the sound what it knows already."""
        of = (window.start_sample, window.prompt)
        # Where there was no room for all of it, some has left.
        if self._of != of or session.context_start > self._head_rows:
            vocabulary = self._model.parts.vocabulary
            session.rollback(0)
            if self._of is None or self._of[1] != window.prompt or not window.prefix:
                self._language = ""
            session.append(vocabulary.control("<|im_start|>system\n"))
            session.append(vocabulary.plain(window.prompt.strip()[:MAX_HINT_CHARS])[:MAX_HINT_TOKENS])
            session.append(vocabulary.control(f"{END}\n<|im_start|>user\n<|audio_start|>"))
            session.pin()
            self._of, self._head_rows, self._finished = of, session.length, []

    async def _hear(self, session: EngineSession, pcm: Pcm) -> None:
        """The sound's rows: those of finished encoder windows stay while they are made of the same features."""
        engine, ears, counts = self._model.engine, self._model.parts.ears, self._model.counts
        size = ears.window_frames

        def encode() -> tuple[int, list[tuple[Features, torch.Tensor]]]:
            features = ears.features(pcm)
            parts = [features[:, at : at + size] for at in range(0, features.shape[1], size)]
            same = 0
            while same < min(len(parts), len(self._finished)) and np.array_equal(
                parts[same], self._finished[same].features
            ):
                same += 1
            return same, [(part, ears.encode(part)) for part in parts[same:]]

        same, made = await engine.call_model(encode)
        counts.again += max(0, len(self._finished) - same)
        del self._finished[same:]
        session.rollback(self._finished[-1].end_row if self._finished else self._head_rows)
        frames = same * size + sum(part.shape[1] for part, _ in made)
        for number, (part, rows) in enumerate(made, same):
            session.append_embeddings(rows)
            if (number + 1) * size + UNSURE_FRAMES <= frames:
                self._finished.append(_Finished(part.copy(), session.length))
                counts.whole += 1
            else:
                counts.open += 1

    async def _generate(self, session: EngineSession, most: int, temperature: float) -> list[Token]:
        sampling = Sampling(
            max_tokens=most, temperature=temperature, stop=self._model.parts.vocabulary.stop, logprobs=True
        )
        out: list[Token] = []
        async with aclosing(session.generate(sampling)) as tokens:
            async for token in tokens:
                out.append(token)
                if loop := _loop([t.id for t in out]):
                    del out[-loop * (LOOP_TIMES - 1) :]
                    break
        return out

    def _read(self, window: Window, tokens: Sequence[Token], said: str, *, forced: bool) -> Hypothesis:
        """What the tokens say: `language X<asr_text>`, where that was not given, and the text."""
        vocabulary = self._model.parts.vocabulary
        decode = vocabulary.text
        mark, sureness = vocabulary.tokenizer.token_to_id(TEXT_MARK), 1.0
        at = next((i for i, t in enumerate(tokens) if t.id == mark), None)
        if said:
            # A second tag would be the model's mistake: what follows it is text.
            tokens = [t for t in tokens if t.id != mark]
        elif at is not None:
            tag = decode([t.id for t in tokens[:at]]).strip()
            said = tag.splitlines()[0].strip().removeprefix("language").strip() if tag else ""
            sureness = _likely(tokens[:at])
            tokens = tokens[at + 1 :]
        elif decode([t.id for t in tokens]).lstrip().startswith("language"):
            # Cut inside the tag: it is no text.
            tokens = []
        if not forced:
            self._language = said
        language = "" if said.lower() == NOTHING else CODES.get(said, said.lower())
        plain = [t for t in tokens if t.id not in vocabulary.special]
        texts, groups = characters([t.id for t in plain], decode)
        likely = [math.exp(t.logprob or 0.0) for t in plain]
        pieces = words(texts, groups, likely, language)
        if pieces and not window.prefix and language not in UNSPACED and not pieces[0].text.startswith(" "):
            # As all others: what one window said is followed by what the next does.
            pieces[0] = replace(pieces[0], text=" " + pieces[0].text)
        times = self._times(window, pieces, language) if window.word_times else ()
        return Hypothesis(tuple(pieces), language, sureness, bool(pieces), 0, 0, tuple(times))

    def _times(self, window: Window, pieces: Sequence[HypothesisWord], language: str) -> list[Word]:
        """Where the words of a decode lie, those that it went on from before them."""
        texts, groups = characters(window.prefix, self._model.parts.vocabulary.text)
        known = words(texts, groups, [1.0] * len(window.prefix), language)
        return spread([*known, *pieces], window.pcm)[len(known) :]

    def close(self) -> None:
        """See Hearing."""
        session, self._session, self._of, self._finished = self._session, None, None, []
        if session:
            session.close()


def _most(window: Window) -> int:
    most = int(len(window.pcm) / SAMPLE_RATE_HZ * TOKENS_PER_S) + SPARE_TOKENS
    return max(1, min(most, window.max_tokens or most))


def _loop(ids: Sequence[int]) -> int:
    """The length of the phrase that has come LOOP_TIMES in a row at the end of these tokens; 0: none."""
    for size in range(1, min(LOOP_TOKENS, len(ids) // LOOP_TIMES) + 1):
        tail = list(ids[-size * LOOP_TIMES :])
        if tail == tail[:size] * LOOP_TIMES:
            return size
    return 0


def _likely(tokens: Sequence[Token]) -> float:
    return math.exp(min((t.logprob or 0.0 for t in tokens), default=0.0))


def _segment(number: int, start: int, samples: int, found: Hypothesis, temperature: float) -> TranscriptSegment:
    shift_s = start / SAMPLE_RATE_HZ
    likely = [max(p.probability, 1e-9) for p in found.pieces]
    return TranscriptSegment(
        id=number,
        seek=start // (SAMPLE_RATE_HZ // 100),
        start_s=shift_s,
        end_s=shift_s + samples / SAMPLE_RATE_HZ,
        text="".join(p.text for p in found.pieces),
        tokens=tuple(t for p in found.pieces for t in p.tokens),
        temperature=temperature,
        avg_logprob=sum(math.log(p) for p in likely) / max(1, len(likely)),
        compression_ratio=1.0,
        no_speech_prob=0.0,
        words=tuple(Word(w.text, w.start_s + shift_s, w.end_s + shift_s, w.probability) for w in found.words),
    )
