"""Transcribes a file with a model that decodes windows: part by part, a segment for each part with speech."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import split_at_quiet
from antiphon.contracts.transcription import FileInfo, FileOptions, Hypothesis, TranscriptSegment, Window
from antiphon.events.words import Word


async def transcribed_parts(
    slabs: AsyncIterable[Pcm],
    options: FileOptions,
    decode: Callable[[Window], Awaitable[Hypothesis]],
    part_s: float,
    slack_s: float,
) -> AsyncGenerator[FileInfo | TranscriptSegment, None]:
    """Yield a segment for each part of the file that contains speech, then one FileInfo.

    The language that is found first is used for the rest. `part_s` and `slack_s`: see `split_at_quiet`. Raises the
    errors of `decode`.
    """
    language, number, num_samples = options.language, 0, 0
    async for start, part in split_at_quiet(slabs, part_s, slack_s):
        num_samples = start + len(part)
        if not len(part):
            continue
        window = Window(
            part,
            prompt=options.prompt,
            language=language,
            final=True,
            word_times=options.word_times,
            start_sample=start,
        )
        found = await decode(window)
        language = language or found.language or None
        if found.is_speech:
            yield _segment(number, start, len(part), found, options.temperature)
            number += 1
    yield FileInfo(language or "", num_samples / SAMPLE_RATE_HZ)


def _segment(number: int, start: int, num_samples: int, found: Hypothesis, temperature: float) -> TranscriptSegment:
    shift_s = start / SAMPLE_RATE_HZ
    logprobs = [math.log(max(piece.probability, 1e-9)) for piece in found.pieces]
    return TranscriptSegment(
        id=number,
        seek=start // (SAMPLE_RATE_HZ // 100),
        start_s=shift_s,
        end_s=shift_s + num_samples / SAMPLE_RATE_HZ,
        text="".join(piece.text for piece in found.pieces),
        tokens=tuple(token for piece in found.pieces for token in piece.tokens),
        temperature=temperature,
        avg_logprob=sum(logprobs) / max(1, len(logprobs)),
        compression_ratio=1.0,
        no_speech_prob=0.0,
        words=tuple(Word(w.text, w.start_s + shift_s, w.end_s + shift_s, w.probability) for w in found.words),
    )
