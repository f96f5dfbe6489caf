"""Video streams, responses out of band and native models go on at another host, whatever happens to the first one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from antiphon.signals import become
from tests.cluster.callers import ResumingCaller, StockCaller
from tests.cluster.chaos import HOST_TTL_S, busiest
from tests.cluster.processes import Cluster, cluster
from tests.cluster.taking_turns import taking_turns
from tests.cluster.watchers import Asker, OwnWatcher, Watcher

LIMIT_S = 180.0
FLAGS = ("--host-ttl-s", str(HOST_TTL_S))
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


async def strike(hosts: Cluster, ready: Callable[[], bool], number: signal.Signals) -> None:
    """Send a signal to the host with most sessions when `ready`. A host that hangs goes on after its TTL."""
    await become(ready, 0.005)
    num_hit, host = await asyncio.to_thread(busiest, hosts)
    assert num_hit
    host.send(number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(2 * HOST_TTL_S)
        host.send(signal.SIGCONT)
        return
    await asyncio.to_thread(host.end)
    host.start()
    await asyncio.to_thread(host.wait)


@pytest.mark.server
def test_when_hosts_are_killed_hang_and_drain_then_questions_and_requests_are_answered_once() -> None:
    async def main(hosts: Cluster, url: str) -> None:
        watcher, asker = Watcher(1, url, 1), Asker(2, url, 2)
        async with asyncio.timeout(LIMIT_S), taking_turns([watcher, asker, OwnWatcher(3, url, 3)]):
            for number in SIGNALS:
                await strike(hosts, lambda: watcher.is_answering and asker.phase == "out of band", number)

    with cluster("", *FLAGS, num_hosts=2, pace_s=0.05) as hosts:
        front = hosts.add_door()
        front.wait()
        asyncio.run(main(hosts, front.ws))


@pytest.mark.server
def test_when_hosts_are_killed_hang_and_drain_then_a_native_model_answers_each_turn() -> None:
    async def main(hosts: Cluster, url: str) -> None:
        callers = [StockCaller(1, [url], 1), ResumingCaller(2, [host.ws for host in hosts.hosts], 2)]
        async with asyncio.timeout(LIMIT_S), taking_turns(callers):
            for number, phase in zip(SIGNALS, ("answering", "speaking", "transcribing"), strict=True):
                await strike(hosts, lambda phase=phase: callers[0].phase == phase, number)  # type: ignore[misc]

    with cluster("", *FLAGS, num_hosts=2, native=True) as hosts:
        front = hosts.add_door()
        front.wait()
        asyncio.run(main(hosts, front.ws))
