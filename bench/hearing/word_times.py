"""How far word times are off: sentences in the server's own voice, whose words lie where the synthesizer put them.

`antiphon bench tts` measures those places against a forced aligner.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import soxr
import websockets
from bench import words as wer
from bench.common import HERE, Server, percentile, table
from bench.hearing.client import WIRE_HZ, whole_files
from bench.hearing.clips import Clip
from bench.hearing.figures import matches

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import from_pcm16

CONFIG = {
    "type": "session.config",
    "response_format": "pcm",
    "stream_audio": True,
    "word_timestamps": True,
    "split_granularity": "none",
}
# Silence before and behind a sentence, as a recording has it.
LEAD_S = 0.5
# A word, its start and its end in seconds.
Timed = tuple[str, float, float]


async def say(socket: Any, text: str) -> tuple[bytes, list[Timed]]:
    """Synthesize one sentence; its PCM and its words. Raises RuntimeError for an error of the server's."""
    await socket.send(json.dumps({"type": "input.text", "text": text}))
    await socket.send(json.dumps({"type": "input.done"}))
    audio, words = b"", []
    async for message in socket:
        event = json.loads(message)
        match event["type"]:
            case "audio.chunk":
                audio += base64.b64decode(event["audio_b64"])
                spoken = event["timestamps"] or ()
                words += [(w["word"], LEAD_S + w["start_ms"] / 1000, LEAD_S + w["end_ms"] / 1000) for w in spoken]
            case "session.done":
                return audio, words
            case "error":
                raise RuntimeError(message)
    raise RuntimeError("the server closed the stream")


async def sentences(srv: Server, texts: Sequence[str]) -> tuple[list[Clip], dict[str, list[Timed]]]:
    """Sentences as clips, and where the words of each lie."""
    clips, truth = [], {}
    silence = np.zeros(int(LEAD_S * SAMPLE_RATE_HZ), np.float32)
    async with websockets.connect(f"{srv.ws}/v1/audio/speech/stream", max_size=None) as socket:
        await socket.send(json.dumps(CONFIG))
        for number, text in enumerate(texts):
            audio, words = await say(socket, text)
            pcm = np.asarray(soxr.resample(from_pcm16(audio), WIRE_HZ, SAMPLE_RATE_HZ), np.float32)
            pcm = np.concatenate((silence, pcm, silence))
            seconds = len(pcm) / SAMPLE_RATE_HZ
            clips.append(Clip(f"s{number}", HERE, seconds, text, "en", "sentence", LEAD_S, seconds - LEAD_S, pcm=pcm))
            truth[clips[-1].id] = words
    return clips, truth


def apart_ms(found: Sequence[Timed], truth: Sequence[Timed]) -> list[tuple[float, float]]:
    """How far starts and ends of the words in common are apart. A word that is spelled as several is left out."""
    mine, theirs = ([(w[0], t) for t in part if len(w := wer.norm(t[0])) == 1] for part in (found, truth))
    pairs = matches([w for w, _ in mine], [w for w, _ in theirs])
    times = [(mine[a][1], theirs[b][1]) for a, b in pairs]
    return [(1000 * abs(a[1] - b[1]), 1000 * abs(a[2] - b[2])) for a, b in times]


async def word_times(srv: Server, num_sentences: int) -> dict[str, Any]:
    """Times of words in whole files, against those of the synthesizer."""
    texts = (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines()[:num_sentences]
    clips, truth = await sentences(srv, texts)
    files = await whole_files(srv, clips, word_times=True)
    apart = [pair for c in clips for pair in apart_ms(files[c.id].words, truth[c.id])]
    starts, ends = [a for a, _ in apart], [b for _, b in apart]
    row = {
        "words": len(apart),
        "spoken": sum(len(w) for w in truth.values()),
        "start_p50_ms": percentile(starts, 50),
        "start_p95_ms": percentile(starts, 95),
        "end_p50_ms": percentile(ends, 50),
        "end_p95_ms": percentile(ends, 95),
    }
    table("word times of whole files, ms from where the synthesizer put them", tuple(row), [tuple(row.values())])
    return {"files": row}
