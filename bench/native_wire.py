"""A native model behind a real server: what push-to-talk clients wait for, and whether a scheduled player keeps time.

The tiny model of the tests speaks, with a tone for each of its codes (tests/adapters/stand_in): a unit of it costs
nothing, so that what is measured is the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websockets
from common import Server, percentile, server, table
from tests.adapters import tiny_minicpmo as tiny

RATE_HZ, AT_ONCE, LIMIT_S = 24_000, 10, 60
# How long a player waits behind the first result of a turn, for what the network and the model take.
PLAYER_DELAY_S = 0.2
# The tiny model speaks on and on: so often it is told to listen.
TURN_S = 15


@contextmanager
def speaking() -> Iterator[Server]:
    """A server with the tiny model, which speaks."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tiny.STAND_IN), *([before] if before else [])])
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            server("--partner", str(tiny.write(Path(folder), voice=True)), "--weights", "fp32") as srv,
        ):
            yield srv
    finally:
        os.environ.pop("PYTHONPATH")
        if before:
            os.environ["PYTHONPATH"] = before


async def push_to_talk(srv: Server, seed: int, asks: tuple[str, ...]) -> float:
    """Say two units, commit, and send nothing more: seconds to the first sound of the answer; infinite without one."""
    async with websockets.connect(f"{srv.ws}/v1/duplex", max_size=None) as socket:
        session = {
            "instructions": tiny.PROMPT,
            "temperature": 0.7,
            "turn_detection": None,
            "extra_body": {"seed": seed},
        }
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        for unit in range(2):
            pcm = (tiny.sound(seed + unit) * 32767).astype("<i2").tobytes()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64encode(pcm).decode()}))
            await asyncio.sleep(1.0)
        begun_s = time.perf_counter()
        for kind in asks:
            await socket.send(json.dumps({"type": kind}))
        try:
            async with asyncio.timeout(LIMIT_S):
                async for message in socket:
                    event = json.loads(message)
                    match event["type"]:
                        case "response.output_audio.delta" if event["delta"]:
                            first_s = time.perf_counter() - begun_s
                            # Otherwise the server keeps the session for a while, for a client that comes back.
                            await socket.send(json.dumps({"type": "session.close"}))
                            return first_s
                        case "response.done":
                            break
                        case "error":
                            raise RuntimeError(message)
        except TimeoutError:
            pass
    return float("inf")


async def _answers(srv: Server, count: int) -> dict[str, Any]:
    places, out = asyncio.Semaphore(AT_ONCE), {}
    for name, asks in (
        ("commit", ("input_audio_buffer.commit",)),
        ("commit, response.create", ("input_audio_buffer.commit", "response.create")),
    ):

        async def one(seed: int, asks: tuple[str, ...] = asks) -> float:
            async with places:
                return await push_to_talk(srv, seed, asks)

        times = await asyncio.gather(*(one(seed) for seed in range(count)))
        sounds = [sound for sound in times if sound < float("inf")]
        out[name] = {
            "asked": count,
            "answered": len(sounds),
            "first_sound_p50_s": percentile(sounds, 50),
            "first_sound_p95_s": percentile(sounds, 95),
            "first_sound_most_s": max(sounds, default=float("nan")),
        }
    return out


def answers(count: int) -> dict[str, Any]:
    """Push-to-talk clients, AT_ONCE at once, that send nothing after their commit. A unit is a second."""
    with speaking() as srv:
        out = asyncio.run(_answers(srv, count))
    table(
        "push-to-talk: from the commit to the answer, s (a unit is 1 s)",
        ("", "asked", "answered", "first sound, p50", "p95", "most"),
        [(name, *row.values()) for name, row in out.items()],
    )
    return out


async def _worker(srv: Server, seconds: int) -> dict[str, Any]:
    """Play the results of `/ws/duplex` as its front end does: each when the one before has ended."""
    drifts, lengths, late, turns, spoken = list[float](), set[int](), 0, 0, 0
    async with websockets.connect(f"{srv.ws}/ws/duplex", max_size=None) as socket:
        await socket.send(json.dumps({"type": "prepare", "system_prompt": tiny.PROMPT}))
        await socket.recv()
        begun_s = time.perf_counter()
        # When the player has played all it has; None before a turn's first result.
        until_s: float | None = None
        scheduled_s = 0.0
        for second in range(seconds):
            audio = b64encode(tiny.sound(second % 64).astype("<f4").tobytes()).decode()
            chunk = {"type": "audio_chunk", "audio_base64": audio, "force_listen": second % TURN_S == TURN_S - 1}
            await socket.send(json.dumps(chunk))
            result = json.loads(await socket.recv())
            now_s = time.perf_counter()
            if until_s is None:
                until_s = scheduled_s = now_s + PLAYER_DELAY_S
            late += now_s > until_s
            start_s = max(now_s, until_s)
            drifts.append(start_s - scheduled_s)
            samples = len(b64decode(result["audio_data"])) // 4
            spoken += not result["is_listen"]
            until_s, scheduled_s = start_s + samples / RATE_HZ, scheduled_s + 1.0
            if result["end_of_turn"]:
                # The tail is shorter, and what follows it begins anew.
                turns, until_s = turns + 1, None
            else:
                lengths.add(samples)
            await asyncio.sleep(max(0.0, begun_s + second + 1 - time.perf_counter()))
        await socket.send(json.dumps({"type": "stop"}))
    return {
        "seconds": seconds,
        "spoken": spoken,
        "turns": turns,
        "results_of_other_length": sorted(lengths - {RATE_HZ}),
        "late_results": late,
        "drift_ms_most": 1000 * max(map(abs, drifts)),
    }


def worker(seconds: int) -> dict[str, Any]:
    """A scheduled player against `/ws/duplex`, for so many seconds."""
    with speaking() as srv:
        out = asyncio.run(_worker(srv, seconds))
    table(
        "the demo's player against /ws/duplex",
        ("seconds", "spoken", "turns", "results of other than 1 s", "late results", "most drift, ms"),
        [tuple(out.values())],
    )
    return out
