"""Links that fail between hosts, and between a host and the store. Each host is in a network namespace of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from antiphon.store.sessions import SessionStore, open_store
from tests.cluster import networks
from tests.cluster.callers import ResumingCaller
from tests.cluster.chaos import HOST_TTL_S, PACE_S, check_stored
from tests.cluster.networks import Network, network
from tests.cluster.processes import Cluster, Host, cluster
from tests.cluster.test_failures import LIMIT_S, TTL, reached, talking
from tests.server.clients import Wire, connect
from tests.server.live.test_ownership import SESSION, answer, last_seq
from tests.store.servers import RedisServer

pytestmark = pytest.mark.server
KEY = "of-all-callers"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def net() -> Iterator[Network]:
    if reason := networks.missing() or RedisServer.missing():
        pytest.skip(reason)
    with network() as found:
        yield found


@contextmanager
def apart(net: Network, num_hosts: int) -> Iterator[tuple[Cluster, SessionStore]]:
    """Return hosts in separate namespaces, and the address of the store that they share."""
    redis = RedisServer(net.store)
    redis.start()
    store = open_store(redis.url, 3600)
    try:
        with cluster(redis.url, *TTL, num_hosts=0, pace_s=PACE_S, api_key=KEY) as hosts:
            for _ in range(num_hosts):
                prefix, address = net.add()
                hosts.add_host(prefix=prefix, address=address)
            for host in hosts.hosts:
                host.wait()
            yield hosts, store
    finally:
        store.close()
        redis.close()


@contextmanager
def raises_closed(code: int) -> Iterator[None]:
    with pytest.raises(ConnectionClosed) as closed:
        yield
    assert closed.value.rcvd
    assert closed.value.rcvd.code == code


async def begin(wire: Wire) -> dict[str, Any]:
    """Take one turn, and return the message that resumes the session."""
    created = await wire.read()
    await wire.say("session.update", session=SESSION)
    assert await answer(wire, "one") == "one"
    about = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
    return about | {"last_received_server_event_seq": last_seq(wire)}


async def resume(host: Host, wire: Wire, request: dict[str, Any]) -> dict[str, Any]:
    """Resume a session at a host, and return the host's first frame."""
    await wire.say("session.resume", **request)
    return await wire.read()


def test_when_a_host_is_lost_with_its_link_then_its_callers_go_on_elsewhere_and_it_overrules_nobody(
    net: Network,
) -> None:
    with apart(net, 3) as (hosts, store):
        urls = [host.ws for host in hosts.hosts]
        lost = hosts.hosts[0]
        callers = [ResumingCaller(n, urls, n, KEY, first=lost.ws) for n in range(4)]

        async def main() -> None:
            async with talking(callers):
                await reached(lambda: all(caller.view.said("assistant") for caller in callers))
                net.set_link(lost.address, "down")
                await reached(lambda: all("claimed" in caller.how for caller in callers))
                # The host is back. By now, other hosts own its sessions.
                net.set_link(lost.address, "up")
                said = [len(caller.said) for caller in callers]
                await reached(lambda: all(len(c.said) >= n + 2 for c, n in zip(callers, said, strict=True)))

        asyncio.run(main())
        for caller in callers:
            check_stored(store, caller)


@pytest.mark.heavy
def test_when_a_host_is_cut_off_from_the_store_then_its_client_goes_on_until_another_has_the_session(
    net: Network,
) -> None:
    with apart(net, 2) as (hosts, store):
        one, two = hosts.hosts

        async def main() -> None:
            async with asyncio.timeout(LIMIT_S), connect(one.ws, "?resume=1", additional_headers=BEARER) as wire:
                request = await begin(wire)
                net.cut(one.address, net.store)
                assert await answer(wire, "unsaved") == "unsaved"
                assert [f["degraded"] for f in wire.seen if f["type"] == "session.state_degraded"] == [True]
                query = f"?resume={request['session_id']}"
                async with connect(two.ws, query, additional_headers=BEARER) as again:
                    await reached(lambda: [h.name.split("/")[0] for h in store.hosts()] == [two.name])
                    resumed = await resume(two, again, request)
                    assert (resumed["how"], resumed["num_items"]) == ("claimed", 2)
                    assert await answer(again, "two") == "two"
                    # By now, both hosts have answered. The first host's answer is in no store.
                    assert await answer(wire, "lost") == "lost"
                    net.mend(one.address, net.store)
                    # Nothing is sent to the host any more, so it has to detect the failure by itself.
                    await wire.until("session.replaced")
                    with raises_closed(1000):
                        await wire.read()
                    assert await answer(again, "three") == "three"
                row = store.get(str(request["session_id"]))
                assert row
                assert row.fence == 2
                texts = [part["text"] for item in json.loads(row.snapshot)["items"] for part in item["parts"]]
                assert texts == ["one", "one", "two", "two", "three", "three"]

        asyncio.run(main())


@pytest.mark.heavy
def test_when_hosts_cannot_reach_each_other_then_a_session_stays_with_the_one_that_lives(net: Network) -> None:
    with apart(net, 2) as (hosts, store):
        one, two = hosts.hosts
        net.cut(two.address, one.address)

        async def main() -> None:
            async with asyncio.timeout(LIMIT_S), connect(one.ws, "?resume=1", additional_headers=BEARER) as wire:
                request = await begin(wire)
                query = f"?resume={request['session_id']}"
                began_s = asyncio.get_running_loop().time()
                async with connect(two.ws, query, additional_headers=BEARER) as again:
                    refused = await resume(two, again, request)
                    assert refused["error"]["code"] == "session_elsewhere"
                    assert refused["error"]["retryable"]
                assert asyncio.get_running_loop().time() - began_s >= HOST_TTL_S
                assert await answer(wire, "two") == "two"
                # The link works again, so the client is relayed.
                net.mend(two.address, one.address)
                async with connect(two.ws, query, additional_headers=BEARER) as again:
                    resumed = await resume(two, again, request)
                    assert resumed["how"] == "relayed"
                    assert (await again.until("response.done"))["response"]["output"]
                row = store.get(str(request["session_id"]))
                assert row
                assert row.fence == 1

        asyncio.run(main())
