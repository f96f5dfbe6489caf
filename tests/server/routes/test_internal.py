"""The paths for operators: they accept only the internal key, and list hosts, mark them dead and drain them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from antiphon.cluster.door.app import Door, build
from antiphon.cluster.door.hosts import Hosts
from antiphon.server.state import ServerState
from antiphon.server.watches import as_host
from antiphon.settings import Settings
from antiphon.store.sessions import Host, SessionStore, open_store
from tests.cluster.processes import INTERNAL_KEY, cluster, until
from tests.server.clients import connect
from tests.server.scripted import serving

REQUESTS = [("POST", "/internal/drain"), ("GET", "/internal/hosts"), ("DELETE", "/internal/hosts/other")]


def settings(key: str = INTERNAL_KEY) -> Settings:
    found = Settings()
    server = replace(found.server, api_keys=("of-a-client",))
    return replace(found, server=server, cluster=replace(found.cluster, internal_key=key))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[str, ServerState, SessionStore]]:
    """Yield a host with an internal key, and with another host in its store."""
    with serving(settings()) as (ws, state, _):
        state.sessions.store = store = open_store(str(tmp_path), 3600, 1000.0)
        store.renew(as_host(state))
        store.renew(Host("other/1", "http://127.0.0.1:9", 0.25))
        yield ws.replace("ws", "http", 1), state, store
        store.close()


def ask(url: str, method: str, path: str, key: str = INTERNAL_KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, f"{url}{path}", headers=headers, trust_env=False)


@pytest.mark.parametrize(("method", "path"), REQUESTS)
@pytest.mark.parametrize("key", ["", "forged", "of-a-client", INTERNAL_KEY[:-1]])
def test_when_a_key_is_not_the_internal_one_then_nothing_is_done(
    host: tuple[str, ServerState, SessionStore], method: str, path: str, key: str
) -> None:
    url, state, store = host
    refused = ask(url, method, path, key)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert not state.admission.draining
    assert {h.name.split("/")[0] for h in store.hosts()} == {"other", state.sessions.host_name.split("/")[0]}


def test_the_internal_key_opens_nothing_else(host: tuple[str, ServerState, SessionStore]) -> None:
    assert ask(host[0], "GET", "/v1/models").status_code == 401


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_when_no_internal_key_is_set_then_there_are_no_such_paths(method: str, path: str) -> None:
    with serving(settings("")) as (ws, _, _):
        assert ask(ws.replace("ws", "http", 1), method, path, "").status_code == 404


def test_hosts_are_listed_and_buried_by_name(host: tuple[str, ServerState, SessionStore]) -> None:
    url, state, store = host
    listed = ask(url, "GET", "/internal/hosts").json()["data"]
    assert listed[0] == {"name": "other/1", "address": "http://127.0.0.1:9", "load": 0.25, "draining": False}
    assert ask(url, "DELETE", "/internal/hosts/other").json() == {"name": "other", "was_alive": True}
    assert [h.name for h in store.hosts()] == [state.sessions.host_name]
    assert ask(url, "DELETE", "/internal/hosts/other/1").json() == {"name": "other/1", "was_alive": False}


def test_when_there_is_no_store_then_there_are_no_hosts() -> None:
    with serving(settings()) as (ws, _, _):
        assert ask(ws.replace("ws", "http", 1), "GET", "/internal/hosts").status_code == 404


def test_a_door_passes_none_of_them_on(host: tuple[str, ServerState, SessionStore]) -> None:
    app = build(Door(Hosts((host[0],), lambda: 0.0), 1.0))

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {INTERNAL_KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://door", headers=headers) as client:
            return [(await client.request(method, path)).status_code for method, path in REQUESTS]

    assert asyncio.run(main()) == [404, 404, 404]


@pytest.mark.server
def test_when_a_host_is_asked_to_drain_then_its_sessions_move_and_it_ends() -> None:
    with cluster("", num_hosts=2) as hosts:
        one, two = hosts.hosts
        door = hosts.add_door()
        door.wait()

        async def main() -> None:
            async with connect(door.ws, "") as wire:
                await wire.read()
                await wire.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
                await wire.until("session.updated")
                owner, other = (one, two) if one.num_sessions() else (two, one)
                assert ask(owner.url, "POST", "/internal/drain").json() == {"status": "draining", "sessions": 1}
                assert await asyncio.to_thread(owner.end) == 0
                assert "Traceback" not in owner.log
                await asyncio.to_thread(until, lambda: other.num_sessions() == 1)
                content = [{"type": "input_text", "text": "still there"}]
                item = {"type": "message", "role": "user", "content": content}
                await wire.say("conversation.item.create", item=item)
                await wire.say("response.create")
                done = await wire.until("response.done")
                assert done["response"]["output"][0]["content"][0]["text"] == "still there"

        asyncio.run(main())
