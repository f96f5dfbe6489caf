"""Sessions of every kind that outlives its host are open at once behind a door, while all hosts are replaced, and while
the store is away at the moment at which a host dies.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.callers import ResumingCaller, StockCaller
from tests.cluster.chaos import HOST_TTL_S, busiest
from tests.cluster.listeners import Listener
from tests.cluster.own_callers import OwnCaller, RtcCaller
from tests.cluster.processes import Cluster, cluster
from tests.cluster.speakers import RestSpeaker, Speaker
from tests.cluster.taking_turns import TurnTaker, taking_turns
from tests.cluster.watchers import Asker, OwnWatcher, Watcher
from tests.store.servers import RedisServer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.server,
    pytest.mark.skipif(bool(RedisServer.missing()), reason=RedisServer.missing()),
]
FLAGS = ("--host-ttl-s", str(HOST_TTL_S), "--max-sessions", "50", "--sessions-per-key", "50")
LIMIT_S, PACE_S = 240.0, 0.05
# Seconds for which the store is away. A write to it ends after a second.
AWAY_S = 0.8
# The kinds of `kinds.py`, each with its client. Only a native model needs hosts of its own.
CLIENTS: dict[str, Callable[[Cluster], TurnTaker]] = {
    "conversation, full duplex": lambda hosts: OwnCaller(hosts.doors[0].url, 1),
    "WebRTC call, behind a door": lambda hosts: RtcCaller(hosts.doors[0]),
    "transcription, OpenAI's dialect": lambda hosts: Listener(3, [hosts.doors[0].ws], 3),
    "transcription, vLLM's dialect": lambda hosts: Listener(4, [hosts.doors[0].ws], 4, vllm=True),
    "speech stream": lambda hosts: Speaker(hosts.doors[0].ws),
    "speech over REST, behind a door": lambda hosts: RestSpeaker(hosts.doors[0].url),
    "response out of band": lambda hosts: Asker(7, hosts.doors[0].ws, 7),
    "video stream": lambda hosts: Watcher(8, hosts.doors[0].ws, 8),
}


def clients_of(hosts: Cluster, *, native: bool) -> list[TurnTaker]:
    """Return a client of each kind, and callers and a watcher that resume by themselves."""
    door, urls = hosts.doors[0].ws, [host.ws for host in hosts.hosts]
    common: list[TurnTaker] = [StockCaller(11, [door], 11), ResumingCaller(12, urls, 12)]
    return common if native else [*common, OwnWatcher(13, door, 13), *(make(hosts) for make in CLIENTS.values())]


@contextmanager
def two_hosts(state: str, *, native: bool) -> Iterator[Cluster]:
    with cluster(state, *FLAGS, num_hosts=2, pace_s=PACE_S, voices="one", native=native) as hosts:
        hosts.add_door().wait()
        try:
            yield hosts
        except BaseException:
            for process in [*hosts.hosts, *hosts.doors]:
                print(f"--- {process.name}\n{process.log[-4000:]}")
            raise


@pytest.mark.parametrize("native", [False, True], ids=["cascade", "native"])
def test_when_each_host_is_replaced_in_turn_then_sessions_of_every_kind_go_on(native: bool) -> None:
    async def main(hosts: Cluster) -> None:
        async with asyncio.timeout(LIMIT_S), taking_turns(clients_of(hosts, native=native)) as go_on:
            for host in hosts.hosts:
                await go_on()
                host.send(signal.SIGTERM)
                assert await asyncio.to_thread(host.end) == 0
                host.start()
                await asyncio.to_thread(host.wait)
            await go_on()

    with two_hosts("", native=native) as hosts:
        asyncio.run(main(hosts))


@pytest.mark.parametrize("native", [False, True], ids=["cascade", "native"])
def test_when_the_store_is_away_while_a_host_dies_then_nothing_is_lost(native: bool) -> None:
    redis = RedisServer()

    async def main(hosts: Cluster) -> None:
        async with asyncio.timeout(LIMIT_S), taking_turns(clients_of(hosts, native=native)) as go_on:
            await go_on()
            num_hit, host = await asyncio.to_thread(busiest, hosts)
            assert num_hit
            await asyncio.to_thread(redis.pause)
            host.kill()
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(redis.go_on)
            await asyncio.to_thread(hosts.unregister, host)
            host.start()
            await go_on()

    redis.start()
    try:
        with two_hosts(redis.url, native=native) as hosts:
            asyncio.run(main(hosts))
    finally:
        redis.close()
