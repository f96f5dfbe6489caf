"""Simulates a thousand hosts: `python -m bench.simulate [--hosts 1000] [--places 64] [--parts placement,...]`.

Nothing here is measured, unless stated otherwise. Hosts make decisions with the real code (headroom, doors,
autoscaling, claims). Callers and the clock are simulated. Parts:

- placement: how evenly callers are placed, and how many are refused although there is room, by the policy that chooses
  hosts;
- scaling: a tenfold peak within half an hour, with the autoscaler;
- zone: a third of the hosts fails at once; measures the time until all sessions are back, including the work to take
  them up;
- leases: hosts that hang for up to three times the lifetime of their keys, with the real store;
- two: two real hosts behind a real door, and a simulation of the same, which validates the other parts (--seconds of
  real time).
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import machine, options, percentile, save, show
from bench.driver import CONVERSATION, Session
from bench.simulation.leases import pauses
from bench.simulation.service import KIND, Counts, Service, certificate_of

from antiphon.admission.certificate import encode
from antiphon.client.link import SessionEnded
from antiphon.cluster.autoscaling import Autoscaler, ScalingRules

PARTS = ("placement", "scaling", "zone", "leases", "two")
TALK_S = 300.0
# For two real hosts: places of each host, callers per second, and mean seconds that a caller stays.
TWO_PLACES, TWO_RATE, TWO_TALK_S, TWO_WARM_S = 6, 5.0, 2.4, 10.0


def summary(counts: Counts) -> dict[str, Any]:
    """Return the counts in the form for a table and a file."""
    late = [spread for *_, spread in counts.trace[len(counts.trace) // 2 :]]
    return {
        "callers": counts.came,
        "refused at first, %": round(100 * counts.refused_once / max(1, counts.came), 3),
        "turned away, %": round(100 * counts.turned_away / max(1, counts.came), 3),
        "most load of a host": round(counts.most_load, 3),
        "spread of loads": round(sum(late) / max(1, len(late)), 4),
    }


def placement(hosts: int, places: int) -> dict[str, Any]:
    """Simulate a service at a load of 0.9, by policy and by the number of hosts that are asked before a refusal."""
    out = {}
    rate = 0.9 * hosts * places / TALK_S
    for policy, tries in (("random", 1), ("random", 3), ("two", 1), ("two", 3), ("least", 1), ("doors", 3)):
        # Doors are slow to simulate, because they sort all hosts for each caller.
        few = max(20, hosts // 10) if policy == "doors" else hosts
        service = Service(few, places, lambda _, r=rate * few / hosts: r, policy=policy, tries=tries, talk_s=TALK_S)
        out[f"{policy}, {tries} asked"] = {"hosts": few, **summary(service.run(5 * TALK_S))}
    return out


def peak(low: float, high: float, begins_s: float, rises_s: float, stays_s: float) -> Callable[[float], float]:
    """Return a rate of callers over time: it rises tenfold, stays high, and falls as quickly."""

    def rate(at_s: float) -> float:
        up = min(1.0, max(0.0, (at_s - begins_s) / rises_s))
        down = min(1.0, max(0.0, (at_s - begins_s - rises_s - stays_s) / rises_s))
        return low + (high - low) * (up - down)

    return rate


def scaling(hosts: int, places: int) -> dict[str, Any]:
    """Simulate a tenfold peak. Counts hosts, refused callers, and changes of direction in the number of hosts."""
    high = 0.75 * hosts * places / TALK_S
    rate = peak(high / 10, high, 1200.0, 1800.0, 1800.0)
    out = {}
    for start_s in (30.0, 90.0):
        for spare in (1, max(2, hosts // 20)):
            rules = ScalingRules(fewest=max(1, hosts // 20), most=2 * hosts, spare=spare, after_s=60.0)
            service = Service(
                max(2, hosts // 7), places, rate, policy="two", talk_s=TALK_S, start_s=start_s,
                scaler=Autoscaler(rules), most_rate=high, prefill_s=0.1,
            )  # fmt: skip
            counts = service.run(2.5 * 3600)
            num = [hosts_now for _, hosts_now, *_ in counts.trace]
            out[f"start {start_s:.0f} s, {spare} spare"] = {
                **summary(counts),
                "hosts, least and most": [min(num), max(num)],
                "started": counts.ups,
                "stopped": counts.downs,
                "changes of direction": counts.reversals,
                "moved, away p95 s": round(percentile(counts.away_s, 95), 2),
                "lost": counts.lost,
            }
    return out


def zone(hosts: int, places: int) -> dict[str, Any]:
    """Simulate the loss of a third of the hosts, at two loads.

    Each session that is taken up costs its new host work.
    """
    out = {}
    for load in (0.6, 0.7):
        for prefill_s in (0.1, 0.64):
            rate = load * hosts * places / TALK_S
            service = Service(
                hosts, places, lambda _, r=rate: r, policy="two", talk_s=TALK_S, prefill_s=prefill_s,
                scaler=Autoscaler(ScalingRules(fewest=hosts, most=2 * hosts)),
            )  # fmt: skip
            service.run(4 * TALK_S)
            gone = service.lose_zone(0, 5.0)
            counts = service.run(5 * TALK_S)
            out[f"load {load:g}, {prefill_s:g} s each"] = {
                "sessions cut": gone,
                "back, p50 s": round(percentile(counts.away_s, 50), 2),
                "back, p95 s": round(percentile(counts.away_s, 95), 2),
                "back, all s": round(max(counts.away_s), 2),
                "lost": counts.lost,
                "most load of a host": round(counts.most_load, 3),
            }
    return out


def leases(hosts: int) -> dict[str, Any]:
    """Simulate hosts that hang, with the real session store."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(pauses(Path(folder), min(20, hosts), 200, 300.0, 1))


