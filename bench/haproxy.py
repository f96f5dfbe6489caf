"""Two hosts behind Debian's HAProxy: its cost, and the effect of reloads on conversations.

    python -m bench.haproxy [--sections cost,reloads] [--minutes 5]

HAProxy, the hosts and the callers' sockets are real, on this machine.

- cost: CPU seconds of all server processes per minute of one session, which transcribes recordings in real time with
  the models of the profile `light`. One host alone is compared with two hosts that share a store behind HAProxy. Both
  are measured one after the other, and again in the opposite order.
- reloads: 40 callers talk with two hosts of scripted models. HAProxy is reloaded every 10 s, and a second later ends
  all of the callers' connections. Each caller resumes through HAProxy, at either host. The test checks that every word
  arrives once, in order.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import websockets
from bench.common import HERE, measured, options, percentile, show, spread, together
from tests.cluster.balancer import Balancer
from tests.cluster.callers import ResumingCaller
from tests.cluster.processes import Cluster, cluster

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16

RECORDINGS = HERE.parent / "tests" / "data" / "audio"
# A load so small that every partial is computed, so that the compared servers do the same work.
CAPTIONS, CAPTIONS_S, CHUNK_S = 2, 60.0, 0.1
RATE_HZ, PAUSE_S = 24_000, 1.0
CALLERS, RELOAD_EVERY_S, PACE_S = 40, 10.0, 0.05
FLAGS = ("--sessions-per-key", "500", "--max-sessions", "500", "--max-events-per-s", "2000")


# --- cost -------------------------------------------------------------------------------------------------------------


def speech() -> bytes:
    """Return a minute of recordings with pauses, as PCM16."""
    resampler, parts, length = Resampler(16_000, RATE_HZ), list[np.ndarray](), 0
    names = sorted(path for path in RECORDINGS.iterdir() if path.name.startswith(("lj-", "ls-")))
    while length < CAPTIONS_S * RATE_HZ:
        for path in names:
            pcm = np.concatenate((decode_all(str(path)), np.zeros(round(PAUSE_S * 16_000), np.float32)))
            parts.append(resampler.feed(pcm))
            length += len(parts[-1])
    return to_pcm16(np.concatenate(parts)[: round(CAPTIONS_S * RATE_HZ)])


async def caption(url: str, pcm16: bytes, delay_s: float) -> int:
    """Send the audio in real time. Return the number of received events."""
    await asyncio.sleep(delay_s)
    events = list[Any]()
    async with websockets.connect(f"{url}/v1/realtime?intent=transcription", max_size=None) as socket:

        async def read() -> None:
            async for event in socket:
                events.append(event)

        reader = asyncio.create_task(read())
        session = {"type": "transcription", "audio": {"input": {"transcription": {"model": "default"}}}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        step, began_s = round(CHUNK_S * RATE_HZ) * 2, time.monotonic()
        for number, at in enumerate(range(0, len(pcm16), step)):
            await asyncio.sleep(began_s + number * CHUNK_S - time.monotonic())
            chunk = base64.b64encode(pcm16[at : at + step]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": chunk}))
        await asyncio.sleep(2.0)
        reader.cancel()
    return len(events)


def cpu_s(processes: list[psutil.Process]) -> dict[psutil.Process, float]:
    """Return the user and system time of these processes and their descendants, in seconds."""
    found = {}
    for process in [p for one in processes for p in (one, *one.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process] = times.user + times.system
    return found


def used_s(processes: list[psutil.Process], before: dict[psutil.Process, float]) -> float:
    """Return the CPU time of these processes and their descendants since `before`, without those that have ended."""
    return sum(s - before.get(process, 0.0) for process, s in cpu_s(processes).items())


@contextmanager
def balanced(hosts: Cluster, hard_stop_s: int = 1) -> Iterator[tuple[Balancer, list[psutil.Process]]]:
    """Run HAProxy in front of the hosts. Yields its processes."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    balancer = Balancer([f"{host.address}:{host.port}" for host in hosts.hosts], hard_stop_s)
    try:
        yield balancer, [p for p in psutil.Process().children() if p.pid not in before]
    finally:
        balancer.close()


