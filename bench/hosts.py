"""Several hosts: what callers hear when one dies or is replaced, and the delay of a relay and a door.

    antiphon bench hosts [--sections kill,hang,captions,native,…] [--callers 40] [--store redis|postgres|sqlite]

Hosts, doors, the store and the callers' sockets are real, on this machine. In all sections except `real`, the hosts
have scripted models. These repeat a word every tenth of a second, as 0.3 s of audio.

- kill: one host answers all callers and is killed, which a supervisor reports. Measures for each caller the time from
  the end of its connection to the session's next audio, at another host: for callers that resume, and for callers of a
  door.
- hang: as in `kill`, but with SIGSTOP and without a report, so the host's key has to expire.
- real: as in `kill`, but with the default small models and without a report. The key expires, and the prompt is
  prefilled again.
- upgrade: eight callers talk while three hosts drain and restart, one after the other. Measures the time from the end
  of a connection to the continuation of the session, and the time that each host takes.
- frames: a message and its reply, 50 times a second on each of eight sockets: directly, through a relay, and through a
  door. The same for each other kind of session, without the relay.
- captions: three listeners play 14 recordings each to hosts with the default transcriber, behind a door. The host with
  most sessions is killed every few seconds. Compares the words with those of an undisturbed run, and measures by how
  much the first word after each kill is late.
- states: as `captions`, but in this process, from a state in the middle of each of 42 turns, and without a pace. It
  counts words that are lost, doubled or retracted, however busy the machine is.
- keeping: what storing captions costs, with scripted models: CPU time of the host, and bytes in the store (Redis).
- speech: a text is spoken behind a door, by a stream and by a request, six times each. Its host is killed while it
  speaks. Counts seconds that are said twice or are missing, and measures the silence that a listener hears.
- native: a client of a door says 20 recordings to a MiniCPM-o of tiny random weights. Its host is killed in each turn:
  while it speaks, after its end, or during the answer. Counts the turns that are answered after the kill.
- telephone: a call at a door, whose host is killed while the caller speaks, and while it answers. Counts the caller's
  words that are lost, and measures the silence that the caller hears.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx
import psutil
import websockets
from bench.common import machine, options, save, show, spread
from bench.hosts_captions import continued_captions, kept, killed_captions
from bench.hosts_native import killed_native
from bench.hosts_speech import killed_speech
from bench.hosts_telephone import killed_calls
from tests.cluster.callers import Caller, ResumingCaller, StockCaller
from tests.cluster.chaos import SERVERS, store_url
from tests.cluster.processes import INTERNAL_KEY, Host, cluster

FLAGS = ("--sessions-per-key", "500", "--max-sessions", "500", "--max-events-per-s", "2000")
PACE_S = 0.1
# Number of words of an answer that is to be interrupted.
NUM_WORDS = 50
LIMIT_S = 180.0
# Seconds between a caller's checks for events. The callers share the cores with the hosts, so they check rarely.
# Arrival times are recorded independently of this.
POLL_S = 0.05
# Number of sockets, round trips per second on each, and seconds. So few round trips keep the hosts idle, so that the
# path is measured, not a queue.
FRAME_CALLERS, FRAMES_PER_S, FRAMES_S = 8, 50, 8.0
QUESTION = "Tell me a long story about a fox."
REAL = ("--language-model", "smollm2-135m-instruct", "--synthesizer", "hibari-heart")


async def cut(callers: Sequence[Any], strike: Callable[[], None], question: str = "") -> dict[str, Any]:
    """Let a host answer all callers, run `strike`, and measure the silence of callers whose answer was interrupted.

    The callers ask the question. With scripted models they request NUM_WORDS words instead, and wait for the last one.
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
        # The new answer has another id, and the interrupted answer is done.
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


def struck(state: str, count: int, number: signal.Signals, *, door: bool, reported: bool, real: bool = False) -> Any:
    """Hit the host of `count` callers with a signal during an answer.

    With `reported`, a supervisor reports its death.
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
            # Half of the callers are at each host.
            callers: list[Caller] = [StockCaller(n, [gate.ws], n) for n in range(2 * count)]
        else:
            callers = [ResumingCaller(n, urls, n, first=urls[0]) for n in range(count)]

        def strike() -> None:
            hosts.hosts[0].send(number)
            if reported:
                hosts.unregister(hosts.hosts[0])

        return asyncio.run(cut(callers, strike, QUESTION if real else ""))


def upgraded(state: str, count: int) -> dict[str, Any]:
    """Let callers talk while three hosts, one after the other, drain and restart."""
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


# 1,280 bytes that are not an event. The host replies to each with an error.
ASKED = json.dumps({"type": "x" * 1250})
# 20 ms of silence at 24 kHz, in an append event.
APPENDED = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(960)).decode()})
LISTENS = json.dumps(
    {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}}
)


async def round_trips(
    urls: Sequence[str], opening: Sequence[Sequence[str]] = (), *, audio: bool = False
) -> list[float]:
    """Send FRAMES_PER_S messages per second on each socket for FRAMES_S. Return the round-trip times in ms.

    `opening` is the first message of each socket. With `audio`, only every tenth message gets a reply, at a different
    time on each socket. The others are 20 ms of audio each, like those of a caller who speaks.
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
            # Waits until the replies to the first messages have arrived.
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


