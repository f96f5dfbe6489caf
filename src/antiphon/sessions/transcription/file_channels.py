"""Transcripts of recordings in which each person has a channel: one transcript in the order of time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import replace
from itertools import count
from typing import BinaryIO, Literal

from antiphon.audio.channel_survey import ChannelFacts
from antiphon.audio.containers import survey_channels
from antiphon.contracts import FileInfo, TranscriptSegment, speaker_label

# A pause between words from which another person's words may stand between them, in seconds.
CHANNEL_PAUSE_S = 0.5

Parts = AsyncIterator[FileInfo | TranscriptSegment]
# Runs a function in a thread, and returns its result.
InThread = Callable[..., Awaitable[ChannelFacts | None]]


async def surveyed(file: str | BinaryIO, in_thread: InThread) -> ChannelFacts:
    """Measure the channels of a file, about one second of audio at a time, so that others can use the thread."""
    with closing(survey_channels(file)) as survey:
        facts = None
        while facts is None:
            facts = await in_thread(_advanced, survey)
    return facts


def _advanced(survey: Generator[None, None, ChannelFacts]) -> ChannelFacts | None:
    try:
        next(survey)
    except StopIteration as end:
        found: ChannelFacts = end.value
        return found
    return None


def channels_to_hear(
    facts: ChannelFacts, mode: Literal["separate", "auto"], names: Sequence[str]
) -> dict[int, str] | None:
    """Return the channels to transcribe by themselves, each with the name of its speaker. None: they are mixed.

    `auto` separates channels that belong to different persons. `names`: the names of the channels, in their order.
    Channels without a name get a label that is not one of the names.
    """
    if mode == "auto" and not facts.apart:
        return None
    named = dict(enumerate(names))
    for channel in range(len(facts.loud)):
        if channel not in named:
            labels = (speaker_label(number) for number in count(channel))
            named[channel] = next(label for label in labels if label not in named.values())
    return {channel: named[channel] for channel in facts.own}


async def in_order(channels: Mapping[str, Parts]) -> AsyncIterator[FileInfo | TranscriptSegment]:
    """Yield the segments of several channels in the order of their starts, numbered from 0, then one FileInfo.

    `channels`: the results of transcribing each channel, by the name of its speaker. Only one of them is read at a
    time, and none further than one segment ahead. The language of the result is that of the first channel that has
    words, and its length that of the longest channel.
    """
    heads: dict[str, TranscriptSegment] = {}
    infos: dict[str, FileInfo] = {}
    spoken: list[str] = []
    async with AsyncExitStack() as stack:
        for parts in channels.values():
            await stack.enter_async_context(aclosing(parts))  # type: ignore[type-var]
        due = list(channels)
        number = 0
        while due or heads:
            for name in due:
                part = await anext(channels[name], None)
                while isinstance(part, FileInfo):
                    infos[name] = part
                    part = await anext(channels[name], None)
                if part is not None:
                    heads[name] = part
            due = []
            if heads:
                # Of equal starts, the first channel's goes first.
                name = min(heads, key=lambda name: heads[name].start_s)
                segment = heads.pop(name)
                # Transcribers begin a file's first segment with or without a space.
                text = f" {segment.text.strip()}"
                yield replace(segment, id=number, text=text, speaker=name)
                number += 1
                spoken.append(name)
                due = [name]
    first = next(iter(spoken), next(iter(channels)))
    yield FileInfo(infos[first].language, max(info.duration_s for info in infos.values()))
