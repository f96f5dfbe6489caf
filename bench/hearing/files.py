"""Files as people upload them: quiet speech, times of cues after pauses, and the cost of audio without speech."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from bench.common import Server, percentile, show, spread
from bench.hearing.client import FILE_TIMEOUT_S, transcribe_file, whole_files
from bench.hearing.clips import Clip
from bench.hearing.figures import rate, readings
from bench.hearing.quality import hear

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.sessions.transcription.file_speech import MAX_PAUSE_S

PAUSES_S = (0.2, 0.5, 1.0, 1.6, 3.0, 8.0, 20.0, 45.0)
PEAKS_DB = (-3, -20, -30, -42)
LANGUAGES = ("en", "de", "ja", "zh", "")
# Number of sounds of each kind without speech.
SOUNDS, SOUND_S = 6, 1.0
EDGE = 0.03


def at_peak(clip: Clip, peak_db: float) -> Clip:
    """Return the clip scaled to this peak level in dBFS, and rounded to 16 bits like a recorder's output."""
    pcm = clip.pcm / np.abs(clip.pcm).max() * 10 ** (peak_db / 20)
    return replace(clip, id=f"{clip.id} {peak_db}", pcm=np.round(pcm * 32768).astype(np.float32) / 32768)


async def levels(srv: Server, clips: Sequence[Clip], *, speed: float) -> dict[str, Any]:
    """Return word errors of the same clips at several levels, as whole files and live."""
    rows = {}
    for peak_db in PEAKS_DB:
        quiet = [at_peak(clip, peak_db) for clip in clips]
        files = await whole_files(srv, quiet)
        found = readings(
            quiet, await hear(srv, quiet, speed=speed, session={"transcription": {"language": "en"}}), files
        )
        rows[str(peak_db)] = {
            "file": rate((r.clip, r.file) for r in found),
            "live": rate((r.clip, r.live) for r in found),
        }
    show("word errors in % by peak level in dBFS", rows)
    return {"clips": len(clips), "rows": rows}


def with_pauses(clips: Sequence[Pcm], minutes: float) -> tuple[Pcm, list[tuple[float, float]]]:
    """Return `minutes` of clips with pauses of PAUSES_S between them in random order, and each clip's place in seconds.

    The same clips always give the same result.
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
    """Return for each clip the seconds from its start to the start of the nearest cue in `cues_s`.

    Only clips after a pause of MAX_PAUSE_S count, because other clips may belong to the cue before.
    """
    ends = [0.0, *(end for _, end in spans)]
    starts = [start for (start, _), end in zip(spans, ends, strict=False) if start - end >= MAX_PAUSE_S]
    return [min(abs(cue_s - start) for cue_s in cues_s) for start in starts]


async def cues(srv: Server, clips: Sequence[Clip], minutes: float) -> dict[str, Any]:
    """Measure how far segments start from the start of their speech, in one file with pauses of 0.2 to 45 s."""
    loud = [np.flatnonzero(np.abs(clip.pcm) > EDGE) for clip in clips]
    pcm, spans = with_pauses([c.pcm[at[0] : at[-1]] for c, at in zip(clips, loud, strict=True)], minutes)
    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        text = await transcribe_file(http, pcm, language="en", word_times=True)
    off_s = cues_off_s([start_s for _, start_s, _ in text.segments], spans)
    row = {"cues": len(off_s), **spread(off_s), "max_s": max(off_s)}
    show(f"cue starts against speech, {minutes:g} minutes", [row])
    return {"minutes": minutes} | row


async def no_speech(srv: Server, sounds: Sequence[Clip]) -> dict[str, Any]:
    """Measure the longest time to decode one second of audio without speech, by requested language."""
    rows: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        for language in LANGUAGES:
            took_s = []
            for sound in sounds:
                begun = time.monotonic()
                await transcribe_file(http, sound.pcm[: int(SOUND_S * SAMPLE_RATE_HZ)], language=language)
                took_s.append(time.monotonic() - begun)
            rows[language or "detected"] = {"p50_s": percentile(took_s, 50), "max_s": max(took_s)}
    show(f"seconds for {SOUND_S:g} s without speech, {len(sounds)} sounds", rows)
    return rows
