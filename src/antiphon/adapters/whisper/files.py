"""Transcribes whole files with faster-whisper, in parts, window by window, and removes hallucinated words.

`decoder.py` contains the model, and decodes live windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer

from antiphon.adapters.whisper.guard import (
    MIN_FILE_LOGPROB,
    MIN_LOGPROB,
    has_words,
    is_noise,
    says_twice,
    seconds_of_sound,
    unspoken_copies,
)
from antiphon.adapters.whisper.outputs import (
    SAMPLES_PER_FRAME,
    file_segment,
    hypothesis_words,
    without_control_tokens,
)
from antiphon.adapters.whisper.word_edges import with_edges
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.leveller import raised
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts import FileInfo, FileOptions, HypothesisWord, TranscriptSegment, Urgency
from antiphon.engine.lane import Lane
from antiphon.events.words import Word

# Files are decoded in parts of up to PART_S seconds, split at the quietest place of the last PART_SLACK_S.
PART_S = 120
PART_SLACK_S = 15
BEAM_SIZE = 5
# OpenAI's fallback temperatures. Audio without speech fails at all of them, so a short part uses fewer: the first two,
# plus one for each SECONDS_PER_FALLBACK of audio.
TEMPERATURES, SECONDS_PER_FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 2.5
# A part is decoded in windows of up to 30 s. If the model ends a window early, the next one begins where it ended. A
# part has at most MAX_WINDOWS windows, plus one for each SECONDS_PER_WINDOW.
MAX_WINDOWS, SECONDS_PER_WINDOW = 2, 5.0
# Limit of tokens of a window in a part shorter than CAPPED_S: TOKENS_PER_S, the rate of the fastest speech in scripts
# with a token or more per character, plus EXTRA_TOKENS. In longer parts, only the decoder's own limit applies.
CAPPED_S, TOKENS_PER_S, EXTRA_TOKENS = 14.0, 14.0, 16
# A part or segment whose peak is below this value is silence, which Whisper would transcribe as "You".
SILENT_PEAK = 2**-14
# A segment that was accepted only at a higher temperature is noise if its probability of no speech is above this
# threshold. Rain has 0.52.
RETRIED_NO_SPEECH = 0.4


class FileDecoder:
    """Transcribes files with jobs in a transcriber's lane. It keeps no state between files."""

    def __init__(
        self,
        whisper: WhisperModel,
        lane: Lane[Any, Any],
        align: Callable[[Pcm, tuple[str, ...], str], tuple[Word, ...]],
        tokenizer: Callable[[str], Tokenizer],
    ) -> None:
        """`align` returns the times of words in up to 30 s of audio, and is called in the lane's threads. `tokenizer`
        returns the tokenizer of a language.
        """
        self._whisper = whisper
        self._lane = lane
        self._align = align
        self._tokenizer = tokenizer

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncGenerator[FileInfo | TranscriptSegment, None]:
        """Yield the segments of a file, which is decoded in parts of about two minutes, then one FileInfo.

        The language that is detected in the first part is used for the rest. Each window of 30 s is one job of the
        lane, after all live ones. A `temperature` of 0 enables OpenAI's fallback to higher ones if a decode fails.
        Raises Refused and ModelError.
        """
        language, number, num_samples = options.language, 0, 0
        min_logprob = _min_logprob(options)
        async for start, part in split_at_quiet(slabs, PART_S, PART_SLACK_S):
            num_samples = start + len(part)
            if _is_silent(part):
                continue
            segments, info = await self._lane.run(self._opener(part, options, language), Urgency.BULK)
            language, seeks = info.language, set[int]()
            window: list[TranscriptSegment] = []
            while (raw := await self._lane.run(partial(next, segments, None), Urgency.BULK)) is not None:
                seeks.add(raw.seek)
                if len(seeks) > MAX_WINDOWS + len(part) / SAMPLE_RATE_HZ // SECONDS_PER_WINDOW:
                    break
                if _is_silent(part[int(raw.start * SAMPLE_RATE_HZ) : int(raw.end * SAMPLE_RATE_HZ)]):
                    continue
                if not options.temperature and raw.temperature and raw.no_speech_prob > RETRIED_NO_SPEECH:
                    continue
                if not has_words(raw.text) or is_noise(raw.avg_logprob, raw.no_speech_prob, min_logprob):
                    continue
                segment = file_segment(number, raw, start)
                # Whisper repeats what it wrote in the same window.
                window = [s for s in window if s.seek == segment.seek]
                pcm = part[segment.seek * SAMPLES_PER_FRAME - start : int(segment.end_s * SAMPLE_RATE_HZ) - start]
                segment = replace(segment, words=_with_edges(segment, pcm))
                spoken = await self._without_copies(segment, window, pcm, language, word_times=options.word_times)
                if spoken:
                    window.append(spoken)
                    yield replace(spoken, word_tokens=_word_tokens(spoken, self._segment_words(spoken, language)))
                    number += 1
        yield FileInfo(language or "en", num_samples / SAMPLE_RATE_HZ)

    async def _without_copies(
        self, segment: TranscriptSegment, before: list[TranscriptSegment], pcm: Pcm, language: str, *, word_times: bool
    ) -> TranscriptSegment | None:
        """Return a segment without repeated words that have no sound; None if nothing is left.

        `before`: the earlier segments of its window. `pcm`: the audio of the window, up to the segment's end.
        """
        given = [p for s in before for p in self._segment_words(s, language)]
        pieces = self._segment_words(segment, language)
        texts = [p.text.strip() for p in (*given, *pieces)]
        if not says_twice(texts):
            return segment
        words = await self._lane.run(partial(self._align, pcm, tuple(texts), language), Urgency.BULK)
        if len(words) != len(texts):
            # Too many words for one window.
            return segment
        sound_s = seconds_of_sound(pcm, [(w.start_s, w.end_s) for w in words])
        cut = unspoken_copies(texts, sound_s, len(given))
        if not cut:
            return segment
        kept = [k for k in range(len(given), len(texts)) if k not in cut]
        if not kept:
            return None
        shift_s = segment.seek * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
        timed = [replace(words[k], start_s=words[k].start_s + shift_s, end_s=words[k].end_s + shift_s) for k in kept]
        return replace(
            segment,
            text="".join(pieces[k - len(given)].text for k in kept),
            tokens=tuple(t for k in kept for t in pieces[k - len(given)].tokens),
            end_s=max(segment.start_s, timed[-1].end_s),
            words=tuple(timed) if word_times else (),
        )

    def _segment_words(self, segment: TranscriptSegment, language: str) -> tuple[HypothesisWord, ...]:
        ids = [t for t in segment.tokens if t < self._tokenizer(language).eot]
        return hypothesis_words(self._tokenizer(language), ids, [1.0] * len(ids), language)

    def _opener(self, pcm: Pcm, options: FileOptions, language: str | None) -> Callable[[], tuple[Iterator[Any], Any]]:
        seconds = len(pcm) / SAMPLE_RATE_HZ
        temperatures = TEMPERATURES[: 2 + int(seconds / SECONDS_PER_FALLBACK)]

        def begin() -> tuple[Iterator[Any], Any]:
            segments, info = self._whisper.transcribe(
                raised(pcm),
                language=language,
                task=options.task,
                initial_prompt=without_control_tokens(options.prompt) or None,
                temperature=options.temperature or temperatures,
                log_prob_threshold=_min_logprob(options),
                max_new_tokens=int(seconds * TOKENS_PER_S) + EXTRA_TOKENS if seconds < CAPPED_S else None,
                word_timestamps=options.word_times,
                condition_on_previous_text=False,
                beam_size=BEAM_SIZE,
            )
            return iter(segments), info

        return begin


