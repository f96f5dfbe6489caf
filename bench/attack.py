"""Attacks on a server by class, and their effect on another key's conversation, on the event loop and on memory.

    antiphon bench attack [--classes bodies,files,...] [--data DIR] [--turns N] [--seconds S] [--quick] [--out DIR]

Each class attacks a fresh server, or a door with a host (see bench.hostile.stages). The attacker has its own key, and
runs in a separate process with the lowest priority. Meanwhile a client with another key, the bystander, talks to the
server: it plays recordings in real time with --data, and types its turns otherwise. For some classes it sends chats or
requests speech instead. /health is requested every 20 ms. The same things are measured before the attack, on the same
server.

The longest reply of /health is the longest time for which the event loop stood still, or accepted no connections. The
server, its clients and the attacker share the machine's cores. Memory is the sum over all of antiphon's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import psutil
from bench.common import RESULTS, machine, options, percentile, save, show, spread
from bench.driver import Caller, server_vad
from bench.hearing.clips import Clip, whole_turns
from bench.hostile.__main__ import CLASSES
from bench.hostile.stages import PLAIN, STAGES, Staged, attacker, staged
from bench.talk import one_turn

from antiphon.client.link import SessionEnded

KEYS = ("bystander", "attacker")
# Small models, which load within seconds and answer within tenths of a second.
MODELS = ("--language-model", "smollm2-135m-instruct", "--synthesizer", "hibari-heart")
# Small budgets, which an attack can exhaust.
BUDGETS = ("--sessions-per-key", "64", "--grace-s", "5", "--kv-mb", "256", "--max-queue", "64")
HEALTH_EVERY_S, MEMORY_EVERY_S, HEALTH_TIMEOUT_S = 0.02, 0.05, 60.0
# Seconds to the first sound of an answer, after which a turn counts as lost.
TURN_S = 30.0
# The smallest number of turns that a bystander takes, even if they exceed the time.
FEWEST_TURNS = 3
QUESTION = "Say one short sentence about the sea."


class Watch:
    """Requests /health, and reads the process's memory and descriptors, in two threads while the block runs."""

    def __init__(self, srv: Staged) -> None:
        self._server = srv
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._ask_health, self._look)]
        self.health_s: list[float] = []
        self.failed = 0
        self.peak_rss_mb = srv.rss_mb()
        self.peak_fds = srv.num_fds()

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask_health(self) -> None:
        address = urlsplit(self._server.url)
        while not self._ended.wait(HEALTH_EVERY_S):
            begun = time.monotonic()
            connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=HEALTH_TIMEOUT_S)
            try:
                connection.request("GET", "/health", headers={"Connection": "close"})
                self.failed += connection.getresponse().status != 200
            except (OSError, http.client.HTTPException):
                self.failed += 1
            finally:
                connection.close()
            self.health_s.append(time.monotonic() - begun)

    def _look(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            try:
                self.peak_rss_mb = max(self.peak_rss_mb, self._server.rss_mb())
                self.peak_fds = max(self.peak_fds, self._server.num_fds())
            except psutil.Error:
                return


@dataclass(slots=True)
class Talk:
    """A bystander's turns: seconds to the first sound of each answer, and the number of lost turns."""

    seconds: list[float] = field(default_factory=list)
    lost: int = 0

    @property
    def num(self) -> int:
        """The number of turns, including lost ones."""
        return len(self.seconds) + self.lost

    def add(self, took_s: float | None) -> None:
        """Count a turn. None stands for a lost turn."""
        if took_s is None:
            self.lost += 1
        else:
            self.seconds.append(took_s)

    def row(self) -> dict[str, Any]:
        return {"turns": self.num, "lost": self.lost, **spread(self.seconds)}


async def typed_turn(caller: Caller) -> float | None:
    """Ask a question in writing.

    Return the seconds to the first sound of the answer; None if it fails or does not arrive.

    The model may give an empty answer. Then the question is asked again.
    """
    try:
        async with asyncio.timeout(TURN_S):
            while True:
                begun = time.monotonic()
                since = await caller.ask(QUESTION, 24)
                _, done = await caller.first("response.done", since, TURN_S)
                caller.stop_playing()
                if sounds := caller.times("response.output_audio.delta", since):
                    return sounds[0] - begun
                if done["response"]["status"] == "failed":
                    return None
    except TimeoutError:
        return None


class Over:
    """Tells when a bystander ends: after `turns` turns, or after `seconds` if that is given."""

    def __init__(self, turns: int, seconds: float | None) -> None:
        self._turns, self._seconds, self._begun = turns, seconds, time.monotonic()

    def __call__(self, heard: Talk) -> bool:
        if self._seconds is None:
            return heard.num >= self._turns
        return heard.num >= min(FEWEST_TURNS, self._turns) and time.monotonic() - self._begun >= self._seconds


async def converse(srv: Staged, clips: list[Clip], over: Over) -> Talk:
    """Hold a conversation until it is `over`. A broken conversation is restarted, and its turn is lost."""
    heard = Talk()
    while not over(heard):
        try:
            async with Caller(srv.url, server_vad(500), key=KEYS[0]) as caller:
                while not over(heard):
                    if clips:
                        turn = await one_turn(caller, clips[heard.num % len(clips)])
                        heard.add(turn.stages.get("sound"))
                    else:
                        heard.add(await typed_turn(caller))
        except (OSError, TimeoutError, SessionEnded) as error:
            print(f"the bystander lost a turn: {type(error).__name__}: {error}", file=sys.stderr)
            heard.lost += 1
    return heard


async def request(srv: Staged, over: Over, path: str, body: dict[str, Any]) -> Talk:
    """Send one request after another until it is `over`. Records the seconds to the first byte of each result."""
    heard = Talk()
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    async with httpx.AsyncClient(base_url=srv.url, headers=headers, timeout=TURN_S) as client:
        while not over(heard):
            begun = time.monotonic()
            try:
                async with client.stream("POST", path, json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        break
                    heard.add(time.monotonic() - begun if answer.status_code == 200 else None)
            except httpx.HTTPError:
                heard.add(None)
    return heard


async def talk(srv: Staged, asks: str, clips: list[Clip], over: Over) -> Talk:
    """Run the bystander of a stage until it is `over`."""
    match asks:
        case "chat":
            messages = [{"role": "user", "content": "Say hello."}]
            return await request(
                srv, over, "/v1/chat/completions", {"model": "default", "max_tokens": 24, "messages": messages}
            )
        case "speech" | "clone":
            sample = {"ref_audio": f"{srv.beside}/sound", "ref_text": "Hello."} if asks == "clone" else {}
            body = {"input": "Good morning to you.", "response_format": "pcm", "stream": True, **sample}
            return await request(srv, over, "/v1/audio/speech", body)
        case _:
            return await converse(srv, clips, over)


def measure(
    name: str, args: argparse.Namespace, clips: list[Clip], log: IO[str], of_attackers: IO[str]
) -> dict[str, Any]:
    """Run one class of attack on a fresh server. Before it, measure the bystander without an attack."""
    asks = STAGES.get(name, PLAIN).asks
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with staged(name, (*MODELS, *BUDGETS, *keys), log, quick=args.quick) as srv:
        asyncio.run(talk(srv, asks, clips, Over(1, None)))
        with Watch(srv) as before:
            alone = asyncio.run(talk(srv, asks, clips, Over(args.turns, args.seconds)))
        idle_mb, logged = srv.rss_mb(), Path(log.name).stat().st_size
        with Watch(srv) as during:
            with attacker(name, srv.url, KEYS[1], srv.beside, quick=args.quick, log=of_attackers) as found:
                begun = time.monotonic()
                beside = asyncio.run(talk(srv, asks, clips, Over(args.turns, args.seconds)))
                time.sleep(max(0.0, begun + args.least_s - time.monotonic()))
            time.sleep(args.after_s)
            lived = srv.lives
            after_mb = srv.rss_mb() if lived else None
        row: dict[str, Any] = {
            "bystander": asks,
            "health_alone_s": {"p99": percentile(before.health_s, 99), "worst": max(before.health_s, default=0.0)},
            "health_s": {"p99": percentile(during.health_s, 99), "worst": max(during.health_s, default=0.0)},
            "health_failed": during.failed,
            "alone": alone.row(),
            "beside": beside.row(),
            "rss_mb": {"before": idle_mb, "peak": during.peak_rss_mb, "after": after_mb},
            "after_s": args.after_s,
            "peak_fds": during.peak_fds,
            "logged_bytes": Path(log.name).stat().st_size - logged,
            "server_lived": lived,
            **found,
        }
        if held := found["outcomes"].get("held", 0) if name == "idle" else 0:
            row["bytes_each"] = round((during.peak_rss_mb - idle_mb) * 1e6 / held)
        return row


def print_rows(found: dict[str, dict[str, Any]]) -> None:
    rows = {
        name: {
            "health ms: alone": r["health_alone_s"]["worst"] * 1000,
            "attacked": r["health_s"]["worst"] * 1000,
            "p50 s: alone": r["alone"]["p50_s"],
            "p50 attacked": r["beside"]["p50_s"],
            "p95 s: alone": r["alone"]["p95_s"],
            "p95 attacked": r["beside"]["p95_s"],
            "lost": r["beside"]["lost"],
            **{f"MB {when}": "died" if mb is None else round(mb) for when, mb in r["rss_mb"].items()},
            "fds": r["peak_fds"],
            "log kB": r["logged_bytes"] // 1000,
            "tried": r["tried"],
        }
        for name, r in found.items()
    }
    show("attacks: /health (worst), the bystander's first sound, memory", rows)
    for name, r in found.items():
        each = f", {r['bytes_each'] / 1000:.0f} kB each" if "bytes_each" in r else ""
        print(f"{name}: {', '.join(f'{n} x {what}' for what, n in r['outcomes'].items()) or 'no answers'}{each}")


def arguments() -> argparse.Namespace:
    """Parse the command line; its classes become a list."""
    parser = options("antiphon bench attack", __doc__)
    parser.add_argument("--classes", default=",".join(CLASSES), help="classes of attack")
    parser.add_argument("--data", type=Path, help="folder with a manifest.jsonl: the bystander speaks; else it types")
    parser.add_argument("--turns", type=int, default=20, help="turns of the bystander: alone, and again under attack")
    parser.add_argument(
        "--seconds",
        type=float,
        help="seconds of the bystander, alone and under attack, instead of --turns; memory is read again after as many",
    )
    parser.add_argument("--least-s", type=float, default=10.0, help="least duration of an attack, in seconds")
    parser.add_argument(
        "--after-s", type=float, default=30.0, help="seconds after an attack until memory is read again"
    )
    parser.add_argument("--quick", action="store_true", help="small attacks and one turn; writes nothing")
    parser.add_argument("--out", type=Path, help="folder for attack.json, also with --quick")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.least_s, args.after_s = 1, 3.0, 0.0
    elif args.seconds is not None:
        args.least_s, args.after_s = args.seconds, min(args.after_s, args.seconds)
    args.classes = [name for name in args.classes.split(",") if name]
    if unknown := set(args.classes) - CLASSES.keys():
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = arguments()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    clips = whole_turns(args.data) if args.data else []
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name if args.data else None}
    found: dict[str, dict[str, Any]] = {}
    out = args.out or (None if args.quick else RESULTS)
    with (
        tempfile.NamedTemporaryFile("w", prefix="attack-", suffix=".log", delete=False) as log,
        tempfile.NamedTemporaryFile("w", prefix="attackers-", suffix=".log", delete=False) as of_attackers,
    ):
        print(f"the servers log to {log.name}, the attackers to {of_attackers.name}")
        for name in args.classes:
            found[name] = measure(name, args, clips, log, of_attackers)
            print_rows({name: found[name]})
            if out:
                # Saves now, so that a failing later class loses no results.
                print(f"written: {save('attack', document | {'classes': found}, out)}")
    print_rows(found)


if __name__ == "__main__":
    main()
