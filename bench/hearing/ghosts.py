"""False words in noise: noise, babble, music and silence, looped and shuffled, live and as files."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import numpy as np
from bench import words as wer
from bench.common import Server, show, table
from bench.hearing.client import FILE_TIMEOUT_S, Listener, transcribe_file, whole_files
from bench.hearing.clips import Clip

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

KINDS = ("noise", "babble", "music")
STREAMS = 2
# Standard deviations of pieces of white noise, of FLOOR_S seconds each; 0 is silence.
FLOORS = (0.0, 1e-4, 1e-3, 5e-3)
FLOOR_S = 10
GAP_S = 1.0


def pieces_of(clips: list[Clip], minutes: float) -> list[tuple[str, Pcm]]:
    """Return clips and noise floors in shuffled rounds, each followed by a second of silence, for `minutes` in all."""
    rng, chooser = np.random.default_rng(2), random.Random(2)
    gap = np.zeros(int(GAP_S * SAMPLE_RATE_HZ), np.float32)
    size = FLOOR_S * SAMPLE_RATE_HZ
    pieces: list[tuple[str, Pcm]] = []
    left_s = minutes * 60
    while left_s > 0:
        one_round = [(f"{c.kind} {c.id}", c.pcm) for c in clips]
        one_round += [(f"floor {floor:g}", rng.normal(0, floor, size).astype(np.float32)) for floor in FLOORS]
        chooser.shuffle(one_round)
        for name, pcm in one_round:
            if left_s > 0:
                pieces.append((name, np.concatenate((pcm, gap))))
                left_s -= len(pieces[-1][1]) / SAMPLE_RATE_HZ
    return pieces


async def live_ghosts(srv: Server, pieces: list[tuple[str, Pcm]], speed: float) -> list[tuple[str, str]]:
    """Return the words heard in STREAMS live sessions without a given language, each with the name of its piece."""
    found: list[tuple[str, str]] = []

    async def one(part: list[tuple[str, Pcm]]) -> None:
        heard = []
        async with Listener(srv, chunk_s=0.1, speed=speed) as listener:
            for name, pcm in part:
                heard.append((name, listener.begin()))
                await listener.play(pcm)
            await listener.drained()
        found.extend((name, h.text or h.shown) for name, h in heard if h.text or h.shown)

    await asyncio.gather(*(one(pieces[k::STREAMS]) for k in range(STREAMS)))
    return found


async def file_ghosts(srv: Server, pieces: list[tuple[str, Pcm]]) -> list[tuple[str, str]]:
    """Return the words heard in one file of all pieces. Each segment counts for the piece in which it begins."""
    ends_s = np.cumsum([len(pcm) for _, pcm in pieces]) / SAMPLE_RATE_HZ
    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        found = await transcribe_file(http, np.concatenate([pcm for _, pcm in pieces]))
    at = [min(int(np.searchsorted(ends_s, start, side="right")), len(pieces) - 1) for _, start, _ in found.segments]
    return [(pieces[k][0], s[0].strip()) for k, s in zip(at, found.segments, strict=True) if s[0].strip()]


async def ghosts(srv: Server, clips: list[Clip], minutes: float, speed: float) -> dict[str, Any]:
    """Measure false words per minute in audio without words: live, in each clip as a file, and in one long file."""
    pieces = pieces_of(clips, minutes)
    long_s = sum(len(pcm) for _, pcm in pieces) / SAMPLE_RATE_HZ
    each = await whole_files(srv, clips, tell_language=False)
    found = {
        "live": (long_s, await live_ghosts(srv, pieces, speed)),
        "each clip as a file": (
            sum(c.seconds for c in clips),
            [(f"{c.kind} {c.id}", text) for c in clips if (text := each[c.id].text.strip())],
        ),
        "one long file": (long_s, await file_ghosts(srv, pieces)),
    }
    rows = {}
    for name, (seconds, heard) in found.items():
        num_words = sum(len(wer.norm(text)) for _, text in heard)
        rows[name] = {
            "minutes": seconds / 60,
            "sounds_with_words": sum(bool(wer.norm(text)) for _, text in heard),
            "words": num_words,
            "words_a_minute": num_words * 60 / seconds,
            "heard": heard,
        }
    show("words made of noise", {name: {k: v for k, v in row.items() if k != "heard"} for name, row in rows.items()})
    heard_rows = [(n, sound, text[:120]) for n, r in rows.items() for sound, text in r["heard"]]
    table("which", ("", "sound", "heard"), heard_rows)
    return {"speed": speed, "rows": rows}
