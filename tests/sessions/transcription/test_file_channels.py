"""Transcripts of several channels: the order of their segments, their names, and which channels are heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from antiphon.audio.channel_survey import ChannelFacts
from antiphon.contracts import FileInfo, TranscriptSegment
from antiphon.sessions.transcription.file_channels import channels_to_hear, in_order

CALL = ChannelFacts((0.1, 0.1), (None, None), apart=True)


def segment(start_s: float, text: str) -> TranscriptSegment:
    return TranscriptSegment(0, 0, start_s, start_s + 1, text, (), 0.0, 0.0, 1.0, 0.0)


async def channel(
    language: str, *starts_s: float, length_s: float = 20.0
) -> AsyncIterator[FileInfo | TranscriptSegment]:
    for start_s in starts_s:
        yield segment(start_s, f"at {start_s:.0f}")
    yield FileInfo(language, length_s)


def merged(
    **channels: AsyncIterator[FileInfo | TranscriptSegment],
) -> tuple[list[tuple[int, str, str]], FileInfo | None]:
    async def main() -> list[FileInfo | TranscriptSegment]:
        return [part async for part in in_order(channels)]

    *segments, info = asyncio.run(main())
    assert isinstance(info, FileInfo)
    return [(s.id, s.speaker, s.text) for s in segments if isinstance(s, TranscriptSegment)], info


def test_segments_of_all_channels_are_in_the_order_of_time() -> None:
    segments, info = merged(A=channel("en", 0, 5, 6), B=channel("de", 2, 5, 9, length_s=21))
    assert segments == [
        (0, "A", " at 0"),
        (1, "B", " at 2"),
        (2, "A", " at 5"),
        (3, "B", " at 5"),
        (4, "A", " at 6"),
        (5, "B", " at 9"),
    ]
    assert info == FileInfo("en", 21)


def test_the_language_is_that_of_a_channel_with_words() -> None:
    segments, info = merged(A=channel("en"), B=channel("de", 2))
    assert segments == [(0, "B", " at 2")]
    assert info == FileInfo("de", 20)
    assert merged(A=channel("en")) == ([], FileInfo("en", 20))


@pytest.mark.parametrize(
    ("facts", "mode", "names", "heard"),
    [
        (CALL, "separate", (), {0: "A", 1: "B"}),
        (CALL, "auto", ("agent", "caller", "nobody"), {0: "agent", 1: "caller"}),
        # A label is never another channel's name.
        (CALL, "separate", ("B",), {0: "B", 1: "C"}),
        (ChannelFacts((0.1, 0.1), (None, None), apart=False), "auto", (), None),
        # A channel keeps its label if others are silent or copies.
        (ChannelFacts((0.0, 0.1, 0.1), (None, None, 1), apart=False), "separate", (), {1: "B"}),
    ],
)
def test_channels_have_names(
    facts: ChannelFacts, mode: str, names: tuple[str, ...], heard: dict[int, str] | None
) -> None:
    assert channels_to_hear(facts, mode, names) == heard  # type: ignore[arg-type]
