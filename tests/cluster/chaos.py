"""Hosts that die and hang while people talk to them, again and again: nothing said is lost, and nothing is said twice.

    python -m tests.cluster.chaos [--kills 500] [--hangs 20] [--handovers 50] [--callers 9]
        [--store sqlite|redis|postgres] [--seed 1]

Callers take turns, written and spoken; half of them resume by themselves, half know nothing of resuming and sit behind
a door. Each round kills a host that has sessions, at a random moment of their turns, and starts it anew; a hang is
SIGSTOP, beyond the time after which a host counts as dead, and then SIGCONT. A handover is SIGTERM, and SIGKILL while
the host gives its sessions away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from antiphon.store.sessions import SessionStore, open_store
from tests.cluster.callers import Caller, ResumingCaller, StockCaller
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.store.servers import PostgresServer, RedisServer, Server

# Of hosts, in seconds.
HOST_TTL_S = 1.5
PACE_S = 0.1
# A host has given its sessions away by then, most times.
CUT_OFF_S = 0.4
SERVERS: dict[str, type[Server]] = {"redis": RedisServer, "postgres": PostgresServer}


@dataclass(slots=True)
class Outcome:
    """What rounds came to. `num_hit`: sessions whose host died or hung under them. `how`: how they were resumed."""

    kills: int = 0
    hangs: int = 0
    handovers: int = 0
    turns: int = 0
    num_hit: int = 0
    how: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)


@contextmanager
def store_url(kind: str) -> Iterator[str]:
    """The `--state` of a store of this kind; "" for a folder."""
    if kind == "sqlite":
        yield ""
        return
    server = SERVERS[kind]()
    try:
        server.start()
        yield server.url  # type: ignore[attr-defined]
    finally:
        server.close()


def phase_of(caller: Caller) -> str:
    """In which phase of a turn a caller is, as far as it was told."""
    if "" in caller.view.responses.values():
        return "answering"
    last = caller.events[-1]["type"] if caller.events else ""
    if "speech_started" in last:
        return "speaking"
    if "speech_stopped" in last or "committed" in last or "transcription" in last:
        return "transcribing"
    return "asking" if caller.said and caller.view.said("assistant")[-1:] != caller.said[-1:] else "idle"


async def rounds(
    hosts: Cluster, callers: list[Caller], kills: int, hangs: int, seed: int, handovers: int = 0
) -> Outcome:
    """Kill and hang hosts, and cut off their handovers, while the callers talk. Then have all of them end, and judge
    what they were told.
    """
    outcome = Outcome()
    chance = random.Random(seed)
    over = asyncio.Event()
    store = open_store(hosts.state, 3600)

    async def talk(caller: Caller) -> None:
        async with caller.connected():  # type: ignore[attr-defined]
            while not over.is_set():
                await caller.converse(1 + chance.randrange(2))
                await asyncio.to_thread(check_stored, store, caller)
            caller.check()

    async def befall() -> None:
        plan = ["kill"] * kills + ["hang"] * hangs + ["handover"] * handovers
        chance.shuffle(plan)
        for what in plan:
            await asyncio.sleep(chance.uniform(0.3, 1.2))
            num_hit, host = await asyncio.to_thread(busiest, hosts)
            outcome.num_hit += num_hit
            outcome.phases.update(phase_of(caller) for caller in callers)
            befalls = {"kill": kill, "hang": hang, "handover": partial(cut_off, after_s=chance.uniform(0.0, CUT_OFF_S))}
            await asyncio.to_thread(befalls[what], hosts, host)
            outcome.kills, outcome.hangs = outcome.kills + (what == "kill"), outcome.hangs + (what == "hang")
            outcome.handovers += what == "handover"
            await asyncio.sleep(0.5)
        over.set()

    try:
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(talk(caller))
            # All are in a conversation.
            await asyncio.sleep(1.0)
            group.create_task(befall())
    finally:
        store.close()
    for caller in callers:
        outcome.turns += len(caller.said)
        outcome.how.update(getattr(caller, "how", ()))
    return outcome


def busiest(hosts: Cluster) -> tuple[int, Host]:
    """How many sessions the host with the most has, and that host, once another one is ready to take them."""
    until(lambda: sum(host.is_ready() for host in hosts.hosts) >= 2)
    return max(((host.num_sessions(), host) for host in hosts.hosts if host.is_ready()), key=lambda found: found[0])


def kill(hosts: Cluster, host: Host) -> None:
    """Kill a host as it stands, say so as its supervisor, and start it anew without waiting for that."""
    host.kill()
    hosts.unregister(host)
    host.start()


def hang(_: Cluster, host: Host) -> None:
    """Have a host hang until all others take it for dead, and go on."""
    host.send(signal.SIGSTOP)
    time.sleep(HOST_TTL_S * 2)
    host.send(signal.SIGCONT)


def cut_off(hosts: Cluster, host: Host, after_s: float) -> None:
    """Have a host give its sessions away, kill it in the middle of that, and start it anew."""
    host.send(signal.SIGTERM)
    time.sleep(after_s)
    kill(hosts, host)


def check_stored(store: SessionStore, caller: Caller) -> None:
    """Raise AssertionError unless the store has the very items that the caller was told of, in their order, and the
    next host would ask for no words again.
    """
    row = store.get(caller.session_id)
    assert row
    stored = [item["id"] for item in json.loads(row.snapshot)["items"]]
    told = list(caller.view.items)
    assert stored == told, (caller.number, stored[-4:], told[-4:], caller.latest())
    about = json.loads(row.snapshot)["continued"] | {"journal": None}
    assert row.received.events >= caller.num_spoken, (caller.number, caller.num_spoken, caller.num_sent, about)


def run(kind: str, kills: int, hangs: int, num_callers: int, seed: int, handovers: int = 0) -> Outcome:
    """Run rounds over three hosts that share a store of this kind, with a door, from their start to their end."""
    flags = ("--host-ttl-s", str(HOST_TTL_S), "--sessions-per-key", "200", "--max-sessions", "200")
    with store_url(kind) as state, cluster(state, *flags, pace_s=PACE_S) as hosts:
        door = hosts.add_door()
        door.wait()
        urls = [host.ws for host in hosts.hosts]
        callers: list[Caller] = [
            ResumingCaller(n, urls, seed + n) if n % 2 else StockCaller(n, [door.ws], seed + n)
            for n in range(num_callers)
        ]
        try:
            return asyncio.run(rounds(hosts, callers, kills, hangs, seed, handovers))
        except BaseException:
            for process in [*hosts.hosts, *hosts.doors]:
                print(f"--- {process.name}\n{process.log[-4000:]}")
            raise


def main() -> None:
    """Run the rounds that the command line asks for, and print what they came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--hangs", type=int, default=20)
    parser.add_argument("--handovers", type=int, default=50)
    parser.add_argument("--callers", type=int, default=9)
    parser.add_argument("--store", choices=("sqlite", *SERVERS), default="redis")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = run(args.store, args.kills, args.hangs, args.callers, args.seed, args.handovers)
    print(
        f"{found.kills} kills, {found.hangs} hangs and {found.handovers} handovers cut off hit "
        f"{found.num_hit} sessions in {found.turns} turns"
    )
    print(f"resumed: {dict(found.how)}; phases: {dict(found.phases)}")


if __name__ == "__main__":
    main()
