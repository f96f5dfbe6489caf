"""Delays of words: one stream, by endpoint silence; and many concurrent streams. Always in real time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import words as wer
from bench.common import Server, percentile, show
from bench.hearing.client import TRAIL_S, FileText, Heard, Listener, play_clips
from bench.hearing.clips import Clip
from bench.hearing.figures import Reading, errors_row, first_words_s, rate, readings, word_delays

from antiphon.client.link import SessionEnded

ENDPOINTS_MS = {"default (200 ms)": 200, "500 ms": 500}
STREAMS_ENDPOINT_MS = 500
GAP_S = 1.5
# Seconds of delay of finals above which no larger number of streams is tried.
TOO_LATE_S = 6.0


def english(silence_ms: int) -> dict[str, Any]:
    """Return a session for English speech in which this much silence ends a turn."""
    return {"transcription": {"language": "en"}, "turn_detection": {"silence_duration_ms": silence_ms}}


def delays_row(clips: Sequence[Clip], heard: Sequence[Heard]) -> dict[str, float]:
    """Return the delays of first words from the start of speech, and of finals from its end, in seconds."""
    pairs = list(zip(clips, heard, strict=True))
    first = [s for c, h in pairs if (s := first_words_s(c, h)) is not None]
    final = [h.finals[-1][0] - c.speech_end for c, h in pairs if h.finals]
    return {
        "clips": len(pairs),
        "first_words_p50": percentile(first, 50),
        "first_words_p95": percentile(first, 95),
        "no_first_words": len(pairs) - len(first),
        "final_p50": percentile(final, 50),
        "final_p95": percentile(final, 95),
        "no_final": len(pairs) - len(final),
    }


def latency_row(clips: Sequence[Clip], heard: dict[str, Heard], files: dict[str, FileText]) -> dict[str, float]:
    """Return delays and errors of one stream."""
    words = [d for c in clips for d in word_delays(c, heard[c.id], files[c.id].words)]
    turns = [t for c in clips for t in heard[c.id].turns]
    changed = sum(wer.norm(a, "en") != wer.norm(b, "en") for a, b in turns)
    return {
        **delays_row(clips, [heard[c.id] for c in clips]),
        "word_p50": percentile(words, 50),
        "word_p95": percentile(words, 95),
        "wer": rate((c, heard[c.id].text) for c in clips),
        "wer_shown": rate((c, heard[c.id].shown) for c in clips),
        "wer_file": rate((c, files[c.id].text) for c in clips),
        "turns_corrected_by_final": changed / max(1, len(turns)),
    }


async def latency(srv: Server, clips: list[Clip], files: dict[str, FileText]) -> dict[str, Any]:
    """Measure one stream, with the default endpoint and with half a second."""
    rows = {}
    for name, silence_ms in ENDPOINTS_MS.items():
        before = srv.cpu_s()
        row = latency_row(clips, await play_clips(srv, clips, session=english(silence_ms)), files)
        row["cpu_per_audio_s"] = (srv.cpu_s() - before) / sum(c.seconds + TRAIL_S for c in clips)
        rows[name] = row
    keys = ("first_words_p50", "final_p50", "final_p95", "word_p50", "wer", "wer_shown", "wer_file", "cpu_per_audio_s")
    shown = {name: {key: row[key] for key in keys} for name, row in rows.items()}
    show("one stream in real time, by endpoint silence (seconds; word errors in %)", shown)
    return rows


async def talk_for(srv: Server, clips: list[Clip], number: int, count: int, seconds: float) -> list[tuple[Clip, Heard]]:
    """Run one of `count` streams for `seconds`. It starts at its own time, and plays the clips in its own order."""
    heard: list[tuple[Clip, Heard]] = []
    order = random.Random(number).sample(clips, len(clips))
    await asyncio.sleep(number * 2.0 / count)
    async with Listener(srv, chunk_s=0.1, session=english(STREAMS_ENDPOINT_MS)) as listener:
        end = time.monotonic() + seconds
        try:
            for clip in order:
                if time.monotonic() > end:
                    break
                heard.append((clip, listener.begin()))
                await listener.play(clip.pcm, GAP_S)
            await listener.drained()
        except SessionEnded as ended:
            # An overloaded server may end a session. That is a result.
            heard[-1][1].failures.append(str(ended))
    return heard


async def streams(
    srv: Server, clips: list[Clip], files: dict[str, FileText], counts: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Measure first words, finals and errors for each number of concurrent streams, each for `seconds`."""
    rows: dict[str, Any] = {}
    for count in counts:
        before, began = srv.cpu_s(), time.monotonic()
        parts = await asyncio.gather(*(talk_for(srv, clips, k, count, seconds) for k in range(count)))
        cores = (srv.cpu_s() - before) / (time.monotonic() - began)
        played = [pair for part in parts for pair in part]
        found: list[Reading] = [r for c, h in played for r in readings([c], {c.id: h}, files)]
        rows[str(count)] = row = {
            **delays_row([c for c, _ in played], [h for _, h in played]),
            **errors_row(found),
            "server_cores": cores,
        }
        head = (
            "clips", "first_words_p50", "first_words_p95", "no_first_words", "final_p50", "final_p95", "no_final",
            "live", "shown", "file", "failures", "server_cores",
        )  # fmt: skip
        shown = {name: {key: row[key] for key in head} for name, row in rows.items()}
        show("streams at once in real time (seconds; errors in %)", shown)
        if row["final_p95"] > TOO_LATE_S:
            print(f"finals take more than {TOO_LATE_S:g} s: no more streams are tried")
            break
    return rows


def plot(document: dict[str, Any], folder: Path) -> None:
    """Write asr-streams.png: first words and finals by number of streams."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document.get("streams")
    if not rows:
        return
    counts = [int(n) for n in rows]
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4))
    for axes, kind, title in zip(both, ("first_words", "final"), ("first words", "final transcript"), strict=True):
        for q in ("p50", "p95"):
            axes.plot(counts, [r[f"{kind}_{q}"] for r in rows.values()], marker="o", label=q)
        axes.set(xlabel="live streams at once", ylabel="seconds", title=title)
        axes.set_ylim(bottom=0)
        axes.set_xticks(counts)
        axes.legend()
    figure.suptitle(f"Live transcription, {document['machine']['cores']} cores, profile {document['profile']}")
    figure.tight_layout()
    figure.savefig(folder / "asr-streams.png", dpi=110)
