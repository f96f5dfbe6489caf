"""Paths of clients whose base URL ends in a slash, at a host and at a door."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from antiphon.cluster.door import app as door
from antiphon.cluster.door.app import Door
from antiphon.cluster.door.hosts import Hosts
from antiphon.server.app import build
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.transports.paths import BasePath


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("//v1/models", "/v1/models"),
        ("/v1//audio/speech", "/v1/audio/speech"),
        ("///v1///audio/voices/a//b", "/v1/audio/voices/a//b"),
        ("/v1/models", "/v1/models"),
        # No other path becomes a known one.
        ("//internal/hosts", "//internal/hosts"),
        ("//metrics", "//metrics"),
        ("/x//v1/models", "/x//v1/models"),
        ("//ws/google.ai//x", "/ws/google.ai//x"),
        ("//v1", "//v1"),
        ("//v1x/models", "//v1x/models"),
        ("//v1/../metrics", "/v1/../metrics"),
        ("/./v1/models", "/./v1/models"),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_only_slashes_around_the_prefix_are_joined(sent: str, meant: str, kind: str) -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], *_: object) -> None:
        seen.append(scope)

    scope = {"type": kind, "path": sent, "raw_path": sent.encode()}
    asyncio.run(BasePath(app)(scope, None, None))
    assert (seen[0]["path"], seen[0]["raw_path"]) == (meant, meant.encode())
    assert scope["path"] == sent


def test_a_host_and_a_door_join_them_before_anything_else() -> None:
    host = build(ServerState(Settings(), Metrics()))
    assert host.user_middleware[0].cls is BasePath
    assert door.build(Door(Hosts((), clock=lambda: 0.0), 1.0)).user_middleware[0].cls is BasePath
