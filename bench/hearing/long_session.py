"""One session of an hour: its memory and CPU time as it grows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
from bench.common import Server, show
from bench.hearing.client import Listener
from bench.hearing.clips import Clip

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16


async def long_session(srv: Server, clips: list[Clip], minutes: float) -> dict[str, Any]:
    """Feed one session at the server's speed. Record memory and CPU time for each minute of audio."""
    marks, sent_s, num_finals = await feed(srv, clips, minutes * 60)
    sixth = max(1, len(marks) // 6)
    first, last = marks[:sixth], marks[-sixth:]
    late = [m["rss_mb"] for m in marks[sixth:]] or [marks[-1]["rss_mb"]]
    row = {
        "minutes": sent_s / 60,
        "turns": num_finals,
        "rss_first": marks[0]["rss_mb"],
        "rss_spread_after_first_sixth": max(late) - min(late),
        "cost_last_to_first": float(
            np.mean([m["cpu_per_audio_s"] for m in last]) / np.mean([m["cpu_per_audio_s"] for m in first])
        ),
        "cpu_per_audio_s": float(np.mean([m["cpu_per_audio_s"] for m in marks])),
    }
    show("one long session", [row])
    return row | {"marks": marks}


async def feed(srv: Server, clips: list[Clip], seconds: float) -> tuple[list[dict[str, float]], float, int]:
    """Send clips in random order with noise between them.

    Return a mark for each minute, the seconds sent, and finals.
    """
    chooser, noise = random.Random(1), np.random.default_rng(1)
    marks: list[dict[str, float]] = []
    session = {"transcription": {"language": "en"}, "format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}}
    sent_s = 0.0
    async with Listener(srv, session=session) as listener:
        cpu_s, next_mark_s = srv.cpu_s(), 60.0
        while sent_s < seconds:
            clip = chooser.choice(clips)
            gap = noise.normal(0, 3e-4, int(chooser.uniform(0.3, 3.0) * SAMPLE_RATE_HZ)).astype(np.float32)
            wire = to_pcm16(np.concatenate((clip.pcm, gap)))
            for at in range(0, len(wire), 2 * SAMPLE_RATE_HZ):
                await listener.append(wire[at : at + 2 * SAMPLE_RATE_HZ])
            sent_s += len(wire) / 2 / SAMPLE_RATE_HZ
            # Waits until the session has caught up, so that each minute's cost is its own.
            await listener.caught_up()
            if sent_s >= next_mark_s:
                now_s = srv.cpu_s()
                cost = (now_s - cpu_s) / (sent_s - next_mark_s + 60)
                marks.append({"minute": sent_s / 60, "rss_mb": srv.rss_mb(), "cpu_per_audio_s": cost})
                cpu_s, next_mark_s = now_s, sent_s + 60.0
        await asyncio.sleep(2.0)
        return marks, sent_s, len(listener.heard.finals)
