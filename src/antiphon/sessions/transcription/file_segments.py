"""The segments of a file by the times of their words: where each begins and ends, and no pause inside one. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace

from antiphon.contracts import FileInfo, TranscriptSegment
from antiphon.events.words import Word

# A subtitle does not last through a pause of so many seconds.
MAX_PAUSE_S = 1.5


async def segments_by_words(
    parts: AsyncIterable[FileInfo | TranscriptSegment],
) -> AsyncIterator[FileInfo | TranscriptSegment]:
    """Yield what a transcriber gives, with its segments divided as `by_words` does, and numbered anew."""
    number = 0
    async for part in parts:
        if not isinstance(part, TranscriptSegment):
            yield part
            continue
        for segment in by_words(part):
            yield replace(segment, id=number)
            number += 1


def by_words(segment: TranscriptSegment) -> list[TranscriptSegment]:
    """Return a segment as one or more that last from their first word's start to their last word's end, divided at
    pauses of MAX_PAUSE_S and more.

    Joined, the texts are the segment's. Without words it stays as it is: Whisper's own times begin a segment up to 3 s
    before its speech, where a pause comes before it. Where it is divided, its parts have the tokens of their words, and
    none of the timestamps that Whisper wrote.
    """
    words = segment.words
    if not words:
        return [segment]
    pauses = [k for k in range(1, len(words)) if words[k].start_s - words[k - 1].end_s >= MAX_PAUSE_S]
    offsets = _offsets(segment.text, words)
    firsts = [0, *(k for k in pauses if offsets[k] is not None)]
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
    """Where each word begins in the text, with the spaces before it; None for one that the text does not have."""
    offsets: list[int | None] = []
    at = 0
    for word in words:
        found = text.find(word.text, at)
        offsets.append(None if found < 0 else len(text[:found].rstrip()))
        at = at if found < 0 else found + len(word.text)
    return offsets
