"""Transcription of files: finds the speech in a file, and divides the transcriber's segments at pauses.

The transcriber gets the audio that a live session would pass to it. Without speech detection it made up words for 17 of
27 recordings of noise (docs/design/hearing.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import FileInfo, FileOptions, Transcriber, TranscriptSegment, VoiceActivityDetector
from antiphon.events.transcription import ServerVad
from antiphon.events.words import Word
from antiphon.turns.speech_stretches import SpeechStretches, SpeechTimeline

# A pause longer than the silence and the padding together is shortened to their length, so that words keep their
# context across it. A file has more padding than a live turn, because speech that begins in rain is detected 0.4 s
# late.
FILE_VAD = ServerVad(threshold=0.5, prefix_padding_ms=600, silence_duration_ms=1000)
# Stretches of speech further apart than this are transcribed separately, so that no segment spans the silence.
MAX_JOINED_GAP_S = 10.0
# Samples per call of the detector. Live sessions share its batches and must not wait for a whole slab of a file.
FEED_SAMPLES = SAMPLE_RATE_HZ // 2
# A subtitle does not span a pause of MAX_PAUSE_S.
MAX_PAUSE_S = 1.5
# `TranscriptSegment.seek` counts mel frames.
SEEKS_PER_S = 100
# Gets each piece of speech, and the number of its first sample in the file.
SpeechListener = Callable[[int, Pcm], Awaitable[None]]


async def transcribe_speech(
    transcriber: Transcriber,
    detector: VoiceActivityDetector,
    slabs: AsyncIterable[Pcm],
    options: FileOptions,
    vad: ServerVad = FILE_VAD,
    listener: SpeechListener | None = None,
) -> AsyncIterator[FileInfo | TranscriptSegment]:
    """Transcribe a file of any length, like `Transcriber.transcribe`, but without the audio between stretches of
    speech.

    The times and the length in the results are those of the whole file. If the file has no speech, the transcriber is
    not called, and the language is that of the options, or "en". `slabs` are read as they are needed. `listener` gets
    the same speech. Raises the errors of `Transcriber.transcribe` and of `listener`, and Refused if the detector's lane
    is full.
    """
    speech, number, language = _Speech(slabs, detector, vad, listener), 0, options.language
    async with aclosing(speech):
        while await speech.more():
            timeline = SpeechTimeline()
            passage = speech.passage(timeline)
            parts = transcriber.transcribe(passage, replace(options, language=language))
            async with aclosing(passage), aclosing(parts):  # type: ignore[type-var]
                async for part in parts:
                    if isinstance(part, TranscriptSegment):
                        yield _in_file(part, number, timeline)
                        number += 1
                    else:
                        language = language or part.language
    yield FileInfo(language or "en", speech.num_samples / SAMPLE_RATE_HZ)


class _Speech:
    """The speech of a file, in passages: stretches close enough to be transcribed together."""

    def __init__(
        self,
        slabs: AsyncIterable[Pcm],
        detector: VoiceActivityDetector,
        vad: ServerVad,
        listener: SpeechListener | None,
    ) -> None:
        self.num_samples = 0
        self._listener = listener
        self._slabs = slabs
        self._stream = detector.open()
        self._stretches = SpeechStretches(vad, detector.frame_samples)
        self._pieces = self._read()
        # The next piece of speech, which was read but not yielded yet.
        self._next: tuple[int, Pcm] | None = None

    async def more(self) -> bool:
        """Return whether another passage follows. Reads the file up to the next speech."""
        if self._next is None:
            self._next = await anext(self._pieces, None)
        return self._next is not None

    async def passage(self, timeline: SpeechTimeline) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of the next passage, and record its position in the file in `timeline`."""
        max_gap = MAX_JOINED_GAP_S * SAMPLE_RATE_HZ
        first = True
        while await self.more() and self._next is not None:
            sample, pcm = self._next
            if not first and sample - timeline.end > max_gap:
                return
            first, self._next = False, None
            timeline.add(sample, len(pcm))
            if self._listener:
                await self._listener(sample, pcm)
            yield pcm

    async def _read(self) -> AsyncGenerator[tuple[int, Pcm], None]:
        """Yield the stretches of speech. Adjacent stretches of one slab are joined."""
        async for slab in self._slabs:
            kept: list[tuple[int, Pcm]] = []
            for at in range(0, len(slab), FEED_SAMPLES):
                pcm = slab[at : at + FEED_SAMPLES]
                kept += self._stretches.feed(pcm, await self._stream.feed(pcm))
            self.num_samples += len(slab)
            for stretch in _joined(kept):
                yield stretch
        for stretch in self._stretches.end():
            yield stretch

    async def aclose(self) -> None:
        """Stop reading the file and close its iterator."""
        await self._pieces.aclose()


