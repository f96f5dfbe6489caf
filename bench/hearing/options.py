"""Effects of two options on the words of a session: keyterms, and context across pauses in the vLLM dialect."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench import words as wer
from bench.common import Server, show
from bench.driver import Session
from bench.hearing.client import Heard
from bench.hearing.clips import Clip
from bench.hearing.figures import cells, difference
from bench.hearing.quality import hear

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16

ENGLISH = {"language": "en"}
STREAMS = 2
# Number of clips of different speakers in one session, and the silence between them.
JOINED, GAP_S = 12, 1.0
CHUNK_S = 0.1
TIMEOUT_S = 900.0


def text_errors(clip: Clip, heard: Heard) -> tuple[int, int]:
    """Return the number of errors and the number of words of the finals."""
    return wer.score(clip.text, heard.text, clip.language)


def term_errors(clip: Clip, heard: Heard) -> tuple[int, int]:
    """Return how many words of the clip's terms the finals lack, and how many words the terms have."""
    words = Counter(w for term in clip.terms for w in wer.norm(term))
    return (words - Counter(wer.norm(heard.text))).total(), words.total()


def compared(errors: Sequence[tuple[int, int]], plain: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the error rate of the clips in percent, and the difference that the option makes for the same clips."""
    num_words = [n for _, n in plain]
    change = difference([(a, b) for (a, _), (b, _) in zip(errors, plain, strict=True)], num_words)
    rate = 100 * sum(e for e, _ in errors) / sum(num_words)
    return {"clips": len(errors), "errors": rate, "change": (change.points, change.low, change.high)}


def show_changes(title: str, rows: dict[str, dict[str, Any]]) -> None:
    show(title, {name: cells(row) for name, row in rows.items()})


async def keyterms(srv: Server, orders: list[Clip], others: list[Clip], *, speed: float) -> dict[str, Any]:
    """Measure errors in the terms of orders and in unrelated sentences, with and without keyterms."""
    terms = sorted({term for clip in orders for term in clip.terms})
    rows = {}
    for name, clips, errors_of in (("terms", orders, term_errors), ("other words", others, text_errors)):
        plain: list[tuple[int, int]] = []
        for option in ({}, {"keywords": terms}):
            heard = await hear(srv, clips, speed=speed, session={"transcription": ENGLISH | option})
            errors = [errors_of(c, heard[c.id]) for c in clips]
            plain = plain or errors
            rows[f"{name} {'with' if option else 'without'}"] = compared(errors, plain)
    show_changes(f"{len(terms)} keyterms: errors in %, and their change", rows)
    return {"speed": speed, "terms": terms, "rows": rows}


def joined(clips: Sequence[Clip]) -> list[Clip]:
    """Return sessions that join JOINED clips of different speakers, whose words are no context for each other."""
    gap = np.zeros(int(GAP_S * SAMPLE_RATE_HZ), np.float32)
    out = []
    for at in range(0, len(clips), JOINED):
        part = clips[at : at + JOINED]
        pcm = np.concatenate([x for c in part for x in (c.pcm, gap)])
        text = " ".join(c.text for c in part)
        seconds = len(pcm) / SAMPLE_RATE_HZ
        out.append(replace(part[0], id=f"joined-{at}", kind="joined", text=text, seconds=seconds, pcm=pcm))
    return out


async def transcribe(srv: Server, clip: Clip, *, keep_context: bool, speed: float) -> str:
    """Send a clip at `speed` times real time, commit it at its end, and return its transcript.

    Raises RuntimeError if the server sends an error, and TimeoutError or SessionEnded if no transcript arrives.
    """
    data = to_pcm16(np.asarray(clip.pcm, np.float32))
    step = int(CHUNK_S * SAMPLE_RATE_HZ) * 2
    opening = {"model": "default", "language": clip.language, "keep_context": keep_context}
    async with Session(srv.url, "/v1/realtime?dialect=vllm", opening) as session:
        for at in range(0, len(data), step):
            await session.append(data[at : at + step])
            await asyncio.sleep(CHUNK_S / speed)
        await session.send("input_audio_buffer.commit", final=True)
        _, event = await session.first(("transcription.done", "error"), 0, TIMEOUT_S)
        if event["type"] == "error":
            raise RuntimeError(event["error"])
        return str(event["text"])


async def context(srv: Server, clips: Sequence[Clip], *, speed: float, transcripts: Path | None) -> dict[str, Any]:
    """Measure word errors with and without `keep_context`, by kind and language, in two sessions at once."""
    places = asyncio.Semaphore(STREAMS)

    async def errors(clip: Clip, keep_context: bool) -> tuple[int, int]:
        async with places:
            text = await transcribe(srv, clip, keep_context=keep_context, speed=speed)
        if transcripts is not None:
            with transcripts.open("a", encoding="utf-8") as file:
                row = {"section": "context", "id": clip.id, "keep_context": keep_context, "text": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return wer.score(clip.text, text, clip.language)

    found = {keep: await asyncio.gather(*(errors(c, keep) for c in clips)) for keep in (False, True)}
    rows = {}
    groups = [f"{c.kind} {c.language}" for c in clips]
    for name in (*dict.fromkeys(groups), *dict.fromkeys(c.kind for c in clips)):
        mine = [k for k, group in enumerate(groups) if name in (group, clips[k].kind)]
        for keep, errors_of in found.items():
            plain = [found[False][k] for k in mine]
            rows[f"{name} {'with' if keep else 'without'}"] = compared([errors_of[k] for k in mine], plain)
    show_changes("context over pauses: word errors in %, and their change", rows)
    return {"speed": speed, "rows": rows}
