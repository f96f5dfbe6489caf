"""Qwen3-ASR as a transcriber: the windows of a session share one KV, so that only new rows are computed.

The rows of a window are the prompt with the user's hint, the audio, and the prefix of the hypothesis. When the window
grows, the rows after its finished encoder windows (8 s each) are rolled back. The open encoder window and the text are
then computed again. The released stream (qwen-asr 0.0.6, `streaming_transcribe`) computes all rows again, with the same
result.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen3_asr.audio_encoder import EncoderBatch, KnownWindow
from antiphon.adapters.qwen3_asr.checkpoint import END, Qwen3AsrParts, read
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
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
from antiphon.contracts.file_parts import transcribed_parts
from antiphon.engine.api import Sampling, Session, Token
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.threads import available_cores
from antiphon.errors import EngineError, ModelError
from antiphon.events.words import Word
from antiphon.modeling.token_words import UNSPACED, characters, spread, with_logprobs, words

LANGUAGE_CODES = {name: code for code, name in LANGUAGE_CODE_TO_NAME.items()}
TEXT_MARK = "<asr_text>"
# The prompt around the hint and the audio.
BEFORE_HINT = "<|im_start|>system\n"
BEFORE_AUDIO = f"{END}\n<|im_start|>user\n<|audio_start|>"
AFTER_AUDIO = f"<|audio_end|>{END}\n<|im_start|>assistant\n"
# Limit of tokens in a decode: TOKENS_PER_S for each second of audio, plus EXTRA_TOKENS. Fast Chinese speech has 8
# tokens a second.
TOKENS_PER_S, EXTRA_TOKENS = 14.0, 32
# A phrase of up to LOOP_TOKENS tokens is a loop if it repeats LOOP_REPEATS times in a row. qwen-asr 0.0.6 also removes
# phrases that repeat 20 times.
LOOP_TOKENS, LOOP_REPEATS = 20, 20
# Files are decoded in parts of up to PART_S, split at the quietest place of their last PART_SLACK_S.
PART_S, PART_SLACK_S = 24.0, 8.0
# The language that the model writes for audio without speech.
NO_LANGUAGE = "none"
# Rows that are reserved for a session: a window of half a minute.
RESERVE_ROWS = 1024
# Limits of a hint. The rest of a longer hint is ignored.
MAX_HINT_CHARS, MAX_HINT_TOKENS = 4000, 512
# Rows per second of audio, and the longest audio that the model was trained for (20 minutes). Half of a session's rows
# are for its audio, a quarter for the forced text, and an eighth for the earlier context.
ROWS_PER_S, MAX_AUDIO_S = 13.0, 1200.0
MAX_NEW_TOKENS = 4096
# On a GPU, the partials of several sessions wait for a common moment, this number of seconds apart. Finals do not wait.
PARTIAL_TICK_S = 0.04


@dataclass(slots=True)
class EncoderCounts:
    """Counts of the encoder's work in all sessions since the model was loaded.

    `finished`: finished encoder windows (8 s) that were computed and stay in the KV. `recomputed`: finished windows
    that were computed again because louder audio after them raised the floor of their features. `open`: computed
    encoder windows that were not finished yet. `decodes`: decoded windows.
    """

    finished: int = 0
    recomputed: int = 0
    open: int = 0
    decodes: int = 0


class Qwen3Asr:
    """A Transcriber with its own engine. It knows 30 languages, and has neither translation nor word alignment.

    `source` is a checkpoint's folder, in the released layout or that of `transformers`, or the loaded parts. `counts`
    sums up the work of all sessions. `control`: returns the tokens of a text that the model's prompts contain.
    """

    def __init__(self, source: Path | Qwen3AsrParts, model_id: str, options: EngineModelOptions) -> None:
        """Load the checkpoint and start the engine. Takes several seconds.

        Only the decoder may have int8 weights. Raises ModelError if the checkpoint does not load.
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
        # The parts of the prompt are few, so each is tokenized once. The names of languages may be the model's words.
        self.control = lru_cache(128)(self.parts.vocabulary.control)
        if "encoder" in options.settings.graphs:
            self.parts.audio_encoder.windows.capture()
        self.partials = options.tick(PARTIAL_TICK_S)
        self.encoding = EncoderBatch(self.engine.thread, self.parts.audio_encoder)
        # The number of concurrent generations at which the model counts as busy. Up to this number, they run without
        # delay.
        self._busy_from = available_cores() if device == "cpu" else 32
        self._profile = _profile(model_id, self.engine.context_rows)

    @property
    def profile(self) -> TranscriberProfile:
        """The properties of the model. Finals continue from the sent prefix, and partials are decoded every second."""
        return self._profile

    def busy(self) -> bool:
        """Return whether the number of generating sessions has reached one per core, or 32 on a GPU.

        This is the state at the engine's last step. Does not wait.
        """
        return self.engine.last_state.generating >= self._busy_from

    def overdue(self) -> bool:
        """Return False: the sessions of an engine share its steps, and do not wait for each other."""
        return False

    def open(self) -> Qwen3AsrStream:
        """Return a new session's stream. It takes no room in the engine until its first window."""
        return Qwen3AsrStream(self)

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Return (): this model does not align words, as its profile says."""
        return ()

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Yield a segment for each part of the file that contains speech, then one FileInfo. Parts have up to 24 s.

        The language that is detected first is used for the rest. Closing the iterator stops the decode within a step.
        Raises Refused if the engine is full, and ModelError.
        """
        stream = self.open()
        try:
            found = transcribed_parts(
                slabs, options, lambda window: stream.decode(window, options.temperature), PART_S, PART_SLACK_S
            )
            async with aclosing(found):
                async for one in found:
                    yield one
        finally:
            stream.close()

    @property
    def engines(self) -> tuple[LocalEngine, ...]:
        """The engine of the decoder, whose thread the server monitors."""
        return (self.engine,)

    def close(self) -> None:
        """Stop the model's thread. Open streams fail at their next window."""
        self.engine.close()


