"""Hosts die and hang repeatedly while callers talk to them. No words may be lost or repeated.

    python -m tests.cluster.chaos [--kills 500] [--hangs 20] [--handovers 50] [--callers 9] [--listeners 4]
        [--speakers 2] [--watchers 3] [--askers 2] [--native] [--store sqlite|redis|postgres] [--seed 1]

Callers take written and spoken turns. Half of them resume their sessions; the others cannot, and use a door. Listeners
get captions through the door, half of them in vLLM's dialect, and say a few words a turn or a hundred. Speakers have
texts spoken through the door. Watchers ask about the frames of a video stream, and askers request responses out of
band. With --native, the callers talk to a native model, and there are no askers. Each round picks a host that has
sessions, at a random moment of their turns. A kill ends it and starts it again. A hang is SIGSTOP for longer than the
time after which a host counts as dead, then SIGCONT. A handover is SIGTERM, then SIGKILL while the host hands its
sessions over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from antiphon.store.sessions import SessionStore, open_store
from tests.cluster.callers import Caller, ResumingCaller, StockCaller
from tests.cluster.listeners import Listener
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.cluster.speakers import Speaker
from tests.cluster.taking_turns import TurnTaker, taking_turns
from tests.cluster.watchers import Asker, OwnWatcher, Watcher
from tests.store.servers import PostgresServer, RedisServer, Server

# Seconds after which a host's key expires.
HOST_TTL_S = 1.5
PACE_S = 0.1
# Seconds after SIGTERM at which a host is usually handing its sessions over.
CUT_OFF_S = 0.4
# The numbers of words in a listener's turn.
LENGTHS = (1, 3, 8, 100)
SERVERS: dict[str, type[Server]] = {"redis": RedisServer, "postgres": PostgresServer}


@dataclass(slots=True)
class Outcome:
    """The result of the rounds.

    `befell` counts kills, hangs and handovers, `turns` the turns by the class of the client, `num_hit` the sessions
    whose host died or hung, and `how` the ways they were resumed.
    """

    befell: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    num_hit: int = 0
    how: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)


@contextmanager
def store_url(kind: str) -> Iterator[str]:
    """Yield the value of `--state` for a store of this kind; "" stands for a folder."""
    if kind == "sqlite":
        yield ""
        return
    server = SERVERS[kind]()
    try:
        server.start()
        yield server.url  # type: ignore[attr-defined]
    finally:
        server.close()


async def rounds(
    hosts: Cluster, clients: Sequence[TurnTaker], kills: int, hangs: int, seed: int, handovers: int = 0
) -> Outcome:
    """Kill and hang hosts, and interrupt their handovers, while clients have their sessions. At the end, each client
    checks the events that it got.
    """
    outcome = Outcome()
    chance = random.Random(seed)
    store = open_store(hosts.state, 3600)
    plan = ["kill"] * kills + ["hang"] * hangs + ["handover"] * handovers
    chance.shuffle(plan)

    async def after_turn(client: TurnTaker) -> None:
        outcome.turns[type(client).__name__] += 1
        if isinstance(client, Caller):
            await asyncio.to_thread(check_stored, store, client)

    try:
        async with taking_turns(clients, after_turn):
            # Every client has a session then.
            await asyncio.sleep(1.0)
            for what in plan:
                await asyncio.sleep(chance.uniform(0.3, 1.2))
                num_hit, host = await asyncio.to_thread(busiest, hosts)
                outcome.num_hit += num_hit
                outcome.phases.update(client.phase for client in clients)
                after_s = chance.uniform(0.0, CUT_OFF_S)
                befalls = {"kill": kill, "hang": hang, "handover": partial(cut_off, after_s=after_s)}
                await asyncio.to_thread(befalls[what], hosts, host)
                outcome.befell[what] += 1
                await asyncio.sleep(0.5)
    finally:
        store.close()
    for client in clients:
        outcome.how.update(getattr(client, "how", ()))
    return outcome


def busiest(hosts: Cluster) -> tuple[int, Host]:
    """Wait until a second host could take over. Return the largest number of sessions at a host, and that host."""
    until(lambda: sum(host.is_ready() for host in hosts.hosts) >= 2)
    return max(((host.num_sessions(), host) for host in hosts.hosts if host.is_ready()), key=lambda found: found[0])


def kill(hosts: Cluster, host: Host) -> None:
    """Kill a host, report its death as a supervisor would, and start it again without waiting."""
    host.kill()
    hosts.unregister(host)
    host.start()


def hang(_: Cluster, host: Host) -> None:
    """Stop a host until all others count it as dead, then continue it."""
    host.send(signal.SIGSTOP)
    time.sleep(HOST_TTL_S * 2)
    host.send(signal.SIGCONT)


def cut_off(hosts: Cluster, host: Host, after_s: float) -> None:
    """Make a host hand its sessions over, kill it in the middle of this, and start it again."""
    host.send(signal.SIGTERM)
    time.sleep(after_s)
    kill(hosts, host)


def check_stored(store: SessionStore, caller: Caller) -> None:
    """Raise AssertionError unless the store has exactly the items of the caller's events, in order.

    The next host must not need any words to be sent again, either.
    """
    row = store.get(caller.session_id)
    assert row
    stored = [item["id"] for item in json.loads(row.snapshot)["items"]]
    reported = list(caller.view.items)
    assert stored == reported, (caller.number, stored[-4:], reported[-4:], caller.latest())
    about = json.loads(row.snapshot)["continued"] | {"journal": None}
    assert row.received.events >= caller.num_spoken, (caller.number, caller.num_spoken, caller.num_sent, about)


def run(
    kind: str,
    kills: int,
    hangs: int,
    num_callers: int,
    seed: int,
    handovers: int = 0,
    num_listeners: int = 0,
    num_speakers: int = 0,
    num_watchers: int = 0,
    num_askers: int = 0,
    *,
    native: bool = False,
) -> Outcome:
    """Start a door and three hosts that share a store of this kind. Run the rounds, then stop all of them."""
    flags = ("--host-ttl-s", str(HOST_TTL_S), "--sessions-per-key", "200", "--max-sessions", "200")
    with store_url(kind) as state, cluster(state, *flags, pace_s=PACE_S, voices="one", native=native) as hosts:
        door = hosts.add_door()
        door.wait()
        urls = [host.ws for host in hosts.hosts]
        callers: list[Caller] = [
            ResumingCaller(n, urls, seed + n) if n % 2 else StockCaller(n, [door.ws], seed + n)
            for n in range(num_callers)
        ]
        try:
            clients: list[TurnTaker] = [
                *callers,
                *(Listener(n, [door.ws], seed + n, vllm=bool(n % 2), lengths=LENGTHS) for n in range(num_listeners)),
                *(Speaker(door.ws) for _ in range(num_speakers)),
                *((OwnWatcher if n % 3 == 2 else Watcher)(n, door.ws, seed + n) for n in range(num_watchers)),
                *(Asker(n, door.ws, seed + n) for n in range(0 if native else num_askers)),
            ]
            return asyncio.run(rounds(hosts, clients, kills, hangs, seed, handovers))
        except BaseException:
            for process in [*hosts.hosts, *hosts.doors]:
                print(f"--- {process.name}\n{process.log[-4000:]}")
            raise


def main() -> None:
    """Run the rounds of the command line, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--hangs", type=int, default=20)
    parser.add_argument("--handovers", type=int, default=50)
    parser.add_argument("--callers", type=int, default=9)
    parser.add_argument("--listeners", type=int, default=4)
    parser.add_argument("--speakers", type=int, default=2)
    parser.add_argument("--watchers", type=int, default=3)
    parser.add_argument("--askers", type=int, default=2)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--store", choices=("sqlite", *SERVERS), default="redis")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = run(
        args.store,
        args.kills,
        args.hangs,
        args.callers,
        args.seed,
        args.handovers,
        args.listeners,
        args.speakers,
        args.watchers,
        args.askers,
        native=args.native,
    )
    print(f"{dict(found.befell)} hit {found.num_hit} sessions; turns: {dict(found.turns)}")
    print(f"resumed: {dict(found.how)}; phases: {dict(found.phases)}")


if __name__ == "__main__":
    main()