def used_by_captions(url: str, processes: list[psutil.Process]) -> dict[str, float]:
    """Transcribe speech at `url`. Return the CPU seconds that these processes use per minute of a session."""
    pcm16 = speech()
    # Waits until the processes have finished starting.
    time.sleep(5.0)
    idle_s, before = time.monotonic(), cpu_s(processes)
    time.sleep(10.0)
    idle = used_s(processes, before) / (time.monotonic() - idle_s)
    began_s, before = time.monotonic(), cpu_s(processes)
    events = asyncio.run(together(CAPTIONS, lambda n: caption(url, pcm16, 0.7 * n)))
    took_s, minutes = time.monotonic() - began_s, CAPTIONS * CAPTIONS_S / 60
    return {
        "cpu_s_a_session_minute": used_s(processes, before) / minutes,
        "of_that_idle": idle * took_s / minutes,
        "events": sum(events),
    }


def captioned(num_hosts: int) -> dict[str, float]:
    """Return CPU seconds per minute of a session, with one host alone, or with several hosts behind HAProxy."""
    with cluster("", num_hosts=0) as hosts:
        for _ in range(num_hosts):
            hosts.add_host("--profile", "light", module=("antiphon", "serve"))
        for host in hosts.hosts:
            host.wait()
        processes = [psutil.Process(host.popen.pid) for host in hosts.hosts if host.popen]
        if num_hosts == 1:
            return used_by_captions(hosts.hosts[0].ws, processes)
        with balanced(hosts) as (balancer, more):
            return used_by_captions(balancer.ws, [*processes, *more])


def cost() -> dict[str, Any]:
    ways = {1: "one host alone", 2: "two behind HAProxy"}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways.values()}
    for num_hosts in (1, 2, 2, 1):
        found[ways[num_hosts]].append(captioned(num_hosts))
    show("CPU seconds of one session's minute", [{"way": way} | run for way, runs in found.items() for run in runs])
    return {"captions": CAPTIONS} | found


# --- reloads ----------------------------------------------------------------------------------------------------------


async def talk(callers: list[ResumingCaller], balancer: Balancer, minutes: float) -> dict[str, Any]:
    """Let all callers talk while HAProxy is reloaded, and check what they received."""
    over, waits_s, reloads = asyncio.Event(), list[float](), 0

    async def one(caller: ResumingCaller, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with caller.connected():
            while not over.is_set():
                began_s = time.monotonic()
                await caller.converse(1, spoken=False)
                waits_s.append(time.monotonic() - began_s)
                # The caller pauses after an answer before it asks the next question.
                await asyncio.sleep(1.0)
            caller.check()

    async with asyncio.TaskGroup() as group:
        for number, caller in enumerate(callers):
            group.create_task(one(caller, number * 0.05))
        until_s = time.monotonic() + 60 * minutes
        while time.monotonic() < until_s:
            await asyncio.sleep(RELOAD_EVERY_S)
            balancer.reload()
            reloads += 1
        await asyncio.sleep(3.0)
        over.set()
    resumed_s = [s for caller in callers for s in caller.resumed_s]
    found: dict[str, Any] = {"callers": len(callers), "reloads": reloads, "turns": len(waits_s)}
    found["how"] = dict(Counter(how for caller in callers for how in caller.how))
    found |= spread(resumed_s, "resumed") | {"resumed_max_s": max(resumed_s)}
    found |= {"turn_p50_s": percentile(waits_s, 50), "turn_max_s": max(waits_s)}
    show("reloads", [found])
    return found


def reloaded(minutes: float) -> dict[str, Any]:
    with cluster("", *FLAGS, num_hosts=2, pace_s=PACE_S) as hosts, balanced(hosts) as (balancer, _):
        callers = [ResumingCaller(n, [balancer.ws], n) for n in range(CALLERS)]
        try:
            return asyncio.run(talk(callers, balancer, minutes))
        except BaseException:
            # The hosts' output is deleted with their folder, so it is printed here.
            for host in hosts.hosts:
                kept = Path(f"haproxy-{host.name}.log")
                kept.write_text(host.log)
                print(f"{host.name}: {kept}", file=sys.stderr)
            raise


def main() -> None:
    parser = options("python -m bench.haproxy", __doc__, ("cost", "reloads"))
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes of reloads")
    args = parser.parse_args()
    measured("haproxy", args.sections, {"cost": cost, "reloads": lambda: reloaded(args.minutes)})


if __name__ == "__main__":
    main()
