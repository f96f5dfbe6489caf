"""What context over pauses does to the words of long recordings, in the vLLM dialect."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import websockets
from bench import words as wer
from bench.common import Server
from bench.hearing.clips import Clip
from bench.hearing.options import compared, show

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16

STREAMS = 2
# Clips of different speakers that are joined into one session, and the silence between them.
JOINED, GAP_S = 12, 1.0
CHUNK_S = 0.1
TIMEOUT_S = 900.0


def joined(clips: Sequence[Clip]) -> list[Clip]:
    """Sessions of JOINED clips each, said one after another: what one speaker said is no context of the next one's."""
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
    """The transcript of a clip, sent `speed` times faster than real time and committed at its end.

    Raises RuntimeError for an error of the server's, TimeoutError where no transcript comes.
    """
    data = to_pcm16(np.asarray(clip.pcm, np.float32))
    step = int(CHUNK_S * SAMPLE_RATE_HZ) * 2
    # A server that is behind reads no more, pings included.
    async with websockets.connect(f"{srv.ws}/v1/realtime", max_size=None, ping_interval=None) as socket:
        update = {"type": "session.update", "model": "default", "language": clip.language, "keep_context": keep_context}
        await socket.send(json.dumps(update))
        for at in range(0, len(data), step):
            audio = base64.b64encode(data[at : at + step]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            await asyncio.sleep(CHUNK_S / speed)
        await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        async with asyncio.timeout(TIMEOUT_S):
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "error":
                    raise RuntimeError(event["error"])
                if event["type"] == "transcription.done":
                    return str(event["text"])
    raise RuntimeError("the server closed the session before its transcript")


async def context(srv: Server, clips: Sequence[Clip], *, speed: float, transcripts: Path | None) -> dict[str, Any]:
    """Word errors without and with `keep_context`, by kind of recording, and its languages; two sessions at once."""
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
    show("context over pauses: word errors in %, and their change", rows)
    return {"speed": speed, "rows": rows}
