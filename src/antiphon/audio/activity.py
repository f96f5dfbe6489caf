"""Finds the stretches of audio in which a voice speaks, by its level. For the clean audio of synthesizers."""

from __future__ import annotations

import numpy as np

from antiphon.audio import Pcm

# The level is measured in steps of STEP_S. A step is speech if its level is at most RANGE_DB below that of the loud
# parts: the 95th percentile.
STEP_S, RANGE_DB, LOUD = 0.01, 40.0, 95


def speech_stretches(pcm: Pcm, rate_hz: int) -> list[tuple[float, float]]:
    """Return the beginning and the end of each stretch of speech, in seconds; empty for silence.

    `pcm`: float32 [num_samples], mono. Pauses of less than STEP_S are not found.
    """
    step = round(STEP_S * rate_hz)
    num_steps = len(pcm) // step
    if not num_steps:
        return []
    levels = np.square(pcm[: num_steps * step].reshape(num_steps, step)).mean(1)
    floor = np.percentile(levels, LOUD) * 10 ** (-RANGE_DB / 10)
    speaks = np.concatenate(([False], levels > floor, [False]))
    edges = np.flatnonzero(speaks[1:] != speaks[:-1]) * STEP_S
    return [(float(start_s), float(end_s)) for start_s, end_s in zip(edges[::2], edges[1::2], strict=True)]
