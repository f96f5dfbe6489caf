"""Telephone calls at a door whose host is killed: the section `telephone` of `antiphon bench hosts`."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

from bench import carrier
from bench.common import spread
from tests.cluster.door.line import KEY, MEDIA, Line, application, call, id_of_call
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.scripted import speech, text
from tests.server.scripted import WORD_S

# Kills of each kind, words that the caller says in a turn, words of an answer, and seconds of a caller's word.
KILLS, NUM_SAID, NUM_ANSWERED, SAID_S = 10, 8, 20, 0.32


def kill(hosts: Cluster) -> Host:
    """Kill the host that has the call, and report its death."""
    host = max(hosts.hosts, key=Host.num_sessions)
    host.kill()
    hosts.unregister(host)
    return host


def restart(hosts: Cluster, host: Host) -> None:
    """Start a host, and wait until the call can be continued again."""
    host.start()
    host.wait()
    until(lambda: all(each.is_ready() for each in hosts.hosts))


async def said(hosts: Cluster, door: Host, line: Line, id: str, chance: random.Random) -> int:
    """Let the host die while the caller speaks. Return how many of the words are lost."""
    line.speak(speech(1, NUM_SAID, 31))
    await asyncio.sleep(chance.uniform(0.1, NUM_SAID * SAID_S))
    killed = await asyncio.to_thread(kill, hosts)
    async with application(door, id) as app:
        # The model repeats what it has heard.
        found = set((await app.until("response.output_audio_transcript.done"))["transcript"].split())
    await asyncio.to_thread(restart, hosts, killed)
    await line.until(lambda: line.buffer.ends_s < asyncio.get_running_loop().time() - 1.0)
    return NUM_SAID - len(found & set(text(1, NUM_SAID).split()))


async def answered(hosts: Cluster, door: Host, line: Line, id: str, chance: random.Random) -> tuple[float, float]:
    """Let the host die while it answers. Return the longest silence that the caller hears from then on until the answer
    is over, and the time until the answer begins again. Both are in seconds.
    """
    loop = asyncio.get_running_loop()
    async with application(door, id) as app:
        begun_s = line.buffer.played_s
        await app.ask(text(1, NUM_ANSWERED))
        await line.until(lambda: line.buffer.played_s > begun_s + chance.uniform(0.3, 2.0))
    struck_s = loop.time()
    killed = await asyncio.to_thread(kill, hosts)
    async with application(door, id) as app:
        await app.until("response.output_audio.done")
        await line.until(lambda: line.buffer.ends_s < loop.time() - 0.5)
    await asyncio.to_thread(restart, hosts, killed)
    spans = [span for span in line.buffer.spans if span[1] > struck_s]
    gaps = [(later[0] - max(earlier[1], struck_s), later[0]) for earlier, later in pairwise(spans)]
    longest_s, again_at_s = max(gaps)
    return longest_s, again_at_s - struck_s


def killed_calls(state: str) -> dict[str, Any]:
    """Kill the host of a call while the caller speaks, and while it answers, each KILLS times.

    The model answers as fast as it is heard, so that nothing of an answer is ahead.
    """
    chance = random.Random(1)

    async def main(hosts: Cluster, door: Host) -> dict[str, Any]:
        async with call(door.ws, MEDIA, carrier.start()) as line:
            id = await id_of_call(door)
            lost = [await said(hosts, door, line, id, chance) for _ in range(KILLS)]
            heard = [await answered(hosts, door, line, id, chance) for _ in range(KILLS)]
            assert line.closed == (0, "")
        gaps, again = zip(*heard, strict=True)
        words = {"kills": 2 * KILLS, "said": KILLS * NUM_SAID, "lost": sum(lost)}
        return words | {"gap": spread(gaps), "begins again": spread(again)}

    with cluster(state, num_hosts=2, pace_s=WORD_S, api_key=KEY) as hosts:
        door = hosts.add_door()
        door.wait()
        return asyncio.run(main(hosts, door))
