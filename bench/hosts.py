"""Several hosts: what callers hear when one dies or is replaced, and what a relay and a door add to each frame.

    antiphon bench hosts [--sections kill,hang,real,upgrade,frames] [--callers 40] [--store redis|postgres]

Hosts, doors and the store are real processes on this machine, as are the callers' sockets. The hosts of all sections
but `real` have scripted models, which repeat a word each tenth of a second as 0.3 s of audio.

- kill: all callers are heard an answer by one host, which is killed; a supervisor says so. From the end of each
  caller's connection to the next audio of its session at another host, for callers that resume and behind a door.
- hang: the same with SIGSTOP, and nobody says so: until the host's time is over.
- real: the same with the default small models and no supervisor: the host's time, and the prompt read anew.
- upgrade: eight callers talk while three hosts drain one after the other and start anew. From the end of a connection
  to the session's going on, and what each host takes.
- frames: a message and its answer, 50 a second on each of eight sockets: straight, by a relay, and by a door.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import psutil
import websockets
from bench.common import machine, options, save, show, spread
from tests.cluster.callers import Caller, ResumingCaller, StockCaller
from tests.cluster.chaos import SERVERS, store_url
from tests.cluster.processes import INTERNAL_KEY, Host, cluster

FLAGS = ("--sessions-per-key", "500", "--max-sessions", "500", "--max-events-per-s", "2000")
PACE_S = 0.1
# Words of an answer that is cut.
NUM_WORDS = 50
LIMIT_S = 180.0
# Callers look so often; what they look at says when it came. They are on the cores of what they measure.
POLL_S = 0.05
# Few enough that the hosts are not busy, so that what is measured is the way and not the queue.
FRAME_CALLERS, FRAMES_PER_S, FRAMES_S = 8, 50, 20.0
QUESTION = "Tell me a long story about a fox."
REAL = ("--language-model", "smollm2-135m-instruct", "--synthesizer", "hibari-heart")


async def cut(callers: Sequence[Any], strike: Callable[[], None], question: str = "") -> dict[str, Any]:
    """Have all callers be heard an answer, strike, and measure the silence of those whose answer was broken off. They
    ask the question, or have scripted models repeat NUM_WORDS words, and wait for the last of them.
    """
    struck = asyncio.Event()
    struck_s = 0.0
    silences: list[float] = []

    async def talk(caller: Caller) -> None:
        async with caller.connected():  # type: ignore[attr-defined]
            asked = caller.ask(question) if question else caller.converse(1, spoken=False, num_words=NUM_WORDS)
            await asyncio.gather(asked, listen(caller))

    async def listen(caller: Caller) -> None:
        await struck.wait()
        view = caller.view
        # The answer that is begun anew has an id of its own, and the broken one has ended.
        while view.cancelled_at_s is None or view.heard_at_s[-1] < view.cancelled_at_s:
            if "completed" in view.responses.values():
                return
            await asyncio.sleep(POLL_S)
        silences.append(next(s for s in view.heard_at_s if s > view.cancelled_at_s) - struck_s)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(talk(caller))
        while not all(caller.view.heard_at_s for caller in callers):
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(0.5)
        struck_s = time.monotonic()
        await asyncio.to_thread(strike)
        struck.set()
    return counted(silences)


def counted(values: list[float]) -> dict[str, float]:
    return {"n": len(values)} | spread(values) | {"max_s": max(values)}


def struck(state: str, count: int, number: signal.Signals, *, door: bool, told: bool, real: bool = False) -> Any:
    """`count` callers lose their host in an answer: it dies or hangs by the signal, and its supervisor says so if
    `told`.
    """
    num_hosts = 2 if door or real else 3
    with cluster(state, *FLAGS, num_hosts=0 if real else num_hosts, pace_s=PACE_S) as hosts:
        for _ in range(num_hosts if real else 0):
            hosts.add_host(*REAL, module=("antiphon", "serve"))
        for host in hosts.hosts if real else ():
            host.wait()
        urls = [host.ws for host in hosts.hosts]
        if door:
            gate = hosts.add_door()
            gate.wait()
            # Each host has half of them.
            callers: list[Caller] = [StockCaller(n, [gate.ws], n) for n in range(2 * count)]
        else:
            callers = [ResumingCaller(n, urls, n, first=urls[0]) for n in range(count)]

        def strike() -> None:
            hosts.hosts[0].send(number)
            if told:
                hosts.unregister(hosts.hosts[0])

        return asyncio.run(cut(callers, strike, QUESTION if real else ""))


def upgraded(state: str, count: int) -> dict[str, Any]:
    """Callers talk while each of three hosts drains and starts anew."""
    with cluster(state, *FLAGS, pace_s=PACE_S) as hosts:
        urls = [host.ws for host in hosts.hosts]
        callers = [ResumingCaller(n, urls, n) for n in range(count)]
        host_s: list[float] = []

        def upgrade(host: Host) -> None:
            began_s = time.monotonic()
            key = {"authorization": f"Bearer {INTERNAL_KEY}"}
            httpx.post(f"{host.url}/internal/drain", headers=key, trust_env=False).raise_for_status()
            host.end()
            host.start()
            host.wait()
            host_s.append(time.monotonic() - began_s)

        async def main() -> None:
            over = asyncio.Event()

            async def talk(caller: ResumingCaller) -> None:
                async with caller.connected():
                    while not over.is_set():
                        await caller.converse(2, num_words=6)
                caller.check()

            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(talk(caller))
                await asyncio.sleep(2.0)
                for host in hosts.hosts:
                    await asyncio.to_thread(upgrade, host)
                over.set()

        asyncio.run(main())
        how = sorted({how for caller in callers for how in caller.how})
        gaps = [gap for caller in callers for gap in caller.resumed_s]
        return {"gap": counted(gaps), "host_s": host_s, "how": how}


# 1,280 bytes that are no event: the host answers each with an error.
ASKED = json.dumps({"type": "x" * 1250})
# 20 ms of silence at 24 kHz.
APPENDED = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(960)).decode()})
LISTENS = json.dumps(
    {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}}
)


async def round_trips(
    urls: Sequence[str], opening: Sequence[Sequence[str]] = (), *, audio: bool = False
) -> list[float]:
    """Send a message that is answered FRAMES_PER_S times a second on each socket, for FRAMES_S. Returns the times of
    the round trips, in ms.

    `opening`: what is sent first, by socket. `audio`: 20 ms of it are sent instead, as who speaks does, and only each
    tenth is a message that is answered, on each socket at a time of its own.
    """
    took: list[float] = []

    async def ask(socket: websockets.ClientConnection) -> float:
        began_s = time.monotonic()
        await socket.send(ASKED)
        while json.loads(await socket.recv())["type"] != "error":
            pass
        return (time.monotonic() - began_s) * 1000

    async def one(number: int) -> None:
        async with websockets.connect(urls[number], max_size=None) as socket:
            for frame in opening[number] if opening else [LISTENS] if audio else []:
                await socket.send(frame)
            # Then all is there that a session begins with.
            await ask(socket)
            begun_s = time.monotonic() + number / len(urls) / FRAMES_PER_S
            for count in range(round(FRAMES_S * FRAMES_PER_S)):
                await asyncio.sleep(max(0.0, begun_s + count / FRAMES_PER_S - time.monotonic()))
                if audio and (count + number) % 10:
                    await socket.send(APPENDED)
                else:
                    took.append(await ask(socket))

    async with asyncio.TaskGroup() as group:
        for number in range(len(urls)):
            group.create_task(one(number))
    return took


def carried(state: str, count: int) -> dict[str, Any]:
    """What a relay and a door add to a round trip of two frames, and what they compute."""
    with cluster(state, *FLAGS, num_hosts=2) as hosts:
        one, two = hosts.hosts
        gate = hosts.add_door("--behind", one.url)
        gate.wait()
        found: dict[str, Any] = {}

        def measure(name: str, through: Host, urls: Sequence[str], opening: Sequence[Sequence[str]] = ()) -> None:
            assert through.popen
            process = psutil.Process(through.popen.pid)
            before = process.cpu_times()
            took = asyncio.run(round_trips(urls, opening))
            after = process.cpu_times()
            cpu_s = after.user + after.system - before.user - before.system
            found[name] = {"n": len(took)} | spread(took, unit="ms", qs=(50, 99))
            found[name]["core_share_a_session"] = cpu_s / FRAMES_S / count

        measure("straight", one, [f"{one.ws}/v1/realtime"] * count)
        measure("door", gate, [f"{gate.ws}/v1/realtime"] * count)
        sessions = asyncio.run(_sessions_at(one.ws, count))
        measure("relay", two, [f"{two.ws}/v1/realtime?resume={id}" for id, _ in sessions], [[r] for _, r in sessions])
        for name in ("door", "relay"):
            for q in ("p50_ms", "p99_ms"):
                found[name][f"added_{q}"] = found[name][q] - found["straight"][q]
        return found


async def _sessions_at(ws: str, count: int) -> list[tuple[str, str]]:
    """Open sessions at a host and leave them. Returns the ids, and what resumes each."""
    found = []
    for _ in range(count):
        async with websockets.connect(f"{ws}/v1/realtime?resume=1") as socket:
            created = json.loads(await socket.recv())
            await socket.send(json.dumps({"type": "session.update", "session": {"type": "realtime"}}))
            last = json.loads(await socket.recv())["server_event_seq"]
        session_id = created["session"]["id"]
        resume = {"session_id": session_id, "resume_token": created["resume_token"]}
        resume["last_received_server_event_seq"] = last
        found.append((session_id, json.dumps({"type": "session.resume", **resume})))
    return found


def main() -> None:
    parser = options("antiphon bench hosts", __doc__, ("kill", "hang", "real", "upgrade", "frames"))
    parser.add_argument("--callers", type=int, default=40)
    parser.add_argument("--store", choices=tuple(SERVERS), default="redis")
    args = parser.parse_args()
    kill, hang = signal.SIGKILL, signal.SIGSTOP
    work: dict[str, dict[str, Callable[[str], Any]]] = {
        "kill": {
            "killed and said so, callers resume": lambda s: struck(s, args.callers, kill, door=False, told=True),
            "killed and said so, behind a door": lambda s: struck(s, args.callers, kill, door=True, told=True),
            "killed, nobody says so": lambda s: struck(s, args.callers, kill, door=False, told=False),
        },
        "hang": {"hangs, behind a door": lambda s: struck(s, args.callers, hang, door=True, told=False)},
        "real": {"real models, nobody says so": lambda s: struck(s, 2, kill, door=False, told=False, real=True)},
        "upgrade": {"rolling upgrade": lambda s: upgraded(s, 8)},
        "frames": {"frames": lambda s: carried(s, FRAME_CALLERS)},
    }
    result: dict[str, Any] = {"machine": machine(), "store": args.store, "callers": args.callers}
    for section in args.sections.split(","):
        for name, measure in work[section].items():
            # A store of its own each time, as hosts of before live in it for a while.
            with store_url(args.store) as state:
                result[name] = found = measure(state)
            show(name, found if section == "frames" else [found.get("gap", found)])
            # A later section that fails takes nothing away.
            save("hosts", result)
    print(f"\nwritten: {save('hosts', result)}")


if __name__ == "__main__":
    main()
