"""`python -m bench.turn_taking.pitch`: whether a steady pitch finds a barge-in sooner than the speech detector alone.

    python -m bench.turn_taking.pitch [--data DIR]

The rule beside the detector's own (two frames of speech in a row): one frame of some probability, with a run of
steady pitch that has just ended in it. Measured are the delay from a voice's onset, for one recording of each speaker,
and how many of the sounds that should end nothing begin an interruption. The pitch is the strongest peak of the
normalised cross-correlation (Talkin 1995, "RAPT") between 70 and 400 Hz, every 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.common import machine, percentile, save, table
from bench.turn_taking.figures import voice_onset_s
from bench.turn_taking.interruptions import LEAD_S, speakers
from bench.turn_taking.sounds import sounds

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import VoiceActivityDetector
from antiphon.events.transcription import ServerVad
from antiphon.loading.loader import load, store_of
from antiphon.settings import Settings

HOP, WINDOW = SAMPLE_RATE_HZ // 100, SAMPLE_RATE_HZ // 25
HOP_S, WINDOW_S = HOP / SAMPLE_RATE_HZ, WINDOW / SAMPLE_RATE_HZ
SHORTEST_LAG, LONGEST_LAG = SAMPLE_RATE_HZ // 400, SAMPLE_RATE_HZ // 70
# A frame has a pitch from this correlation on, and it is steady where it changes by less than this a hop.
CORRELATION, STEADY = 0.6, 0.12
QUIETEST = 1e-7
SPEAKERS = 26
# (hops of a steady pitch, least probability of the detector); None: the detector alone.
RULES: tuple[tuple[int, float] | None, ...] = (None, (3, 0.5), (3, 0.3), (4, 0.2), (3, 0.1), (6, 0.1), (6, 0.05))

Floats = npt.NDArray[np.float64]


def pitches(pcm: Pcm) -> Floats:
    """The pitch of each hop in Hz and its correlation, float64 [hops, 2]; zeros where nothing is heard."""
    out = np.zeros((max(0, (len(pcm) - WINDOW - LONGEST_LAG) // HOP + 1), 2))
    for k in range(len(out)):
        x = pcm[k * HOP : k * HOP + WINDOW + LONGEST_LAG].astype(np.float64)
        a = x[:WINDOW] - x[:WINDOW].mean()
        energy = float((a * a).sum())
        if energy < QUIETEST * WINDOW:
            continue
        size = 1 << (len(x) + WINDOW - 1).bit_length()
        products = np.fft.irfft(np.fft.rfft(x, size) * np.fft.rfft(a, size).conj(), size)[: LONGEST_LAG + 1]
        sums = np.concatenate([[0.0], np.cumsum(x * x)])
        shifted = sums[WINDOW : WINDOW + LONGEST_LAG + 1] - sums[: LONGEST_LAG + 1]
        found = products / np.sqrt(energy * shifted + 1e-12)
        lag = SHORTEST_LAG + int(np.argmax(found[SHORTEST_LAG:]))
        out[k] = SAMPLE_RATE_HZ / lag, found[lag]
    return out


def steady(found: Floats, hops: int) -> npt.NDArray[np.bool_]:
    """Whether each hop ends a run of at least so many hops of steady pitch."""
    out, run = np.zeros(len(found), bool), 0
    for k, (before, now) in enumerate(pairwise(found), 1):
        voiced = now[1] > CORRELATION
        goes_on = voiced and before[1] > CORRELATION and abs(now[0] / before[0] - 1) < STEADY
        run = run + 1 if goes_on else int(voiced)
        out[k] = run >= hops
    return out


class Heard:
    """A recording as the detector hears it after silence, and its pitch."""

    def __init__(self, pcm: Pcm, probabilities: Sequence[float], frame_s: float, lead_s: float) -> None:
        self._probabilities, self._frame_s, self._lead_s = probabilities, frame_s, lead_s
        self._pitches = pitches(pcm)
        self.seconds = len(pcm) / SAMPLE_RATE_HZ

    def found_s(self, onset_s: float, rule: tuple[int, float] | None) -> float | None:
        """When a voice that begins at `onset_s` is found by a rule; None: never. Seconds of the recording."""
        threshold, ended = ServerVad().threshold, steady(self._pitches, rule[0]) if rule else np.zeros(0, bool)
        before = 0.0
        for k, probability in enumerate(self._probabilities):
            end = (k + 1) * self._frame_s - self._lead_s
            if end > onset_s:
                if min(before, probability) >= threshold:
                    return end
                hop = max(0, int((end - WINDOW_S) / HOP_S) + 1)
                if rule and probability >= rule[1] and ended[max(0, hop - 4) : hop].any():
                    return end
            before = probability
        return None


async def heard(detector: VoiceActivityDetector, pcm: Pcm) -> Heard:
    frame_s = detector.frame_samples / SAMPLE_RATE_HZ
    silence = np.zeros(round(LEAD_S / frame_s) * detector.frame_samples, np.float32)
    probabilities = await detector.open().feed(np.concatenate([silence, pcm]))
    return Heard(pcm, probabilities, frame_s, len(silence) / SAMPLE_RATE_HZ)


async def measure(data: Path) -> dict[str, Any]:
    """Every rule over every speaker and every sound."""
    settings = Settings()
    models = load(settings, store_of(settings.models), None, ("vad",))
    try:
        voices = [(voice_onset_s(c.pcm), await heard(models.required_vad, c.pcm)) for c in speakers(data, SPEAKERS)]
        once = {(s.kind, s.recording, s.pcm.tobytes()): s for s in sounds(data)}.values()
        others = [(s.kind, await heard(models.required_vad, s.pcm)) for s in once]
    finally:
        models.close()
    of, out = Counter(kind for kind, _ in others), dict[str, Any]()
    for rule in RULES:
        delays = [(v.found_s(onset, rule) or v.seconds) - onset for onset, v in voices]
        begun = Counter(kind for kind, sound in others if sound.found_s(-1.0, rule) is not None)
        out["detector alone" if rule is None else f"{rule[0]} hops of pitch, {rule[1]:.2f}"] = {
            "delay_ms": {p: round(percentile(delays, p) * 1000) for p in (50, 90, 95)},
            "begun": {kind: [begun[kind], of[kind]] for kind in of},
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.turn_taking.pitch")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "tests" / "data")
    args = parser.parse_args()
    found = asyncio.run(measure(args.data))
    kinds = list(next(iter(found.values()))["begun"])
    table(
        "a voice found after its onset, p50 / p90 / p95 in ms, and sounds that begin an interruption",
        ["rule", "delay", *kinds],
        [
            [
                name,
                " / ".join(str(ms) for ms in one["delay_ms"].values()),
                *(f"{one['begun'][k][0]} of {one['begun'][k][1]}" for k in kinds),
            ]
            for name, one in found.items()
        ],
    )
    print(f"\nwritten: {save('turns-pitch', {'machine': machine(), 'pitch': found})}")


if __name__ == "__main__":
    main()
