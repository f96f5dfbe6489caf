"""How fast the sound alone claims the floor, and which sounds claim it falsely (turns/floor_claim.py).

    python -m bench.turn_taking.claims DATA [--out FILE]

Recordings pass through the server's VAD as speech over an answer would, after a second of faint noise. No server is
needed, and the result does not depend on the load of the machine: times are those of the audio. The delay counts from
the start of the voice by energy, as in interruptions.py. The limits in floor_claim.py were chosen with the speakers for
whom `replay.is_fitted` is true; the other rows are of the others. There are too few recordings of sounds to divide.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import RESULTS, machine, table
from bench.hearing.clips import Clip, loaded, read_manifest
from bench.turn_taking.figures import at_level, voice_onset_s, wilson
from bench.turn_taking.replay import is_fitted
from bench.turn_taking.sounds import SPEECH_DB, sounds

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import VoiceActivityDetector
from antiphon.loading.loader import load, store_of
from antiphon.settings import Settings
from antiphon.turns.floor_claim import FloorClaim

KINDS = ("asr_read", "asr_speech", "asr_nonnative", "asr_short", "asr_multilang", "command_slots")
# Speech is judged for this time. The other sounds are judged whole.
SPEECH_S, LEAD_S, TAIL_S, NOISE_LEVEL = 4.0, 1.0, 0.5, 1e-4
HEADS = ("recordings", "claim", "95 %: low", "high", "p50, s", "p95, s", "max, s")


async def claimed_s(vad: VoiceActivityDetector, pcm: Pcm, seed: int) -> float | None:
    """Return the second of the recording at which its sound claims the floor; None if it never does."""
    noise = np.random.default_rng(seed)

    def quiet(seconds: float) -> Pcm:
        return noise.normal(0, NOISE_LEVEL, int(seconds * SAMPLE_RATE_HZ)).astype(np.float32)

    heard = np.concatenate((quiet(LEAD_S), pcm, quiet(TAIL_S)))
    heard = heard[: len(heard) // vad.frame_samples * vad.frame_samples]
    claim = FloorClaim(vad.frame_samples)
    for k, probability in enumerate(await vad.open().feed(heard)):
        end = (k + 1) * vad.frame_samples
        claim.feed(heard[end - vad.frame_samples : end], [probability])
        if claim.claims:
            return end / SAMPLE_RATE_HZ - LEAD_S
    return None


def speech(data: Path) -> Iterator[Clip]:
    """Return the first recording of each speaker; all of them, if a corpus does not tell its speakers apart."""
    seen = set()
    for clip in read_manifest(data):
        if clip.kind in KINDS and (clip.kind == "command_slots" or clip.speaker not in seen):
            seen.add(clip.speaker)
            yield from loaded([clip])


def row(delays_s: list[float | None]) -> dict[str, Any]:
    """Return the figures of one group of recordings."""
    found = [d for d in delays_s if d is not None]
    low, high = wilson(len(found), len(delays_s))
    p50, p95 = np.percentile(found, (50, 95)) if found else (np.nan, np.nan)
    return {
        "recordings": len(delays_s),
        "claim": len(found),
        "low": round(100 * low, 1),
        "high": round(100 * high, 1),
        "p50_s": round(float(p50), 3),
        "p95_s": round(float(p95), 3),
        "max_s": round(max(found, default=np.nan), 3),
    }


async def claims(data: Path) -> dict[str, Any]:
    """Return the figures of speech, by side of the split, and of each class of sounds."""
    settings = Settings()
    models = load(settings, store_of(settings.models), None, ("vad",))
    groups: dict[str, list[float | None]] = {}
    try:
        vad = models.required_vad
        for number, clip in enumerate(speech(data)):
            pcm = at_level(clip.pcm, SPEECH_DB)[: int(SPEECH_S * SAMPLE_RATE_HZ)]
            at = await claimed_s(vad, pcm, number)
            name = "speech, fitted" if is_fitted(clip.speaker or clip.id) else "speech, others"
            groups.setdefault(name, []).append(None if at is None else at - voice_onset_s(pcm))
        for number, sound in enumerate(sounds(data)):
            at = await claimed_s(vad, sound.pcm, number)
            groups.setdefault(sound.kind, []).append(None if at is None else at - voice_onset_s(sound.pcm))
    finally:
        models.close()
    return {name: row(delays) for name, delays in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast sound claims the floor, and which sounds do so falsely.")
    parser.add_argument("data", type=Path, help="folder with a manifest.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "turns-claims.json")
    args = parser.parse_args()
    found = asyncio.run(claims(args.data))
    table("sound that claims the floor", ("", *HEADS), [(name, *group.values()) for name, group in found.items()])
    args.out.write_text(json.dumps({"machine": machine(), "claims": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
