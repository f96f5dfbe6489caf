"""Finds quiet places in which long audio can be cut without knowing where its words lie."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm


async def split_at_quiet(slabs: AsyncIterable[Pcm], length_s: float, slack_s: float) -> AsyncIterator[tuple[int, Pcm]]:
    """Split audio that arrives in slabs of any length into parts of at most `length_s` seconds.

    Yields each part with its first sample's number; the parts join up and cover all of the audio. Each cut lies in the
    quietest tenth of a second of the last `slack_s` seconds that the part may have, so that it hits a pause rather than
    a word. The last part may be longer than `length_s` by `slack_s`, and is empty where there is no audio at all. Holds
    no more than one part and one slab. float32 [num_samples], 16 kHz.
    """
    start, tenth, held = 0, SAMPLE_RATE_HZ // 10, np.zeros(0, np.float32)
    length, slack = int(length_s * SAMPLE_RATE_HZ), int(slack_s * SAMPLE_RATE_HZ)
    async for slab in slabs:
        held = np.concatenate((held, slab))
        while len(held) > length + slack:
            near = held[length - slack : length]
            energy = np.square(near.reshape(-1, tenth)).sum(axis=1)
            end = length - slack + int(energy.argmin()) * tenth + tenth // 2
            yield start, held[:end]
            start, held = start + end, held[end:]
    yield start, held


def quietest_near(pcm: Pcm, near_s: float) -> float:
    """The middle of the quietest tenth of a second within one second of `near_s`, in seconds from the beginning of
    `pcm`.

    A window is cut there when no word times say where its words lie. Returns `near_s` where there is no audio around
    it. pcm: float32 [num_samples], 16 kHz.
    """
    tenth = SAMPLE_RATE_HZ // 10
    first = max(0, int((near_s - 1.0) * SAMPLE_RATE_HZ))
    near = pcm[first : first + 2 * SAMPLE_RATE_HZ]
    tenths = near[: len(near) // tenth * tenth].reshape(-1, tenth)
    if not len(tenths):
        return near_s
    return (first + (int(np.square(tenths).sum(axis=1).argmin()) + 0.5) * tenth) / SAMPLE_RATE_HZ
