"""A native model whose host is killed in each turn: the section `native` of `antiphon bench hosts`."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import websockets
from bench.common import spread
from tests.adapters import tiny_minicpmo
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.server.clients import b64

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.certify.recordings import Recording, read_recordings

DATA = Path("tests/data")
TURNS, CHUNK_S, RATE_HZ = 20, 0.1, 24_000
# Seconds after the end of a turn, and of the kill, in which the turn has to be answered.
ANSWER_S = 45.0
SESSION = {
    "type": "realtime",
    "output_modalities": ["text"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": RATE_HZ},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 500},
            "transcription": {},
        }
    },
}
PHASES = ("speaking", "transcribing", "answering")


class NativeCaller:
    """A client of a door that knows nothing of resuming. It streams audio: recordings, and silence between them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._pcm16 = b""

    async def run(self) -> None:
        """Send audio at the pace of speech, and receive events, until cancelled."""
        async with websockets.connect(f"{self._url}/v1/realtime", max_size=None) as socket:
            await socket.send(json.dumps({"type": "session.update", "session": SESSION}))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stream(socket))
                async for frame in socket:
                    self.events.append((time.monotonic(), json.loads(frame)))
                raise ConnectionError("the door has closed")

    async def _stream(self, socket: websockets.ClientConnection) -> None:
        step, due_s = round(CHUNK_S * RATE_HZ) * 2, time.monotonic()
        while True:
            chunk, self._pcm16 = self._pcm16[:step], self._pcm16[step:]
            audio = base64.b64encode(chunk.ljust(step, b"\0")).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            due_s += CHUNK_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def say(self, pcm: np.ndarray[Any, Any]) -> None:
        """Say a recording, and return at its end."""
        self._pcm16 = base64.b64decode(b64(pcm, RATE_HZ))
        while self._pcm16:
            await asyncio.sleep(CHUNK_S / 2)

    def since(self, at_s: float, kind: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the events of a kind that arrived after `at_s`, with their times."""
        return [(s, event) for s, event in self.events if s > at_s and event["type"].endswith(kind)]


def killed_native(state: str) -> dict[str, Any]:
    """Talk to a MiniCPM-o of tiny random weights, and kill its host in each turn. Counts the answered turns."""
    recordings = [each for each in read_recordings(DATA) if each.text]
    with tempfile.TemporaryDirectory() as folder, cluster(state, "--host-ttl-s", "1.5", num_hosts=0) as hosts:
        tiny_minicpmo.write(Path(folder), brief=True)
        for _ in range(2):
            flags = ("--conversation-model", folder, "--weights", "fp32", "--no-pull", "--language-model", "none")
            hosts.add_host(*flags, "--synthesizer", "none", module=("antiphon", "serve"))
        for host in hosts.hosts:
            host.wait()
        gate = hosts.add_door()
        gate.wait()
        return asyncio.run(_talk(hosts, NativeCaller(gate.ws), recordings))


async def _talk(hosts: Cluster, caller: NativeCaller, recordings: list[Recording]) -> dict[str, Any]:
    chance, counts, gaps = random.Random(1), Counter[str](), list[float]()
    running = asyncio.create_task(caller.run())
    await asyncio.sleep(1.0)
    for turn in range(TURNS):
        phase = PHASES[turn % len(PHASES)]
        counts.update(await _turn(hosts, caller, recordings[turn % len(recordings)], phase, chance, gaps))
        if running.done():
            break
        await asyncio.to_thread(until, lambda: sum(host.is_ready() for host in hosts.hosts) == 2, 120.0)
    running.cancel()
    return {"turns": TURNS, **counts} | {"gap": {"n": len(gaps)} | spread(gaps or [0.0], qs=(50, 95))}


async def _turn(
    hosts: Cluster, caller: NativeCaller, recording: Recording, phase: str, chance: random.Random, gaps: list[float]
) -> Counter[str]:
    """Say a recording, kill the host in this phase, and wait for an answer. Adds the seconds from the kill, or the end
    of the turn, to the next text to `gaps`.
    """
    began_s = time.monotonic()
    saying = asyncio.create_task(caller.say(recording.pcm))
    if phase == "speaking":
        await asyncio.sleep(len(recording.pcm) / SAMPLE_RATE_HZ * chance.uniform(0.3, 0.9))
    else:
        await saying
        await asyncio.sleep(chance.uniform(0.0, 0.6) if phase == "transcribing" else 0.0)
    if phase == "answering":
        await _become(lambda: caller.since(began_s, "response.created"))
    killed_s = time.monotonic()
    await asyncio.to_thread(_strike, hosts)
    await saying
    end_s = max(killed_s, time.monotonic())
    await _become(lambda: _is_answered(caller, killed_s, began_s))
    is_answered = _is_answered(caller, killed_s, began_s)
    gaps += [at_s - end_s for at_s, _ in caller.since(killed_s, "delta")[:1]]
    return Counter(
        {
            "answered": is_answered,
            f"answered, killed while {phase}": is_answered,
            "transcribed": bool(caller.since(began_s, "transcription.completed")),
            "errors": len(caller.since(began_s, "error")),
        }
    )


def _is_answered(caller: NativeCaller, killed_s: float, began_s: float) -> bool:
    """Return whether a response has ended by itself since the kill, and the turn has its transcript."""
    done = [event["response"]["status"] for _, event in caller.since(killed_s, "response.done")]
    return any(status in ("completed", "incomplete") for status in done) and bool(
        caller.since(began_s, "transcription.completed")
    )


async def _become(reached: Callable[[], object]) -> None:
    """Wait until `reached`, for at most ANSWER_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            while not reached():
                await asyncio.sleep(0.02)


def _strike(hosts: Cluster) -> None:
    """Kill the host that has the session, report its death, and start it again without waiting."""
    host = max(hosts.hosts, key=Host.num_sessions)
    host.send(signal.SIGKILL)
    with suppress(httpx.HTTPStatusError):
        hosts.unregister(host)
    host.end()
    host.start()
