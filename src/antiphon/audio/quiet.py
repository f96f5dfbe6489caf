"""Finds the quiet and the loud parts of audio whose word times are unknown."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm


async def split_at_quiet(slabs: AsyncIterable[Pcm], length_s: float, slack_s: float) -> AsyncIterator[tuple[int, Pcm]]:
    """Split audio that arrives in slabs of any length into parts of at most `length_s` seconds.

    Yields pairs: the index of a part's first sample, and the part. The parts are contiguous and cover all audio. Each
    split is in the quietest tenth of a second between `length_s` - `slack_s` and `length_s`, so that it is in a pause
    rather than in a word. The last part may be longer than `length_s` by up to `slack_s`; it is empty if there is no
    audio. Holds at most one part and one slab. Audio is float32 [num_samples], 16 kHz.
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
    """Return the middle of the quietest tenth of a second within one second of `near_s`, in seconds.

    A window without word times is split at this place. Returns `near_s` if there is no audio around it. `pcm`: float32
    [num_samples], 16 kHz.
    """
    tenth = SAMPLE_RATE_HZ // 10
    first = max(0, int((near_s - 1.0) * SAMPLE_RATE_HZ))
    near = pcm[first : first + 2 * SAMPLE_RATE_HZ]
    tenths = near[: len(near) // tenth * tenth].reshape(-1, tenth)
    if not len(tenths):
        return near_s
    return (first + (int(np.square(tenths).sum(axis=1).argmin()) + 0.5) * tenth) / SAMPLE_RATE_HZ


# Frames in a second. The energy of a frame of 20 ms indicates sound.
_FRAMES_A_S = 50


def spread_over_sound(weights: Sequence[float], pcm: Pcm, rate_hz: int = SAMPLE_RATE_HZ) -> list[float]:
    """Divide the sound in `pcm` in proportion to `weights`. Return the n + 1 borders of the parts, in seconds.

    Frames of 20 ms that are more than 30 dB below the loudest one count as pauses and are left out.
    """
    frame = rate_hz // _FRAMES_A_S
    frames = pcm[: len(pcm) // frame * frame].reshape(-1, frame)
    energy = np.square(frames, dtype=np.float64).sum(1)
    voiced = energy > 1e-3 * energy.max(initial=0.0)
    if not voiced.any():
        voiced = np.ones(max(1, len(frames)), bool)
    ends, sums = np.flatnonzero(voiced), np.concatenate(([0.0], np.cumsum(weights)))
    edges = sums / max(sums[-1], 1e-9) * (len(ends) - 1)
    return [float(t) for t in ends[np.rint(edges).astype(int)] * frame / rate_hz]
