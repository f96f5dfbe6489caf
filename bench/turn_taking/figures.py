"""The figures of the live sections of `antiphon bench turns`. Pure functions, without a clock, server or files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from bench.common import percentile

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# Normal quantile of a two-sided 95 % interval.
Z = 1.96
DRAWS = 2000
FRAME_S = 0.01
# A voice is present if LOUD_FRAMES of OF_FRAMES consecutive frames are loud.
LOUD_FRAMES, OF_FRAMES = 6, 8


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that changes how the client plays the answer. `at` is the time at which it arrived, in seconds."""

    at: float
    kind: Literal["ducked", "unducked", "interrupted"]


def silent_from(marks: Sequence[Mark], onset: float) -> float | None:
    """Return when the client fell silent because of speech that began at `onset`.

    This is `onset` if the answer was ducked at that time; else the time of the first event that silences it; else None.
    """
    before = [mark for mark in marks if mark.at <= onset]
    if before and before[-1].kind != "unducked":
        return onset
    return next((mark.at for mark in marks if mark.at > onset and mark.kind != "unducked"), None)


def interrupted_at(marks: Sequence[Mark], since: float) -> float | None:
    """Return when the server decided that the speech ends the answer; None if it did not decide so."""
    return next((mark.at for mark in marks if mark.at >= since and mark.kind == "interrupted"), None)


def ducks_without_interruption(marks: Sequence[Mark]) -> int:
    """Return how often the answer was ducked, and then resumed or stayed ducked until the end."""
    following = [mark.kind for mark in marks[1:]] + ["end"]
    return sum(
        mark.kind == "ducked" and after != "interrupted"
        for mark, after in zip(marks, following[: len(marks)], strict=True)
    )


def frame_levels_db(pcm: Pcm) -> Pcm:
    """Return the level of each 10 ms in dB of full scale."""
    size = round(FRAME_S * SAMPLE_RATE_HZ)
    frames = pcm[: len(pcm) // size * size].reshape(-1, size)
    return np.asarray(10 * np.log10((frames.astype(np.float64) ** 2).mean(1) + 1e-12), np.float32)


def active_level_db(pcm: Pcm) -> float:
    """Return the level of active speech in dB of full scale, defined as in the data's tools/evalmix.py."""
    levels = frame_levels_db(pcm)
    loud = levels[levels > np.percentile(levels, 95) - 20]
    return float(10 * np.log10((10 ** (loud / 10)).mean()))


def at_level(pcm: Pcm, level_db: float) -> Pcm:
    """Return the recording, scaled so that its active speech has this level in dB of full scale."""
    return np.asarray(np.clip(pcm * 10 ** ((level_db - active_level_db(pcm)) / 20), -1, 1), np.float32)


def voice_onset_s(pcm: Pcm, below_db: float = 15.0) -> float:
    """Return the second at which the voice begins; 0 if nothing is loud.

    This is the start of the first 10 ms frame that is within `below_db` of the level of the recording's speech and is
    not isolated. A breath, a click and the noise of the room are quieter or shorter.
    """
    loud = frame_levels_db(pcm) > active_level_db(pcm) - below_db
    for at in np.flatnonzero(loud):
        if loud[at : at + OF_FRAMES].sum() >= LOUD_FRAMES:
            return float(at * FRAME_S)
    return 0.0


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's score; (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share, extra = hits / trials, Z**2 / trials
    middle = (share + extra / 2) / (1 + extra)
    half = Z * math.sqrt(share * (1 - share) / trials + extra / trials / 4) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


def rate_interval(events: int, minutes: float) -> tuple[float, float]:
    """Return the 95 % interval of a rate of independent events per minute, by Byar's approximation for Poisson."""
    if not minutes:
        return 0.0, math.inf

    def bound(count: float, side: float) -> float:
        return max(0.0, count * (1 - 1 / (9 * count) + side * Z / (3 * math.sqrt(count))) ** 3) / minutes

    return bound(events, -1) if events else 0.0, bound(events + 1, 1)


def bootstrap(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], seed: int = 7
) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of the values, by resampling them; (nan, nan) if there are none."""
    if not values:
        return math.nan, math.nan
    chance = np.random.default_rng(seed)
    given = np.asarray(values)
    drawn = [statistic(list(given[chance.integers(len(given), size=len(given))])) for _ in range(DRAWS)]
    return float(percentile(drawn, 2.5)), float(percentile(drawn, 97.5))


def delays(values_s: Sequence[float], unit: Literal["ms", "s"] = "ms") -> dict[str, object]:
    """Return p50 and p95 of delays in seconds, each with its interval, in the given `unit`."""
    scale, digits = (1000, 0) if unit == "ms" else (1, 2)

    def p95(values: Sequence[float]) -> float:
        return percentile(values, 95)

    def p50(values: Sequence[float]) -> float:
        return percentile(values, 50)

    def rounded(value: float) -> float:
        return round(float(value) * scale, digits) if math.isfinite(value) else math.nan

    return {
        f"p50_{unit}": rounded(p50(values_s)),
        "p50_interval": [rounded(v) for v in bootstrap(values_s, p50)],
        f"p95_{unit}": rounded(p95(values_s)),
        "p95_interval": [rounded(v) for v in bootstrap(values_s, p95)],
    }


def share(hits: int, trials: int) -> dict[str, object]:
    """Return a share in percent with its interval."""
    return {
        "of": trials,
        "count": hits,
        "percent": round(100 * hits / trials, 1) if trials else math.nan,
        "interval": [round(100 * v, 1) for v in wilson(hits, trials)],
    }
