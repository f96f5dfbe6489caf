"""Connections break while callers talk, behind a load balancer that knows nothing of sessions.

    python -m tests.cluster.cuts [--cuts 200] [--reloads 30] [--callers 9] [--seed 1]

Each caller resumes through HAProxy, which sends it to any of three hosts: to the session's owner, or to a host that
relays to the owner. A reload of HAProxy cuts all connections a second later.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

from tests.cluster.balancer import Balancer
from tests.cluster.callers import ResumingCaller
from tests.cluster.chaos import PACE_S, store_url
from tests.cluster.processes import cluster
from tests.cluster.taking_turns import taking_turns


async def rounds(balancer: Balancer, callers: list[ResumingCaller], cuts: int, reloads: int, seed: int) -> Counter[str]:
    """Cut callers off and reload the balancer while they talk, and check the events that they got.

    Returns the number of times that each way of resuming was used.
    """
    chance = random.Random(seed)
    async with taking_turns(callers):
        await asyncio.sleep(1.0)
        plan = ["cut"] * cuts + ["reload"] * reloads
        chance.shuffle(plan)
        for what in plan:
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            if what == "cut":
                chance.choice(callers).cut()
            else:
                balancer.reload()
        await asyncio.sleep(1.5 if reloads else 0.0)
    return Counter(how for caller in callers for how in caller.how)


def run(kind: str, cuts: int, reloads: int, num_callers: int, seed: int) -> Counter[str]:
    """Run rounds over three hosts behind HAProxy that share a store of this kind. Returns how callers were resumed."""
    flags = ("--sessions-per-key", "200", "--max-sessions", "200")
    with store_url(kind) as state, cluster(state, *flags, pace_s=PACE_S) as hosts:
        balancer = Balancer([f"{host.address}:{host.port}" for host in hosts.hosts])
        try:
            callers = [ResumingCaller(n, [balancer.ws], seed + n) for n in range(num_callers)]
            return asyncio.run(rounds(balancer, callers, cuts, reloads, seed))
        finally:
            balancer.close()


def main() -> None:
    """Run the rounds of the command line, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--reloads", type=int, default=30)
    parser.add_argument("--callers", type=int, default=9)
    parser.add_argument("--store", choices=("sqlite", "redis", "postgres"), default="redis")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    how = run(args.store, args.cuts, args.reloads, args.callers, args.seed)
    print(f"{args.cuts} cuts and {args.reloads} reloads; resumed: {dict(how)}")


if __name__ == "__main__":
    main()
