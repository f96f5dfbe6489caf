"""What our client adds to a frame: `python bench/client.py [--frames 1500]`.

A server in a process of its own sends and takes frames of 20 ms of sound, 50 a second each way, in the form of full
duplex; each frame carries the time at which it was sent. A bare WebSocket client, which decodes the JSON and the base64
and no more, and `antiphon.client` talk to it in turns, in one run. Latency is from the sender's call to the receiver's
sound, in milliseconds; `added` is the difference of the two clients' medians and 99th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import struct
import sys
import time
from base64 import b64decode, b64encode
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import machine, percentile, save, table

from antiphon.client import AudioToPlay, Client

FRAME_S, RATE_HZ, ROUNDS = 0.02, 24_000, 3
NUM_BYTES = int(FRAME_S * RATE_HZ) * 2


def stamped() -> bytes:
    """A frame of sound whose first bytes are the time."""
    return struct.pack("<q", time.monotonic_ns()) + bytes(NUM_BYTES - 8)


def age_ms(pcm: bytes) -> float:
    """How long ago a frame was sent."""
    return (time.monotonic_ns() - struct.unpack_from("<q", pcm)[0]) / 1e6


async def _serve(pipe: Connection, num_frames: int) -> None:
    async def handle(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(json.dumps({"type": "session.created", "session_id": "s", "resume_token": "t"}))
        taken = list[float]()

        async def take() -> None:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "input_audio_buffer.append":
                    taken.append(age_ms(b64decode(message["audio"])))

        taking = asyncio.create_task(take())
        begun = time.monotonic()
        for number in range(num_frames):
            await asyncio.sleep(max(0.0, begun + number * FRAME_S - time.monotonic()))
            delta = {
                "type": "response.output_audio.delta", "response_id": "r", "item_id": "i", "sample_rate_hz": RATE_HZ,
                "delta": b64encode(stamped()).decode(), "server_event_seq": number + 1,
            }  # fmt: skip
            await socket.send(json.dumps(delta, separators=(",", ":")))
        await taking
        pipe.send(taken)

    async with serve(handle, "127.0.0.1", 0, max_size=None, compression=None) as server:
        pipe.send(next(iter(server.sockets)).getsockname()[1])
        await asyncio.Future()


def _process(pipe: Connection, num_frames: int) -> None:
    asyncio.run(_serve(pipe, num_frames))


async def bare(port: int, num_frames: int) -> list[float]:
    """The ages of the frames that a WebSocket client without anything else gets."""
    ages = list[float]()
    async with connect(f"ws://127.0.0.1:{port}/v1/duplex", max_size=None, compression=None) as socket:
        await socket.send("{}")
        await socket.recv()

        async def speak() -> None:
            for _ in range(num_frames):
                audio = b64encode(stamped()).decode()
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                await asyncio.sleep(FRAME_S)

        speaking = asyncio.create_task(speak())
        while len(ages) < num_frames:
            ages.append(age_ms(b64decode(json.loads(await socket.recv())["delta"])))
        await speaking
    return ages


async def ours(port: int, num_frames: int) -> list[float]:
    """The ages of the frames that our client gives out."""
    ages = list[float]()
    async with Client(f"http://127.0.0.1:{port}") as client, client.conversation() as talk:

        async def speak() -> None:
            for _ in range(num_frames):
                await talk.send_audio(stamped())
                await asyncio.sleep(FRAME_S)

        speaking = asyncio.create_task(speak())
        async for event in talk:
            if isinstance(event, AudioToPlay):
                ages.append(age_ms(event.pcm))
                if len(ages) == num_frames:
                    break
        await speaking
    return ages


def main() -> None:
    """Measure, print a table, and write bench/results/client.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1500)
    num_frames = parser.parse_args().frames
    pipe, far = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_process, args=(far, num_frames), daemon=True)
    server.start()
    port: int = pipe.recv()
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        for name, talk in (("bare WebSocket", bare), ("antiphon.client", ours)):
            down = asyncio.run(talk(port, num_frames))
            sides = found.setdefault(name, {"to the client": [], "to the server": []})
            sides["to the client"] += down
            sides["to the server"] += pipe.recv()
    server.kill()
    rows: list[dict[str, Any]] = []
    for side in ("to the client", "to the server"):
        for name, sides in found.items():
            ages = sides[side]
            p50, p99 = statistics.median(ages), percentile(ages, 99)
            rows.append({"direction": side, "client": name, "frames": len(ages), "p50_ms": p50, "p99_ms": p99})
        one, other = rows[-2:]
        added = {f"p{p}_ms": other[f"p{p}_ms"] - one[f"p{p}_ms"] for p in (50, 99)}
        rows.append({"direction": side, "client": "added", "frames": None, **added})
    head = ["direction", "client", "frames", "p50, ms", "p99, ms"]
    table("A frame of 20 ms of sound, from call to sound", head, [_row(r) for r in rows])
    save("client", {"machine": machine(), "websockets": websockets.__version__, "rows": rows})


def _row(row: dict[str, Any]) -> list[str]:
    frames = "" if row["frames"] is None else str(row["frames"])
    return [row["direction"], row["client"], frames, f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]


if __name__ == "__main__":
    main()
