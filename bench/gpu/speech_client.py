"""A client of /v1/audio/speech/stream in a separate process: several texts at once, each over its own connection.

    python -m bench.gpu.speech_client URL TEXTS RATE FRAMES...

It speaks the texts once for each of FRAMES, which limits the code frames of a text. With RATE 0, all texts start at
once; otherwise RATE texts per second start at random times (Poisson). It prints one line of JSON. For each text and
round, this has the seconds to the first and the last sound, and the seconds of audio. The client uses only the server's
protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from typing import Any

import websockets

TEXT = "Good morning, and welcome back: here is the news of the day, as far as we know it."
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
RATE_HZ, SAMPLE_BYTES = 24_000, 2
# Number of frames of the text that warms up each connection.
WARM_FRAMES = 4


async def say(socket: Any, frames: int) -> dict[str, float]:
    """Speak one text, with at most `frames` frames of codes, and wait for all of its audio.

    Raises RuntimeError if the server sends an error.
    """
    await socket.send(json.dumps(CONFIG | {"max_new_tokens": frames}))
    first_s, num_bytes, began = 0.0, 0, time.perf_counter()
    await socket.send(json.dumps({"type": "input.text", "text": TEXT}))
    await socket.send(json.dumps({"type": "input.done"}))
    async for message in socket:
        if isinstance(message, bytes):
            first_s = first_s or time.perf_counter() - began
            num_bytes += len(message)
            continue
        kind = json.loads(message)["type"]
        if kind == "error":
            raise RuntimeError(message)
        if kind == "session.done":
            sound_s = num_bytes / SAMPLE_BYTES / RATE_HZ
            return {"first_s": first_s, "last_s": time.perf_counter() - began, "sound_s": sound_s}
    raise RuntimeError("the server closed the connection")


async def main(url: str, texts: int, rate: float, *rounds: int) -> list[dict[str, float]]:
    """Open and warm up connections. Then speak all texts once per round, `rate` per second (0: all at once)."""
    drawn = random.Random(1)
    begins_s = [0.0, *itertools.accumulate(drawn.expovariate(rate) if rate else 0.0 for _ in range(texts - 1))]

    async def later(socket: Any, begins_s: float, frames: int) -> dict[str, float]:
        await asyncio.sleep(begins_s)
        return await say(socket, frames)

    open_one = (
        websockets.connect(f"{url}/v1/audio/speech/stream", max_size=None, compression=None) for _ in range(texts)
    )
    sockets = await asyncio.gather(*open_one)
    await asyncio.gather(*(say(socket, WARM_FRAMES) for socket in sockets))
    found: list[dict[str, float]] = []
    for frames in rounds:
        found += await asyncio.gather(*(later(s, at, frames) for s, at in zip(sockets, begins_s, strict=True)))
    await asyncio.gather(*(socket.close() for socket in sockets))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:])))))
