"""The response headers that a page of an allowed origin may read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from antiphon.cluster.door.app import Door
from antiphon.cluster.door.hosts import Hosts
from antiphon.server.app import build
from antiphon.server.metrics import Metrics
from antiphon.server.routes.door_calls import DoorCalls
from antiphon.server.state import ServerState
from antiphon.settings import Settings

PAGE = "https://app.example"


def server(settings: Settings) -> Starlette:
    return build(ServerState(settings, Metrics(), None))


def door(settings: Settings) -> Starlette:
    calls = DoorCalls(Door(Hosts((), lambda: 0.0), 1.0), settings.server)
    app = Starlette(routes=[*calls.routes()])
    # It has the door's telephone calls.
    app.state.antiphon = ServerState(settings, Metrics(), None)
    return app


@pytest.mark.parametrize("make", [server, door])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/realtime/calls"), ("POST", "/v1/realtime/calls/x/hangup")])
def test_a_page_may_read_where_its_call_is(make: Callable[[Settings], Starlette], method: str, path: str) -> None:
    app = make(replace(Settings(), server=replace(Settings().server, cors_origins=(PAGE,))))

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={"Origin": PAGE}, content=b"no offer")

    headers = asyncio.run(main()).headers
    assert headers["access-control-allow-origin"] == PAGE
    exposed = {name.strip().lower() for name in headers["access-control-expose-headers"].split(",")}
    assert {"*", "location", "retry-after", "x-request-id"} <= exposed