def _profile(model_id: str, context_rows: int) -> TranscriberProfile:
    """Return the model's profile. The limits of its settings follow from the rows that the engine has for a session."""
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


class Qwen3AsrStream:
    """A TranscriptionStream: one session's windows, decoded one at a time over one KV.

    If a window has the same start and hint as the last one, only its open encoder window and its text are computed. Any
    other window, and any window after a failure, is computed from its start.
    """

    def __init__(self, model: Qwen3Asr) -> None:
        self._model = model
        self._session: Session | None = None
        # Identifies the start of the KV: the number of its first audio sample, the hint, and the context of earlier
        # text.
        self._audio_key: tuple[int, str, str] | None = None
        self._head_rows = 0
        # The frames of the sound. Used in the model's thread.
        self.mel = model.parts.audio_encoder.open()
        # The finished encoder windows in the KV, and the index of the row after each.
        self._encoded: list[KnownWindow] = []
        self._encoded_ends: list[int] = []
        # The language name that the model wrote last.
        self._language = ""
        # The last hint and its tokens.
        self._hint = ""
        self._hint_ids: list[int] = []

    @property
    def head_rows(self) -> int:
        """The number of rows of the prompt, which precede the audio and are kept while the hint stays the same."""
        return self._head_rows

    @property
    def num_encoded_windows(self) -> int:
        """The number of finished encoder windows in the KV. The next window computes those that follow."""
        return len(self._encoded)

    async def decode(self, window: Window, temperature: float = 0.0) -> Hypothesis:
        """Decode one window. Partials and finals are decoded in the same way.

        At `temperature` 0 the likeliest tokens are chosen. A decode that loops is stopped, and the repeated phrase is
        kept once. After a cancelled call the stream is still usable. Waits for the engine. Raises Refused if the engine
        is full, and ModelError.
        """
        try:
            return await self._decode(window, temperature)
        except (ModelError, EngineError) as error:
            # The state of the KV is unknown, so the next window is computed from its start.
            self.close()
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"the engine failed: {error}") from error

    async def _decode(self, window: Window, temperature: float) -> Hypothesis:
        model = self._model
        session = self._session = self._session or await model.engine.open(RESERVE_ROWS)
        if not window.final:
            await model.partials.wait(self)
        self._append_head(session, window)
        await self._append_audio(session, window.pcm)
        name = LANGUAGE_CODE_TO_NAME.get(window.language or "", "")
        language = name or (self._language if window.prefix else "")
        tag = model.control(f"language {language}{TEXT_MARK}") if language else ()
        session.append((*model.control(AFTER_AUDIO), *tag, *window.prefix))
        num_prompt = session.length
        tokens = await self.generate(session, _max_tokens(window), temperature)
        model.counts.decodes += 1
        text = [t for t in tokens if t.id not in model.parts.vocabulary.stop]
        found = self._hypothesis(window, text, language, forced=bool(name))
        return replace(found, prompt_tokens=num_prompt, completion_tokens=len(tokens))

    def _append_head(self, session: Session, window: Window) -> None:
        """Make the KV begin with this window's prompt. If it already does, its encoded audio is kept."""
        key = (window.start_sample, window.prompt, window.context)
        # If the audio did not fit into the context, the engine has cut some of it, so it is computed again.
        if self._audio_key != key or session.context_start > self._head_rows:
            model, hint = self._model, window.prompt.strip()
            session.rollback(0)
            if self._audio_key is None or self._audio_key[1] != window.prompt or not window.prefix:
                self._language = ""
            if self._hint != hint:
                self._hint, self._hint_ids = hint, model.parts.vocabulary.plain(hint[:MAX_HINT_CHARS])[:MAX_HINT_TOKENS]
            context = window.context.strip()
            earlier = model.parts.vocabulary.plain("\n" + context if hint else context) if context else ()
            session.append((*model.control(BEFORE_HINT), *self._hint_ids, *earlier, *model.control(BEFORE_AUDIO)))
            session.pin()
            self._audio_key, self._head_rows = key, session.length
            self._encoded, self._encoded_ends = [], []

    async def _append_audio(self, session: Session, pcm: Pcm) -> None:
        """Append the rows of the audio. Finished encoder windows with unchanged frames keep their rows."""
        model, counts = self._model, self._model.counts
        found = await model.encoding.encode(self.mel, pcm, tuple(self._encoded))
        counts.recomputed += max(0, len(self._encoded) - found.num_same)
        counts.finished += len(found.finished)
        counts.open += len(found.rows) - len(found.finished)
        del self._encoded[found.num_same :], self._encoded_ends[found.num_same :]
        session.rollback(self._encoded_ends[-1] if self._encoded else self._head_rows)
        self._encoded += found.finished
        for rows in found.rows:
            session.append_embeddings(rows)
            if len(self._encoded_ends) < len(self._encoded):
                self._encoded_ends.append(session.length)

    async def generate(self, session: Session, max_tokens: int, temperature: float) -> list[Token]:
        """Sample the tokens after the rows of `session`, including tags and stop token, until they end or loop.

        The repeated phrase of a loop is kept once. Waits for the engine. Raises ModelError and EngineError.
        """
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, stop=self._model.parts.vocabulary.stop, logprobs=True
        )
        tokens = await session.collect(sampling, until=lambda found: first_loop([t.id for t in found]) is not None)
        end, size = first_loop([t.id for t in tokens]) or (len(tokens), 0)
        return list(tokens[: end - size * (LOOP_REPEATS - 1)])

    def _hypothesis(self, window: Window, tokens: Sequence[Token], language: str, *, forced: bool) -> Hypothesis:
        """Parse the tokens: the text, after `language X<asr_text>` if the argument `language` is ""."""
        vocabulary = self._model.parts.vocabulary
        decode = vocabulary.text
        mark, certainty = vocabulary.tokenizer.token_to_id(TEXT_MARK), 1.0
        at = next((i for i, t in enumerate(tokens) if t.id == mark), None)
        if language:
            # Another tag is a mistake of the model. The tokens after it are text.
            tokens = [t for t in tokens if t.id != mark]
        elif at is not None:
            tag = decode([t.id for t in tokens[:at]]).strip()
            language = tag.splitlines()[0].strip().removeprefix("language").strip() if tag else ""
            certainty = _least_probability(tokens[:at])
            tokens = tokens[at + 1 :]
        elif decode([t.id for t in tokens]).lstrip().startswith("language"):
            # The decode ended within the tag, so there is no text.
            tokens = []
        if not forced:
            self._language = language
        code = "" if language.lower() == NO_LANGUAGE else LANGUAGE_CODES.get(language, language.lower())
        pieces = self._words(tokens, code, first=not window.prefix, logprobs=window.logprobs)
        times = self._times(window, pieces, code) if window.word_times else ()
        return Hypothesis(tuple(pieces), code, certainty, bool(pieces), 0, 0, tuple(times))

    def _words(self, tokens: Sequence[Token], code: str, *, first: bool, logprobs: bool) -> list[HypothesisWord]:
        """Return the words of text tokens. `first`: they begin the window. `logprobs`: include log-probabilities."""
        vocabulary = self._model.parts.vocabulary
        plain = [t for t in tokens if t.id not in vocabulary.special]
        texts, groups = characters([t.id for t in plain], vocabulary.text)
        pieces = words(texts, groups, [math.exp(t.logprob or 0.0) for t in plain], code)
        if logprobs:
            pieces = with_logprobs(pieces, [t.logprob or 0.0 for t in plain], vocabulary.tokenizer.id_to_token)
        if pieces and first and code not in UNSPACED and not pieces[0].text.startswith(" "):
            # Begin with a space, as other models do, because the text follows that of the previous window.
            pieces[0] = replace(pieces[0], text=" " + pieces[0].text)
        return pieces

    def _times(self, window: Window, pieces: Sequence[HypothesisWord], language: str) -> list[Word]:
        """Estimate word times: the words of the prefix and `pieces` are spread over the loud parts of the window."""
        texts, groups = characters(window.prefix, self._model.parts.vocabulary.text)
        known = words(texts, groups, [1.0] * len(window.prefix), language)
        return spread([*known, *pieces], window.pcm)[len(known) :]

    def replace(self, window: Window) -> bool:
        """Return False: an engine does not queue windows that could be replaced."""
        return False

    def close(self) -> None:
        """Close the session in the engine, if there is one, and free its KV. The next window opens another session."""
        session, self._session, self._audio_key = self._session, None, None
        self.mel = self._model.parts.audio_encoder.open()
        if session:
            session.close()


def _max_tokens(window: Window) -> int:
    by_length = int(len(window.pcm) / SAMPLE_RATE_HZ * TOKENS_PER_S) + EXTRA_TOKENS
    return max(1, min(by_length, window.max_tokens or by_length))


def first_loop(ids: Sequence[int]) -> tuple[int, int] | None:
    """Return the first loop as (the number of tokens up to its end, the length of its phrase); None if there is none.

    A loop ends as soon as a phrase of up to LOOP_TOKENS tokens has come LOOP_REPEATS times in a row. Of two loops with
    the same end, that of the shorter phrase is returned.
    """
    found: list[tuple[int, int]] = []
    for size in range(1, min(LOOP_TOKENS, len(ids) // LOOP_REPEATS) + 1):
        run = 0
        for end in range(size, len(ids)):
            run = run + 1 if ids[end] == ids[end - size] else 0
            if run == size * (LOOP_REPEATS - 1):
                found.append((end + 1, size))
                break
    return min(found, default=None)


def _least_probability(tokens: Sequence[Token]) -> float:
    return math.exp(min((t.logprob or 0.0 for t in tokens), default=0.0))
