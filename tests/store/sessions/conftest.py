"""A fixture that has each session backend in turn. Redis and Postgres start once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from antiphon.store.sessions import SessionStore
from tests.store.servers import PostgresServer, RedisServer
from tests.store.sessions.backends import BackendKit, PostgresKit, RedisKit, SqliteKit

BACKENDS = ["sqlite", *(pytest.param(name, marks=pytest.mark.server) for name in ("redis", "postgres"))]
Open = Callable[..., SessionStore]


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, BackendKit]]:
    started: dict[str, BackendKit] = {}
    yield started
    for kit in started.values():
        kit.close()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, servers: dict[str, BackendKit], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackendKit]:
    """One backend for all tests of a module. Each test uses its own sessions and hosts."""
    name = request.param
    if name == "sqlite":
        kit = SqliteKit(tmp_path_factory.mktemp("sessions"))
        yield kit
        kit.close()
        return
    if name not in servers:
        if missing := {"redis": RedisServer, "postgres": PostgresServer}[name].missing():
            pytest.skip(missing)
        servers[name] = RedisKit() if name == "redis" else PostgresKit()
    yield servers[name]


@pytest.fixture
def opened(backend: BackendKit) -> Iterator[Open]:
    """Return a function that opens stores over the backend.

    After the test, they are closed, and the backend is started.
    """
    stores: list[SessionStore] = []

    def open_one(*args: float, **options: float) -> SessionStore:
        stores.append(backend.open(*args, **options))
        return stores[-1]

    yield open_one
    backend.start()
    for store in stores:
        store.close()
