"""Hosts whose conversation model is on another server: a host is killed, then the model's server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.callers import ResumingCaller
from tests.cluster.chaos import HOST_TTL_S
from tests.cluster.processes import SCRIPTED, Host, cluster

pytestmark = pytest.mark.server
LIMIT_S = 60.0


def test_a_conversation_goes_on_when_its_host_dies_and_when_the_models_server_dies(tmp_path: Path) -> None:
    """The model counts the messages that it gets, and repeats the last one."""
    partner = Host("partner", SCRIPTED, (), tmp_path)
    partner.start()
    partner.wait()
    env = {"ANTIPHON_TEST_PARTNER": f"{partner.url}/v1#echo"}
    with cluster("", "--host-ttl-s", str(HOST_TTL_S), num_hosts=2, env=env) as hosts:
        caller = ResumingCaller(0, [host.ws for host in hosts.hosts], 1, first=hosts.hosts[0].ws)

        async def num_messages(turns: int) -> list[int]:
            """Return the number of messages that the model had for each answer of some turns."""
            caller.events.clear()
            await caller.converse(turns)
            done = [event["response"] for event in caller.events if event["type"] == "response.done"]
            return [response["usage"]["input_tokens"] for response in done]

        async def main() -> None:
            async with asyncio.timeout(LIMIT_S), caller.connected():
                first = await num_messages(2)
                hosts.hosts[0].kill()
                assert await num_messages(2) == [first[1] + 2, first[1] + 4]
                partner.kill()
                partner.start()
                await asyncio.to_thread(partner.wait)
                assert await num_messages(1) == [first[1] + 6]
                caller.check()

        asyncio.run(main())
    partner.kill()
