"""A full service. A door tries its other hosts, and then returns the last refusal. HAProxy tries other doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websockets
from websockets.exceptions import InvalidStatus

from antiphon.admission.certificate import Certificate, CertifiedKind, Objective, encode
from tests.cluster import balancer
from tests.cluster.callers import StockCaller
from tests.cluster.processes import Cluster, cluster

pytestmark = pytest.mark.server
TALK = "/v1/realtime?model=gpt-realtime"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return two hosts, each certified for one conversation, and two doors, each of which knows one of the hosts."""
    file = tmp_path_factory.mktemp("certified") / "certificate.json"
    kinds = {"conversation": CertifiedKind(1, Objective(2.0, ""), ())}
    file.write_bytes(encode(Certificate(1, "", {}, (), {}, kinds)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_HEADROOM", "true")
        with cluster("", "--certificate", str(file), "--grace-s", "0", num_hosts=2) as found:
            for host in found.hosts:
                found.add_door("--behind", host.url).wait()
            yield found


async def knock(url: str) -> Any:
    """Ask a server for a conversation. Return its WebSocket, or the response that refused it."""
    return await knock_at(url + TALK)


async def knock_at(url: str) -> Any:
    try:
        return await websockets.connect(url)
    except InvalidStatus as refused:
        return refused.response


def test_a_door_says_what_its_last_host_says_where_none_has_room(hosts: Cluster) -> None:
    door = hosts.add_door("--behind", hosts.hosts[0].url, "--behind", hosts.hosts[1].url)
    door.wait()

    async def act() -> None:
        inside = [await knock(door.ws) for _ in range(2)]
        assert all(not hasattr(one, "status_code") for one in inside)
        refused = await knock(door.ws)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert json.loads(refused.body)["error"]["code"] == "rate_limit_exceeded"
        for one in inside:
            await one.close()
        await freed(hosts)

    asyncio.run(act())


def test_a_door_finds_the_host_with_the_session_that_a_sideband_names(hosts: Cluster) -> None:
    """Whichever host it asks first: each of them has one of the sessions. A sideband needs no place."""
    door = hosts.add_door("--behind", hosts.hosts[0].url, "--behind", hosts.hosts[1].url)
    door.wait()

    async def act() -> None:
        inside = [await knock(host.ws) for host in hosts.hosts]
        for one in inside:
            id = json.loads(await one.recv())["session"]["id"]
            async with websockets.connect(f"{door.ws}/v1/realtime?call_id={id}") as program:
                assert json.loads(await program.recv())["session"]["id"] == id
        refused = await knock_at(f"{door.ws}/v1/realtime?call_id=sess-unknown")
        assert refused.status_code == 404
        for one in inside:
            await one.close()
        await freed(hosts)

    asyncio.run(act())


async def freed(hosts: Cluster) -> None:
    """Wait until no host has a session."""
    async with asyncio.timeout(20):
        while any(host.num_sessions() for host in hosts.hosts):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.skipif(bool(balancer.missing()), reason=balancer.missing())
def test_the_haproxy_of_the_deployment_asks_another_door_where_one_is_full(hosts: Cluster) -> None:
    doors = [door.url.removeprefix("http://") for door in hosts.doors[:2]]
    front = balancer.Balancer(doors, as_deployed=True)

    async def act() -> None:
        async with httpx.AsyncClient(base_url=front.url, trust_env=False) as client:
            assert (await client.get("/metrics")).status_code == 404
            assert (await client.get("/internal/hosts")).status_code == 404
        # Four times, the free host is found through whichever door HAProxy picks.
        for _ in range(4):
            taken = await knock(hosts.doors[0].ws)
            assert not hasattr(taken, "status_code")
            caller = StockCaller(1, [front.ws], 1)
            async with caller.connected():
                await caller.converse(2)
                caller.check()
                refused = await knock(front.ws)
                assert refused.status_code == 503
            await taken.close()
            await freed(hosts)

    try:
        asyncio.run(act())
    finally:
        front.close()
