"""Hosts are added and removed without Ray, behind doors and Debian's HAProxy, which uses the deployment's file.

The callers cannot resume. `tests/ray_serve` does the same on Ray.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.cluster import balancer
from tests.cluster.callers import StockCaller
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.store.servers import RedisServer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(bool(balancer.missing()), reason=balancer.missing()),
    pytest.mark.skipif(bool(RedisServer.missing()), reason=RedisServer.missing()),
]
# PACE_S: seconds per word, so that answers are generated in real time. STORY: number of words in a story.
NUM_CALLERS, LIMIT_S, PACE_S, STORY = 4, 120.0, 0.3, 28
# Seconds from an answer to the caller's next question.
THINKS_S = 0.3


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    """Two hosts, and two doors that find them in the store."""
    redis = RedisServer()
    redis.start()
    try:
        with cluster(redis.url, "--drain-s", "30", "--sessions-per-key", "100", num_hosts=2, pace_s=PACE_S) as found:
            for _ in range(2):
                found.add_door()
            for door in found.doors:
                door.wait()
            yield found
    finally:
        redis.close()


@asynccontextmanager
async def talking(url: str) -> AsyncIterator[Callable[[], object]]:
    """Let callers talk during the block. None of them may miss an event or be cut off.

    Yields a function that waits until each caller has been answered twice more.
    """
    callers = [StockCaller(n, [url], n) for n in range(NUM_CALLERS)]
    over = False

    async def talk(caller: StockCaller) -> None:
        async with caller.connected():
            while not over:
                await caller.converse(1, num_words=1)
                await asyncio.sleep(THINKS_S)
            caller.check()

    async def go_on() -> None:
        said = [len(caller.said) for caller in callers]
        while not all(len(c.said) >= n + 2 for c, n in zip(callers, said, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(talk(caller))
        await go_on()
        yield go_on
        over = True


def drain(host: Host) -> None:
    """Make a host hand its sessions over, and end."""
    host.send(signal.SIGTERM)
    assert host.end() == 0


def test_hosts_are_added_taken_away_replaced_and_killed_and_a_stock_client_misses_nothing(hosts: Cluster) -> None:
    front = balancer.Balancer([door.url.removeprefix("http://") for door in hosts.doors], as_deployed=True)
    first, second = hosts.hosts

    async def act() -> None:
        async with talking(front.ws) as go_on:
            # Adds a host, which gets callers after the doors have found it.
            third = await asyncio.to_thread(hosts.add_host)
            await asyncio.to_thread(third.wait)
            async with AsyncExitStack() as connected:
                number = NUM_CALLERS
                while not await asyncio.to_thread(third.num_sessions):
                    listener = StockCaller(number, [front.ws], number)
                    await connected.enter_async_context(listener.connected())
                    await listener.converse(1, num_words=1)
                    number += 1
                before = len(listener.view.heard_at_s)
                story = asyncio.create_task(listener.converse(1, num_words=STORY))
                while len(listener.view.heard_at_s) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                # Removes that host. Its callers are at other hosts, and have heard a long answer to its end.
                await asyncio.to_thread(drain, third)
                await story
                await listener.converse(1)
                assert set(listener.view.responses.values()) == {"completed"}
                listener.check()
            await go_on()
            # Both doors are replaced, one after the other. Meanwhile HAProxy reloads its file.
            for host in (first, second):
                await asyncio.to_thread(drain, host)
                before = front.workers()
                front.reload()
                await asyncio.to_thread(until, lambda before=before: front.workers() - before)
                late = StockCaller(99, [front.ws], 99)
                async with late.connected():
                    await late.converse(1)
                    late.check()
                host.start()
                await asyncio.to_thread(host.wait)
                await go_on()
            # Kills a host, which its supervisor reports.
            await asyncio.to_thread(first.kill)
            await asyncio.to_thread(hosts.unregister, first)
            await go_on()
            assert await asyncio.to_thread(second.num_sessions) == NUM_CALLERS

    try:
        asyncio.run(act())
    finally:
        front.close()
