"""Improves the word times that the decoder's attention gives, by moving them to quiet places of the audio. Pure.

Attention moves to the next word too early, and counts a pause as part of an adjacent word. So this module shifts the
words, cuts off pauses at their edges, and moves an edge between two words to the softest place nearby.

Measured with the base model's finals, on 558 words of 35 recordings of read English, against forced alignment by
PocketSphinx. The error of starts is 40 ms in the median and 200 ms at the 95th percentile (without this module: 60 and
361 ms). The error of ends is 40 and 200 ms (without: 60 and 300 ms). The constants were tuned on half of the
recordings. The errors on the other half are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.words import Word

# All frames here are 10 ms long.
FRAMES_PER_S = 100
SAMPLES_PER_FRAME = SAMPLE_RATE_HZ // FRAMES_PER_S
# The number of frames by which the attention is ahead of the words.
LEAD_FRAMES = 6
# A frame is quiet if it is QUIET_DB below the loud frames or within FLOOR_DB of the noise floor, whichever threshold is
# higher, and at least LEAST_DB below the loud frames.
QUIET_DB, FLOOR_DB, LEAST_DB = 25.0, 6.0, 10.0
# Minimum length of a pause. The closure of a plosive is shorter.
PAUSE_FRAMES = 8
# A pause is cut off if it begins or ends within this distance of the word's edge.
EDGE_FRAMES = 8
# Limit of the shift of an edge between two words to a softer place.
SNAP_FRAMES = 4
# Minimum length of a word.
LEAST_FRAMES = 2

Levels = npt.NDArray[np.float64]


def with_edges(words: Sequence[Word], pcm: Pcm) -> tuple[Word, ...]:
    """Return the words with better times.

    `words`: in order, with times in seconds from the start of `pcm`. `pcm`: float32 [num_samples], mono, 16 kHz. Edges
    move by up to 0.1 s, or further across a pause. Words stay in order and within the audio.
    """
    levels = _levels(pcm)
    if not len(levels) or not words:
        return tuple(words)
    pauses = _pauses(levels)
    spans = [_without_pauses(_frames(word, len(levels)), pauses) for word in words]
    for k in range(1, len(spans)):
        (start, edge), (next_start, end) = spans[k - 1], spans[k]
        first, last = max(start + LEAST_FRAMES, edge - SNAP_FRAMES), min(end - LEAST_FRAMES, edge + SNAP_FRAMES)
        if edge == next_start and first <= last:
            edge = first + int(np.argmin(levels[first : last + 1]))
            spans[k - 1], spans[k] = (start, edge), (edge, end)
    return tuple(
        replace(word, start_s=start / FRAMES_PER_S, end_s=end / FRAMES_PER_S)
        for word, (start, end) in zip(words, spans, strict=True)
    )


def _levels(pcm: Pcm) -> Levels:
    """Return the power of each frame in dB, smoothed over three frames."""
    num_frames = len(pcm) // SAMPLES_PER_FRAME
    if not num_frames:
        return np.zeros(0)
    frames = pcm[: num_frames * SAMPLES_PER_FRAME].reshape(num_frames, SAMPLES_PER_FRAME)
    power = np.pad(np.square(frames, dtype=np.float64).mean(1), 1, mode="edge")
    smooth = (power[:-2] + power[1:-1] + power[2:]) / 3
    return np.asarray(10 * np.log10(smooth + 1e-10))


def _pauses(levels: Levels) -> list[tuple[int, int]]:
    """Return the runs of at least PAUSE_FRAMES quiet frames: the first frame of each, and the one after its last."""
    loud, floor = np.percentile(levels, 95), np.percentile(levels, 5)
    quiet = levels < min(max(loud - QUIET_DB, floor + FLOOR_DB), loud - LEAST_DB)
    edges = np.flatnonzero(np.diff(quiet, prepend=False, append=False))
    runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(first, end) for first, end in runs if end - first >= PAUSE_FRAMES]


def _frames(word: Word, num_frames: int) -> tuple[int, int]:
    start = min(num_frames, round(word.start_s * FRAMES_PER_S) + LEAD_FRAMES)
    return start, min(num_frames, max(start, round(word.end_s * FRAMES_PER_S) + LEAD_FRAMES))


def _without_pauses(span: tuple[int, int], pauses: Sequence[tuple[int, int]]) -> tuple[int, int]:
    start, end = span
    for first, behind in pauses:
        if first <= span[0] + EDGE_FRAMES and span[0] < behind <= span[1] - LEAST_FRAMES:
            start = behind
        elif behind >= span[1] - EDGE_FRAMES and span[0] + LEAST_FRAMES <= first < span[1]:
            end = first
    return start, max(start, end)
