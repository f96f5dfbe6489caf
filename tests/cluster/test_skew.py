"""Two hosts of one store on different machines: with clocks that are far apart, and with a full disk on one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.attack.doors import as_key
from tests.cluster.chaos import SERVERS, store_url
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.server.clients import Wire, connect
from tests.server.live.test_ownership import SESSION, answer, last_seq

pytestmark = pytest.mark.server
HOUR_S = 3600.0
KEY = "of-all"
# Rows expire before the clocks' difference has passed, so a host that compared the clocks would find no rows.
SHORT = ("--host-ttl-s", "1.5", "--state-hours", "0.25")


@contextmanager
def skewed(kind: str) -> Iterator[Cluster]:
    """Run two hosts that share a store of this kind: one clock is an hour ahead, the other an hour behind."""
    if missing := SERVERS[kind].missing():
        pytest.skip(missing)
    with store_url(kind) as state, cluster(state, *SHORT, num_hosts=0, api_key=KEY) as hosts:
        for skew_s in (HOUR_S, -HOUR_S):
            hosts.add_host(skew_s=skew_s)
        for host in hosts.hosts:
            host.wait()
        yield hosts


async def resumed(host: Host, about: dict[str, Any]) -> tuple[Any, Wire, dict[str, Any]]:
    """Resume at a host. Return the connection's context, the connection, and the first frame."""
    context = connect(host.ws, f"?resume={about['session_id']}", additional_headers=as_key(KEY))
    wire = await context.__aenter__()
    await wire.say("session.resume", **about)
    return context, wire, await wire.read()


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SERVERS)
def test_when_the_clocks_of_two_hosts_are_two_hours_apart_then_leases_claims_and_tokens_hold(kind: str) -> None:
    async def main(hosts: Cluster) -> None:
        ahead, behind = hosts.hosts
        async with connect(ahead.ws, "?resume=1", additional_headers=as_key(KEY)) as wire:
            created = await wire.read()
            await wire.say("session.update", session=SESSION)
            assert await answer(wire, "one") == "one"
            about = {
                "session_id": created["session"]["id"],
                "resume_token": created["resume_token"],
                "last_received_server_event_seq": last_seq(wire),
            }
        for owner, next_host in ((ahead, behind), (behind, ahead)):
            # Longer than a host's key lives. The key was renewed, and is valid by the other host's clock, too.
            await asyncio.sleep(2.0)
            context, wire, frame = await resumed(next_host, about)
            assert frame["how"] == "relayed", frame
            assert await answer(wire, "two") == "two"
            about |= {"resume_token": frame["resume_token"], "last_received_server_event_seq": last_seq(wire)}
            await context.__aexit__(None, None, None)
            # No supervisor reports the host's death, so its key has to expire.
            await asyncio.to_thread(owner.kill)
            context, wire, frame = await resumed(next_host, about)
            assert frame["how"] == "claimed", frame
            assert await answer(wire, "three") == "three"
            about |= {"resume_token": frame["resume_token"], "last_received_server_event_seq": last_seq(wire)}
            await context.__aexit__(None, None, None)
            await asyncio.to_thread(owner.start)
            await asyncio.to_thread(owner.wait)

    with skewed(kind) as hosts:
        asyncio.run(main(hosts))


def test_when_the_clock_of_a_host_is_off_then_its_client_secrets_hold_as_long_as_they_say() -> None:
    async def opened(host: Host, secret: str) -> bool:
        async with connect(host.ws, additional_headers=as_key(secret)) as wire:
            return bool((await wire.read())["type"] == "session.created")

    with skewed("redis") as hosts:
        for host, skew_s in zip(hosts.hosts, (HOUR_S, -HOUR_S), strict=True):
            asked = {"expires_after": {"seconds": 600}, "session": {"type": "realtime"}}
            made = httpx.post(f"{host.url}/v1/realtime/client_secrets", json=asked, headers=as_key(KEY)).json()
            assert asyncio.run(opened(host, made["value"]))
            # The client has the host's clock, as a client on that machine would.
            assert abs(made["expires_at"] - (time.time() + skew_s + 600)) < 60


def test_when_the_disk_of_one_host_of_two_is_full_then_its_clients_are_told_and_the_others_notice_nothing() -> None:
    """One host may write only 400 kB to a file, as on a full disk. This affects its part of the store, and its log."""

    async def main(hosts: Cluster) -> None:
        full, free = hosts.hosts
        async with connect(full.ws, "?resume=1") as wire, connect(free.ws, "?resume=1") as other:
            for each in (wire, other):
                await each.read()
                await each.say("session.update", session=SESSION)
                assert await answer(each, "one") == "one"
            # Small items that are more than the host may write.
            for n in range(40):
                content = [{"type": "input_text", "text": f"{n}" * 20_000}]
                item = {"type": "message", "role": "user", "content": content}
                await wire.say("conversation.item.create", item=item)
            degraded = await wire.until("session.state_degraded")
            assert degraded["degraded"] is True
            assert await answer(wire, "two") == "two"
            # A new session on that host works as well.
            async with connect(full.ws, "?resume=1") as third:
                await third.read()
                await third.say("session.update", session=SESSION)
                assert await answer(third, "three") == "three"
            assert await answer(other, "two") == "two"
            assert not [frame for frame in other.seen if frame["type"] == "session.state_degraded"]
            until(lambda: full.metric("antiphon_state_degraded") == 1)
            assert free.metric("antiphon_state_degraded") == 0
            assert full.is_ready()

    with cluster("", num_hosts=0) as hosts:
        hosts.add_host(prefix=("prlimit", "--fsize=400000"))
        hosts.add_host()
        for host in hosts.hosts:
            host.wait()
        asyncio.run(main(hosts))