def _joined(pieces: list[tuple[int, Pcm]]) -> list[tuple[int, Pcm]]:
    """Return the same audio with adjacent pieces joined."""
    groups: list[tuple[int, list[Pcm]]] = []
    end = -1
    for sample, pcm in pieces:
        if sample == end:
            groups[-1][1].append(pcm)
        else:
            groups.append((sample, [pcm]))
        end = sample + len(pcm)
    return [(sample, np.concatenate(pcms)) for sample, pcms in groups]


def _in_file(segment: TranscriptSegment, number: int, timeline: SpeechTimeline) -> TranscriptSegment:
    """Return a segment of a passage with its number and its times in the file."""
    start_s = timeline.start_s(segment.start_s)
    seek_s = timeline.start_s(segment.seek / SEEKS_PER_S)
    return replace(
        segment,
        id=number,
        seek=round(seek_s * SEEKS_PER_S),
        start_s=start_s,
        end_s=max(start_s, timeline.end_s(segment.end_s)),
        words=tuple(_word_in_file(word, timeline) for word in segment.words),
    )


def _word_in_file(word: Word, timeline: SpeechTimeline) -> Word:
    start_s, end_s = timeline.span_s(word.start_s, word.end_s)
    return replace(word, start_s=start_s, end_s=end_s)


async def segments_by_words(
    parts: AsyncIterable[FileInfo | TranscriptSegment], max_pause_s: float = MAX_PAUSE_S
) -> AsyncIterator[FileInfo | TranscriptSegment]:
    """Yield a transcriber's results, with its segments divided by `by_words` and renumbered."""
    number = 0
    async for part in parts:
        if not isinstance(part, TranscriptSegment):
            yield part
            continue
        for segment in by_words(part, max_pause_s):
            yield replace(segment, id=number)
            number += 1


def by_words(segment: TranscriptSegment, max_pause_s: float = MAX_PAUSE_S) -> list[TranscriptSegment]:
    """Divide a segment at pauses of `max_pause_s` and more. Each part lasts from the start of its first word to the end
    of its last word. Whisper's own times begin a segment up to 3 s before its speech if a pause precedes it.

    The texts of the parts add up to the segment's text. A segment without words stays as it is. The parts of a divided
    segment have the tokens of their words, without Whisper's timestamps.
    """
    words = segment.words
    return divided(segment, [k for k in range(1, len(words)) if words[k].start_s - words[k - 1].end_s >= max_pause_s])


def divided(segment: TranscriptSegment, at: Sequence[int]) -> list[TranscriptSegment]:
    """Divide a segment before the words with these numbers, which ascend from 1. See `by_words`.

    A word that is not found in the segment's text begins no part.
    """
    words = segment.words
    if not words:
        return [segment]
    offsets = _offsets(segment.text, words)
    firsts = [0, *(k for k in at if offsets[k] is not None)]
    parts = []
    for first, behind in zip(firsts, [*firsts[1:], len(words)], strict=True):
        own = words[first:behind]
        part = replace(segment, start_s=own[0].start_s, end_s=max(w.end_s for w in own), words=own)
        if len(firsts) > 1:
            end = offsets[behind] if behind < len(words) else None
            tokens = tuple(t for of_word in segment.word_tokens[first:behind] for t in of_word)
            part = replace(part, text=segment.text[(offsets[first] or 0) if first else 0 : end], tokens=tokens)
            part = replace(part, word_tokens=segment.word_tokens[first:behind])
        parts.append(part)
    return parts


def _offsets(text: str, words: Sequence[Word]) -> list[int | None]:
    """Return the offset of each word in the text, with the spaces before it, or None for a word that is not found."""
    offsets: list[int | None] = []
    at = 0
    for word in words:
        found = text.find(word.text, at)
        offsets.append(None if found < 0 else len(text[:found].rstrip()))
        at = at if found < 0 else found + len(word.text)
    return offsets
