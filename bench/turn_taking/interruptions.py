"""The section `barge-in` of `antiphon bench turns`: the time until a client falls silent after an interruption.

One recording of each speaker plays over the first answer of a new conversation. The delay counts from the start of the
voice by energy. This is the first 10 ms frame that is within 15 dB of the level of the speech and is not isolated. The
results also have the onset that the VAD finds in the same recordings without a server: two frames of speech in a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import Server, show
from bench.driver import LEAD_S, LEFT_S, MODES, telling
from bench.hearing.clips import QUIETEST_DBFS, Clip, loaded, read_manifest, spread
from bench.turn_taking.figures import delays, interrupted_at, silent_from, voice_onset_s, wilson

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.turns import VoiceActivityDetector
from antiphon.events.transcription import ServerVad
from antiphon.loading.loader import load, store_of
from antiphon.settings import Settings

KINDS = ("asr_read", "asr_speech", "asr_nonnative")
SHORTEST_S, LONGEST_S = 1.8, 9.0
# Seconds after the end of the recording to wait for a decision.
PATIENCE_S = 1.5
SHOWN = ("detector_alone", "silent", "decided")


@dataclass(frozen=True, slots=True)
class Onset:
    """The start of a recording's voice: by energy, and as the VAD found it. Both in seconds."""

    energy: float
    detected: float


def speakers(data: Path, most: int) -> list[Clip]:
    """Return for each speaker the shortest English recording that has a text."""
    found: dict[str, Clip] = {}
    for clip in read_manifest(data):
        is_wanted = clip.kind in KINDS and clip.language == "en" and clip.text and clip.speaker
        if not is_wanted or not SHORTEST_S < clip.seconds < LONGEST_S or clip.active_dbfs < QUIETEST_DBFS:
            continue
        before = found.get(clip.speaker)
        if before is None or clip.seconds < before.seconds:
            found[clip.speaker] = clip
    return loaded(spread(list(found.values()), most))


async def onsets(clips: Sequence[Clip]) -> list[Onset]:
    """Return the start of the voice in each recording. Loads the default detector, and closes it."""
    settings = Settings()
    models = load(settings, store_of(settings.models), None, ("vad",))
    try:
        energies = [voice_onset_s(clip.pcm) for clip in clips]
        return [
            Onset(energy, await detected_s(models.required_vad, clip.pcm, energy))
            for clip, energy in zip(clips, energies, strict=True)
        ]
    finally:
        models.close()


async def detected_s(detector: VoiceActivityDetector, pcm: Pcm, onset: float) -> float:
    """Return when the detector found the voice that begins at `onset`, in seconds of the recording.

    This is the end of the second frame of speech in a row, if LEAD_S of silence precede the recording. If the detector
    finds no voice, it is the end of the recording.
    """
    frame_s = detector.frame_samples / SAMPLE_RATE_HZ
    silence = np.zeros(round(LEAD_S / frame_s) * detector.frame_samples, np.float32)
    probabilities = await detector.open().feed(np.concatenate([silence, pcm]))
    threshold, lead_s = ServerVad().threshold, len(silence) / SAMPLE_RATE_HZ
    for k, (one, two) in enumerate(pairwise(probabilities)):
        end = (k + 2) * frame_s - lead_s
        if min(one, two) >= threshold and end > onset:
            return end
    return len(pcm) / SAMPLE_RATE_HZ


async def trial(srv: Server, mode: str, clip: Clip, onset: Onset) -> dict[str, Any] | None:
    """Speak over a story. Return the seconds from the voice's onset by energy; None if the answer ended too early."""
    async with telling(srv, MODES[mode]) as caller:
        if caller is None:
            return None
        begun = await caller.say(clip.pcm)
        at = begun + onset.energy
        until = begun + clip.seconds + PATIENCE_S
        # The clock of the event loop is time.monotonic.
        now = asyncio.get_running_loop().time
        while interrupted_at(caller.marks, begun) is None and now() < until:
            if not caller.marks and not caller.goes_on and now() < at + LEFT_S:
                # The answer ended by itself before the voice began, or too early for the voice to interrupt it.
                return None
            await asyncio.sleep(0.02)
        marks = [mark for mark in caller.marks if mark.at >= begun]
        silent, decided = silent_from(marks, at), interrupted_at(marks, begun)
        return {
            "clip": clip.id,
            "speaker": clip.speaker,
            "silent_s": None if silent is None else silent - at,
            "decided_s": None if decided is None else decided - at,
            "ducked_first": bool(marks) and marks[0].kind == "ducked",
            "detector_alone_s": onset.detected - onset.energy,
        }


def row(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one mode: delays of the client's silence and of the decision, and interruptions."""
    silent = [t for t in trials if t["silent_s"] is not None]
    decided = [t for t in trials if t["decided_s"] is not None]
    return {
        "trials": len(trials),
        "taken": len(decided),
        "taken_interval": [round(100 * v, 1) for v in wilson(len(decided), len(trials))],
        "ducked_first": sum(t["ducked_first"] for t in trials),
        "silent": delays([max(0.0, t["silent_s"]) for t in silent]),
        "detector_alone": delays([t["detector_alone_s"] for t in trials]),
        "decided": delays([max(0.0, t["decided_s"]) for t in decided]),
    }


def shown(found: dict[str, Any]) -> str:
    """Return p50 and p95 with their intervals as the text of one cell."""
    (low, high), (low95, high95) = found["p50_interval"], found["p95_interval"]
    return f"{found['p50_ms']:.0f} ({low:.0f} to {high:.0f}) / {found['p95_ms']:.0f} ({low95:.0f} to {high95:.0f})"


async def barge_in(srv: Server, data: Path, most: int, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """Measure every mode with its defaults, one conversation at a time."""
    clips = speakers(data, most)
    found = await onsets(clips)
    out: dict[str, Any] = {"speakers": len(clips), "onset": "energy within 15 dB of the speech"}
    for mode in modes:
        trials = []
        for clip, onset in zip(clips, found, strict=True):
            if one := await trial(srv, mode, clip, onset):
                trials.append(one)
        out[mode] = row(trials) | {"each": trials}
    title = "barge-in: from the voice's onset to the client's silence, and to the decision, p50 / p95 in ms"
    counts = ("trials", "taken")
    rows = {mode: {k: out[mode][k] for k in counts} | {k: shown(out[mode][k]) for k in SHOWN} for mode in modes}
    show(title, rows)
    return out