# The kinds of sessions whose frames are measured: their endpoints, and the first messages of a client.
CONVERSATION = "/v1/realtime"
SPEECH, VIDEO = {"type": "session.config", "voice": "one"}, {"type": "session.config", "modalities": ["text"]}
KINDS: dict[str, tuple[str, Sequence[str]]] = {
    "frames": (CONVERSATION, ()),
    "frames of captions": ("/v1/realtime?intent=transcription", ()),
    "frames of vLLM's captions": ("/v1/realtime?dialect=vllm", ()),
    "frames of speech": ("/v1/audio/speech/stream", (json.dumps(SPEECH),)),
    "frames of video": ("/v1/video/chat/stream", (json.dumps(VIDEO),)),
}


def carried(state: str, count: int, path: str, opening: Sequence[str]) -> dict[str, Any]:
    """Measure how much a relay and a door add to a round trip at an endpoint, and how much CPU time they take.

    `opening` are a client's first messages.
    """
    with cluster(state, *FLAGS, num_hosts=2, voices="one") as hosts:
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

        measure("straight", one, [f"{one.ws}{path}"] * count, [opening] * count)
        measure("door", gate, [f"{gate.ws}{path}"] * count, [opening] * count)
        if path == CONVERSATION:
            sessions = asyncio.run(_sessions_at(one.ws, count))
            urls = [f"{two.ws}/v1/realtime?resume={id}" for id, _ in sessions]
            measure("relay", two, urls, [[request] for _, request in sessions])
        for name in [each for each in found if each != "straight"]:
            for q in ("p50_ms", "p99_ms"):
                found[name][f"added_{q}"] = found[name][q] - found["straight"][q]
        return found


async def _sessions_at(ws: str, count: int) -> list[tuple[str, str]]:
    """Open sessions at a host, and disconnect. Return the ids of the sessions, and the message that resumes each."""
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
    parser = options(
        "antiphon bench hosts",
        __doc__,
        ("kill", "hang", "real", "upgrade", "frames", "captions", "keeping", "states", "speech", "native", "telephone"),
    )
    parser.add_argument("--callers", type=int, default=40)
    parser.add_argument("--store", choices=("sqlite", *SERVERS), default="redis")
    args = parser.parse_args()
    kill, hang = signal.SIGKILL, signal.SIGSTOP
    work: dict[str, dict[str, Callable[[str], Any]]] = {
        "kill": {
            "killed and reported, callers resume": lambda s: struck(s, args.callers, kill, door=False, reported=True),
            "killed and reported, behind a door": lambda s: struck(s, args.callers, kill, door=True, reported=True),
            "killed, not reported": lambda s: struck(s, args.callers, kill, door=False, reported=False),
        },
        "hang": {"hangs, behind a door": lambda s: struck(s, args.callers, hang, door=True, reported=False)},
        "real": {
            "real models, killed, not reported": lambda s: struck(s, 2, kill, door=False, reported=False, real=True)
        },
        "upgrade": {"rolling upgrade": lambda s: upgraded(s, 8)},
        "frames": {
            name: partial(carried, count=FRAME_CALLERS, path=path, opening=opening)
            for name, (path, opening) in KINDS.items()
        },
        "captions": {"captions, killed and reported, behind a door": killed_captions},
        "keeping": {"keeping captions": kept},
        "speech": {"speech, killed and reported, behind a door": killed_speech},
        "states": {"captions continued with real models": continued_captions},
        "telephone": {"telephone, killed and reported, at a door": killed_calls},
        "native": {"native model, killed in each turn, behind a door": killed_native},
    }
    result: dict[str, Any] = {"machine": machine(), "store": args.store, "callers": args.callers}
    for section in args.sections.split(","):
        for name, measure in work[section].items():
            # Each section has a new store, because the last section's hosts stay alive in the old one for a while.
            with store_url(args.store) as state:
                result[name] = found = measure(state)
            show(name, found if section in ("frames", "keeping", "speech") else [found.get("gap", found)])
            # Saves now, so that no results are lost if a later section fails.
            save("hosts", result)
    print(f"\nwritten: {save('hosts', result)}")


if __name__ == "__main__":
    main()
