"""Speech whose host is killed: the section `speech` of `antiphon bench hosts`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import websockets
from bench.common import spread
from tests.cluster.processes import Cluster, Host, cluster, until

# Flags of hosts that only speak.
SPEECH_ONLY = ("--no-pull", "--language-model", "none", "--synthesizer", "hibari-heart", "--max-sessions", "50")
# Hosts, so that two are ready while another starts; kills for each way to speak.
HOSTS, KILLS, RATE_HZ = 3, 6, 24_000
TEXT = (
    "The sea was calm that morning. Nobody had seen the boats come in, and nobody asked. A dog barked twice, and then "
    "it was quiet again. At noon the fog lifted, and the harbour lay before us as if nothing had happened."
)
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "seed": 7}
# The metric with the seconds of audio that a host has spoken by requests, and by streams that have ended.
SPOKEN = 'antiphon_audio_seconds_total{kind="spoken"}'
# Limit for one text, in seconds.
LIMIT_S = 120.0


@dataclass(slots=True)
class Heard:
    """The audio of one text as PCM16, and the arrival of each piece with its size in bytes."""

    sound: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def take(self, piece: bytes) -> None:
        """Add a piece that has just arrived."""
        self.sound += piece
        self.arrivals.append((time.monotonic(), len(piece)))

    def gap_s(self, since_s: float) -> float:
        """Return the longest silence that a listener hears after `since_s`, in seconds.

        The listener plays each piece when it arrives, or after the pieces before it.
        """
        end_s, longest_s = self.arrivals[0][0], 0.0
        for at_s, size in self.arrivals:
            if at_s > since_s:
                longest_s = max(longest_s, at_s - end_s)
            end_s = max(end_s, at_s) + size / 2 / RATE_HZ
        return longest_s


async def streamed(door: Host, heard: Heard) -> None:
    """Have a speech stream speak TEXT."""
    async with websockets.connect(f"{door.ws}/v1/audio/speech/stream", max_size=None) as socket:
        for message in (CONFIG, {"type": "input.text", "text": TEXT}, {"type": "input.done"}):
            await socket.send(json.dumps(message))
        async for frame in socket:
            if isinstance(frame, bytes):
                heard.take(frame)
            elif json.loads(frame)["type"] == "session.done":
                return


async def requested(door: Host, heard: Heard) -> None:
    """Have a request speak TEXT."""
    body = {"input": TEXT, "model": "default", "response_format": "pcm", "stream": True, "seed": 7}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
        client.stream("POST", f"{door.url}/v1/audio/speech", json=body) as answer,
    ):
        async for piece in answer.aiter_bytes():
            heard.take(piece)


async def spoken(hosts: Cluster, speak: Callable[[Host, Heard], Any], kill_at: int | None) -> tuple[Heard, float]:
    """Speak TEXT. If `kill_at` is given, kill the host after that many bytes. Returns the time of the kill too."""
    heard, killed_s = Heard(), 0.0
    before_s = [host.metric(SPOKEN) for host in hosts.hosts]

    async def killing(at: int) -> None:
        nonlocal killed_s
        while len(heard.sound) < at:
            await asyncio.sleep(0.002)
        spoken_s = [host.metric(SPOKEN) for host in hosts.hosts]
        changed = [now - before for now, before in zip(spoken_s, before_s, strict=True)]
        by_request = max(zip(changed, hosts.hosts, strict=True), key=lambda pair: pair[0])[1]
        host = by_request if max(changed) > 0 else max(hosts.hosts, key=Host.num_sessions)
        killed_s = time.monotonic()
        await asyncio.to_thread(host.kill)
        with suppress(httpx.HTTPStatusError):
            await asyncio.to_thread(hosts.unregister, host)
        host.start()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        killer = group.create_task(killing(kill_at)) if kill_at is not None else None
        await speak(hosts.doors[0], heard)
        if killer and not killed_s:
            killer.cancel()
    return heard, killed_s


def killed_speech(state: str) -> dict[str, Any]:
    """Compare the audio of texts whose host is killed while it speaks with that of a host that lives."""
    chance, found = random.Random(1), dict[str, Any]()
    with cluster(state, "--host-ttl-s", "1.5", num_hosts=0) as hosts:
        for _ in range(HOSTS):
            hosts.add_host(*SPEECH_ONLY, module=("antiphon", "serve"))
        for host in hosts.hosts:
            host.wait()
        hosts.add_door().wait()
        for name, speak in (("stream", streamed), ("request", requested)):
            whole, _ = asyncio.run(spoken(hosts, speak, None))
            twice_s = missing_s = 0.0
            other, gaps = 0, list[float]()
            for _ in range(KILLS):
                until(lambda: sum(host.is_ready() for host in hosts.hosts) >= 2, LIMIT_S)
                cut, killed_s = asyncio.run(spoken(hosts, speak, chance.randrange(len(whole.sound) * 3 // 4)))
                difference_s = (len(cut.sound) - len(whole.sound)) / 2 / RATE_HZ
                twice_s, missing_s = twice_s + max(0.0, difference_s), missing_s + max(0.0, -difference_s)
                other += cut.sound != whole.sound
                if killed_s:
                    gaps.append(cut.gap_s(killed_s))
            about = {"kills": len(gaps), "twice_s": twice_s, "missing_s": missing_s, "with_other_samples": other}
            found[name] = about | spread(gaps, "gap")
    return found
