"""Segments of files begin and end with their words, and contain no pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from antiphon.contracts import FileInfo, TranscriptSegment
from antiphon.events.words import Word
from antiphon.sessions.transcription.file_speech import by_words, segments_by_words


def segment(text: str, *words: tuple[str, float, float], id_: int = 0) -> TranscriptSegment:
    timed = tuple(Word(text, start, end, 0.9) for text, start, end in words)
    tokens = tuple((k,) for k in range(len(words)))
    return TranscriptSegment(id_, 0, 0.0, 9.0, text, (900, 901), 0.0, -0.2, 1.0, 0.1, timed, tokens)


def cues(segments: list[TranscriptSegment]) -> list[tuple[str, float, float]]:
    return [(s.text, s.start_s, s.end_s) for s in segments]


def test_a_segment_lasts_from_its_first_word_to_its_last() -> None:
    (found,) = by_words(segment(" One, two.", ("One,", 3.0, 3.4), ("two.", 4.8, 5.2)))
    assert cues([found]) == [(" One, two.", 3.0, 5.2)]
    assert found.tokens == (900, 901)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (segment(" One, two.", ("One,", 3.0, 3.4), ("two.", 4.9, 5.2)), [(" One,", 3.0, 3.4), (" two.", 4.9, 5.2)]),
        (segment("广州市", ("广州", 1.0, 1.4), ("市", 3.0, 3.2)), [("广州", 1.0, 1.4), ("市", 3.0, 3.2)]),
        (
            segment(" no no no", ("no", 0.0, 0.2), ("no", 8.0, 8.2), ("no", 8.3, 8.5)),
            [(" no", 0.0, 0.2), (" no no", 8.0, 8.5)],
        ),
        # A segment is not divided at a word that is missing from its text.
        (segment(" a b", ("a", 0.0, 0.2), ("x", 5.0, 5.2)), [(" a b", 0.0, 5.2)]),
        (
            segment(
                " ...",
            ),
            [(" ...", 0.0, 9.0)],
        ),
    ],
    ids=["pause", "without spaces", "the same word", "another spelling", "no words"],
)
def test_a_pause_divides_a_segment(given: TranscriptSegment, parts: list[tuple[str, float, float]]) -> None:
    found = by_words(given)
    assert cues(found) == parts
    assert "".join(s.text for s in found) == given.text
    assert [w for s in found for w in s.words] == list(given.words)
    if len(found) > 1:
        assert [s.tokens for s in found] == [tuple(t for (t,) in s.word_tokens) for s in found]
        assert [t for s in found for t in s.tokens] == list(range(len(given.words)))


def test_segments_are_numbered_anew() -> None:
    async def parts() -> AsyncIterator[FileInfo | TranscriptSegment]:
        yield segment(" a b", ("a", 0.0, 0.2), ("b", 5.0, 5.2))
        yield segment(" c", ("c", 6.0, 6.2), id_=1)
        yield FileInfo("en", 9.0)

    async def main() -> list[FileInfo | TranscriptSegment]:
        return [p async for p in segments_by_words(parts())]

    *found, info = asyncio.run(main())
    assert [s.id for s in found if isinstance(s, TranscriptSegment)] == [0, 1, 2]
    assert info == FileInfo("en", 9.0)