async def callers(url: str, seconds: float) -> dict[str, Any]:
    """Run real callers of a door, who arrive at random like the simulated ones. Each stays for a time, and leaves."""
    drawn, came, refused, held = random.Random(3), 0, 0, list[int]()
    inside = 0
    tasks = list[asyncio.Task[None]]()
    begun = time.monotonic()

    async def call(stays_s: float, counts: bool) -> None:
        nonlocal came, refused, inside
        came += counts
        try:
            async with Session(url, CONVERSATION):
                inside += 1
                await asyncio.sleep(stays_s)
                inside -= 1
        except SessionEnded as error:
            if error.retry_after_s is None:
                raise
            refused += counts

    due_s = begun
    while due_s < begun + TWO_WARM_S + seconds:
        due_s += drawn.expovariate(TWO_RATE)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        counts = due_s > begun + TWO_WARM_S
        if counts:
            held.append(inside)
        # Errors of callers are raised by the caller's task, below.
        tasks.append(asyncio.create_task(call(drawn.expovariate(1 / TWO_TALK_S), counts)))
    await asyncio.gather(*tasks)
    return {
        "callers": came,
        "refused, %": round(100 * refused / came, 2),
        "held, mean": round(sum(held) / len(held), 2),
    }


def two(seconds: float) -> dict[str, Any]:
    """Compare two hosts behind a door, both with certificates, with their simulation and with Erlang's formula."""
    from tests.cluster.processes import cluster

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "certificate.json"
        file.write_bytes(encode(certificate_of(TWO_PLACES)))
        flags = ("--certificate", str(file), "--grace-s", "0")
        with cluster("", *flags, num_hosts=2) as hosts:
            door = hosts.add_door()
            door.wait()
            real = asyncio.run(callers(door.ws, seconds))
    service = Service(
        2, TWO_PLACES, lambda _: TWO_RATE, policy="doors", tries=2, talk_s=TWO_TALK_S, comes_again=0, num_doors=1
    )
    counts = service.run(20_000.0)
    held = [num for _, _, num, *_ in counts.trace]
    offered, blocked = TWO_RATE * TWO_TALK_S, 1.0
    for places in range(1, 2 * TWO_PLACES + 1):
        blocked = offered * blocked / (places + offered * blocked)
    simulated = {
        "callers": counts.came,
        "refused, %": round(100 * counts.turned_away / counts.came, 2),
        "held, mean": round(sum(held) / len(held), 2),
    }
    formula = {"refused, %": round(100 * blocked, 2), "held, mean": round(offered * (1 - blocked), 2)}
    apart = {
        name: round(100 * (simulated[name] / real[name] - 1), 1) if real[name] else math.nan
        for name in ("refused, %", "held, mean")
    }
    return {"measured": real, "simulated": simulated, "by Erlang's formula": formula, "simulated is off by, %": apart}


def main() -> None:
    parser = options("python -m bench.simulate", __doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--places", type=int, default=64, help="certified conversations of a host")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds with the two real hosts")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "placement": lambda: placement(args.hosts, args.places),
        "scaling": lambda: scaling(args.hosts, args.places),
        "zone": lambda: zone(args.hosts, args.places),
        "leases": lambda: {f"{min(20, args.hosts)} hosts, 200 sessions": leases(args.hosts)},
        "two": lambda: two(args.seconds),
    }
    found: dict[str, Any] = {}
    for name in args.parts.split(","):
        found[name] = parts[name]()
        show(f"{name} (simulated)", found[name])
    facts = {"kind": KIND, "hosts": args.hosts, "places": args.places, "talk_s": TALK_S}
    print(f"\nwritten: {save('simulation', {'machine': machine(), 'SIMULATION': facts, **found})}")


if __name__ == "__main__":
    main()
