"""Captions clip by clip, each in a new session: on an idle machine, and next to a process that uses one core."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.common import Server, show
from bench.hearing.client import FileText, Heard, Listener, whole_files
from bench.hearing.clips import Clip
from bench.hearing.figures import Reading, errors_row, readings
from bench.hearing.latency import GAP_S, STREAMS_ENDPOINT_MS, delays_row, english

from antiphon.client.link import SessionEnded

CALLERS = 4
SESSION = english(STREAMS_ENDPOINT_MS)


@contextmanager
def busy() -> Iterator[None]:
    """Run a process that computes without a pause, next to the server."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Caller:
    """Plays clips in its own order, each in a new session. If it is refused, it tries again after Retry-After."""

    def __init__(self, srv: Server, clips: Sequence[Clip], number: int) -> None:
        self._server = srv
        self._order = random.Random(number).sample(clips, len(clips))
        self.heard: list[tuple[Clip, Heard]] = []
        self.waits_s: list[float] = []

    async def call(self, until_s: float) -> None:
        for clip in self._order:
            while time.monotonic() < until_s:
                try:
                    async with Listener(self._server, chunk_s=0.1, session=SESSION) as listener:
                        self.heard.append((clip, listener.begin()))
                        await listener.play(clip.pcm, GAP_S)
                        await listener.drained()
                    break
                except SessionEnded as refusal:
                    if refusal.retry_after_s is None:
                        raise
                    self.waits_s.append(refusal.retry_after_s or 1.0)
                    await asyncio.sleep(self.waits_s[-1])


async def played(srv: Server, clips: Sequence[Clip], seconds: float) -> list[Caller]:
    """Run CALLERS callers for `seconds`, or until every caller has played each clip once."""
    callers = [Caller(srv, clips, number) for number in range(CALLERS)]
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(caller.call(until_s) for caller in callers))
    return callers


def figures(callers: Sequence[Caller], files: dict[str, FileText]) -> dict[str, Any]:
    """Return refusals, delays, and word errors, including those of whole files."""
    pairs = [pair for caller in callers for pair in caller.heard]
    found: list[Reading] = [r for clip, heard in pairs for r in readings([clip], {clip.id: heard}, files)]
    waits_s = [wait_s for caller in callers for wait_s in caller.waits_s]
    delays = delays_row([clip for clip, _ in pairs], [heard for _, heard in pairs])
    return {"refused": len(waits_s), "longest_retry_s": max(waits_s, default=0.0), **delays, **errors_row(found)}


async def beside(srv: Server, clips: Sequence[Clip], seconds: float) -> dict[str, Any]:
    """Measure on an idle machine, and next to a busy process. The server's headroom decides how many it admits."""
    runs = {"alone": await played(srv, clips, seconds)}
    with busy():
        runs["beside a busy process"] = await played(srv, clips, seconds)
    heard = {clip.id: clip for callers in runs.values() for caller in callers for clip, _ in caller.heard}
    files = await whole_files(srv, list(heard.values()))
    rows = {name: figures(callers, files) for name, callers in runs.items()}
    head = ("clips", "refused", "final_p50", "final_p95", "no_final", "live", "file", "failures")
    shown = {name: {key: row[key] for key in head} for name, row in rows.items()}
    show(f"{CALLERS} captions at once, a session for each clip (seconds; word errors in %)", shown)
    return rows
