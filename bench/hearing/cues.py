"""How far cues of files begin from their words: sentences with pauses of 0.2 to 45 s between them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.sessions.transcription.file_speech import MAX_PAUSE_S

PAUSES_S = (0.2, 0.5, 1.0, 1.6, 3.0, 8.0, 20.0, 45.0)


def with_pauses(clips: Sequence[Pcm], minutes: float) -> tuple[Pcm, list[tuple[float, float]]]:
    """Return `minutes` of clips in turn, with pauses of PAUSES_S between them, shuffled, and where each clip lies in
    seconds. Equal for equal clips.
    """
    chooser, pieces, spans, end = random.Random(3), list[Pcm](), list[tuple[float, float]](), 0
    pauses: list[float] = []
    while end < minutes * 60 * SAMPLE_RATE_HZ:
        if not pauses:
            pauses = chooser.sample(PAUSES_S, len(PAUSES_S))
        clip = clips[len(spans) % len(clips)]
        pieces += [np.zeros(int(pauses.pop() * SAMPLE_RATE_HZ), np.float32), clip]
        start = end + len(pieces[-2])
        end = start + len(clip)
        spans.append((start / SAMPLE_RATE_HZ, end / SAMPLE_RATE_HZ))
    return np.concatenate(pieces), spans


def cues_off_s(cues_s: Sequence[float], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return for each clip the seconds from its start to the nearest cue's, `cues_s`. Only clips behind a pause of
    MAX_PAUSE_S count: another may be part of the cue before it.
    """
    ends = [0.0, *(end for _, end in spans)]
    starts = [start for (start, _), end in zip(spans, ends, strict=False) if start - end >= MAX_PAUSE_S]
    return [min(abs(cue_s - start) for cue_s in cues_s) for start in starts]
