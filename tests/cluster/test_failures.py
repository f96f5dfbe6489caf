"""Failures of other things than hosts: the network, a balancer, a door, the store, one session.

Each test is a row of the table in docs/design/hosts.md, with real processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from websockets.exceptions import ConnectionClosedError

from antiphon.server.live.moving.take_up import MAX_RESTORES
from antiphon.store.sessions import open_store
from tests.cluster import balancer, cuts
from tests.cluster.callers import ResumingCaller, StockCaller
from tests.cluster.chaos import HOST_TTL_S, PACE_S
from tests.cluster.processes import cluster, until
from tests.cluster.scripted_host import DEADLY
from tests.server.clients import connect
from tests.server.live.test_ownership import SESSION, answer, last_seq, say
from tests.store.servers import RedisServer

pytestmark = pytest.mark.server
TTL = ("--host-ttl-s", str(HOST_TTL_S))
KEY = "of-all-callers"
BEARER = {"authorization": f"Bearer {KEY}"}
LIMIT_S = 60.0


@pytest.mark.skipif(bool(balancer.missing()), reason=balancer.missing())
def test_when_connections_are_cut_and_the_balancer_reloads_then_all_that_was_said_is_there_once() -> None:
    how = cuts.run("sqlite", cuts=20, reloads=2, num_callers=6, seed=3)
    assert how["relayed"] >= 3
    assert set(how) <= {"attached", "relayed"}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    if missing := RedisServer.missing():
        pytest.skip(missing)
    server = RedisServer()
    server.start()
    yield server
    server.close()


@asynccontextmanager
async def talking(callers: list[ResumingCaller]) -> AsyncIterator[None]:
    """Let callers talk during the block, and check the events that they got. A caller that fails ends the block."""
    over = False

    async def talk(caller: ResumingCaller) -> None:
        async with caller.connected():
            while not over:
                await caller.converse(1)
            caller.check()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(talk(caller))
        yield
        over = True


@pytest.mark.parametrize("hangs", [False, True])
def test_when_the_store_is_away_then_sessions_go_on_and_are_told_and_all_is_written_in_the_end(
    redis: RedisServer, hangs: bool
) -> None:
    with cluster(redis.url, *TTL, num_hosts=2, pace_s=PACE_S) as hosts:
        callers = [ResumingCaller(n, [hosts.hosts[n % 2].ws], n) for n in range(4)]

        async def main() -> None:
            async with talking(callers):
                await reached(lambda: all(caller.said for caller in callers))
                await asyncio.to_thread(redis.pause if hangs else redis.stop)
                said = [len(caller.said) for caller in callers]
                await reached(
                    lambda: all(
                        len(c.said) >= n + 2 and degraded(c)[-1:] == [True] for c, n in zip(callers, said, strict=True)
                    )
                )
                await asyncio.to_thread(redis.go_on if hangs else redis.start)
                await reached(lambda: all(degraded(caller)[-1:] == [False] for caller in callers))

        asyncio.run(main())
        # The view of every caller matches the store.
        assert all(degraded(caller) == [True, False] for caller in callers)
        # No caller had to resume.
        assert not [how for caller in callers for how in caller.how]


async def reached(true: Callable[[], object]) -> None:
    """Wait until a function returns a true value."""
    while True:
        if true():
            return
        await asyncio.sleep(0.02)


def degraded(caller: ResumingCaller) -> list[bool]:
    return [event["degraded"] for event in caller.events if event["type"] == "session.state_degraded"]


def test_when_a_door_dies_then_a_client_that_resumes_goes_on_and_the_session_of_another_ends(
    redis: RedisServer,
) -> None:
    # Seconds; enough for a client that resumes on a busy machine, and few enough to wait for the other client's end.
    with cluster(redis.url, "--grace-s", "5", num_hosts=2, pace_s=PACE_S) as hosts:
        first, second = hosts.add_door(), hosts.add_door()
        for door in (first, second):
            door.wait()
        resuming = ResumingCaller(1, [first.ws, second.ws], 1, first=first.ws)
        stock = StockCaller(2, [first.ws], 2)

        async def main() -> None:
            async with talking([resuming]):
                with pytest.raises(ConnectionClosedError):
                    async with stock.connected():
                        await stock.converse(1)
                        first.kill()
                        await asyncio.sleep(1.0)
                said = len(resuming.said)
                await reached(lambda: len(resuming.said) >= said + 2)

        asyncio.run(main())
        assert set(resuming.how) <= {"attached", "relayed"}
        assert resuming.how
        until(lambda: sum(host.num_sessions() for host in hosts.hosts) == 0)


def test_a_session_that_ends_its_hosts_is_refused_in_time_and_the_others_go_on(redis: RedisServer) -> None:
    with cluster(redis.url, *TTL, pace_s=PACE_S) as hosts:
        urls = [host.ws for host in hosts.hosts]
        store = open_store(redis.url, 3600)
        over = threading.Event()
        num_ended = 0

        def supervise() -> None:
            nonlocal num_ended
            while not over.wait(0.02):
                for host in hosts.hosts:
                    if host.popen and host.popen.poll() is not None:
                        num_ended += 1
                        host.end()
                        store.unregister(host.name)
                        host.start()

        async def resume(session_id: str, token: str, last: int) -> str | None:
            """Resume at any host. Return why it was refused for good; None if the session made a host crash."""
            for host in hosts.hosts:
                try:
                    async with connect(host.ws, f"?resume={session_id}") as wire:
                        about = {"session_id": session_id, "resume_token": token}
                        await wire.say("session.resume", **about, last_received_server_event_seq=last)
                        frame = await wire.read()
                        if frame["type"] == "error" and not frame["error"].get("retryable"):
                            return str(frame["error"]["code"])
                        if frame["type"] == "session.resumed":
                            await wire.until("never")
                except Exception:
                    await asyncio.sleep(0.05)
            return None

        async def main() -> str:
            waits = ResumingCaller(2, urls, 2)
            async with asyncio.timeout(LIMIT_S), waits.connected():
                await waits.converse(1)
                async with connect(urls[0], "?resume=1") as wire:
                    created = await wire.read()
                    await wire.say("session.update", session=SESSION)
                    assert await answer(wire, "one") == "one"
                    await say(wire, DEADLY)
                    with pytest.raises(Exception):  # noqa: B017
                        await wire.say("response.create")
                        await wire.until("never")
                code = None
                while code is None:
                    code = await resume(created["session"]["id"], created["resume_token"], last_seq(wire))
                await waits.converse(1)
                waits.check()
            return code

        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        try:
            assert asyncio.run(main()) == "restored_too_often"
        finally:
            over.set()
            supervisor.join()
            store.close()
        assert num_ended == MAX_RESTORES + 1


def test_when_more_sessions_resume_than_there_is_room_for_then_they_wait_and_none_is_lost(redis: RedisServer) -> None:
    with cluster(redis.url, *TTL, "--max-sessions", "6", num_hosts=2, pace_s=PACE_S) as hosts:
        one, two = hosts.hosts
        callers = [ResumingCaller(n, [one.ws, two.ws], n, first=(one, two)[n % 2].ws) for n in range(10)]

        async def main() -> None:
            async with talking(callers):
                await reached(lambda: all(caller.view.said("assistant") for caller in callers))
                await asyncio.to_thread(one.kill)
                await asyncio.to_thread(hosts.unregister, one)
                # The other host has room for one of the five sessions.
                await reached(lambda: sum("claimed" in caller.how for caller in callers) == 1)
                await asyncio.sleep(1.0)
                assert sum("claimed" in caller.how for caller in callers) == 1
                await asyncio.to_thread(one.start)
                await reached(lambda: all("claimed" in caller.how for caller in callers[::2]))
                said = [len(caller.said) for caller in callers]
                await reached(lambda: all(len(c.said) > n for c, n in zip(callers, said, strict=True)))

        asyncio.run(main())