def _min_logprob(options: FileOptions) -> float:
    """Return the mean log-probability below which a decode fails, and finally counts as noise.

    A prompt makes unrelated words less likely: a clear "No." has -0.72, and -1.02 after a prompt of three names.
    """
    return MIN_LOGPROB if options.temperature or options.prompt else MIN_FILE_LOGPROB


def _is_silent(pcm: Pcm) -> bool:
    return float(np.abs(pcm).max(initial=0.0)) < SILENT_PEAK


def _with_edges(segment: TranscriptSegment, pcm: Pcm) -> tuple[Word, ...]:
    """Return a segment's words, if any, with better times. `pcm`: the audio of its window, up to the segment's end."""
    shift_s = segment.seek * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
    words = [replace(w, start_s=w.start_s - shift_s, end_s=w.end_s - shift_s) for w in segment.words]
    return tuple(replace(w, start_s=w.start_s + shift_s, end_s=w.end_s + shift_s) for w in with_edges(words, pcm))


def _word_tokens(segment: TranscriptSegment, pieces: Sequence[HypothesisWord]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word of a segment, or () if the segment has no words.

    `pieces`: the words of the text with their tokens. A punctuation mark may be a separate piece, but is part of a word
    in the segment.
    """
    tokens: list[list[int]] = [[] for _ in segment.words]
    ends = list(accumulate(len("".join(w.text.split())) for w in segment.words))
    at = 0
    for piece in pieces if ends else ():
        tokens[min(bisect_right(ends, at), len(ends) - 1)] += piece.tokens
        at += len("".join(piece.text.split()))
    return tuple(tuple(t) for t in tokens)
