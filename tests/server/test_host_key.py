"""The entry of a host in the store: doors send no client to a host that loads, drains or has no entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.server.registry import SessionRegistry
from antiphon.server.watches import as_host


def state(load: float | None, draining: bool = False, models: str | None = "loaded") -> Any:
    admission = SimpleNamespace(load=lambda: load, draining=draining)
    return SimpleNamespace(
        sessions=SessionRegistry("host-1/a", address="http://h:1"), admission=admission, models=models
    )


@pytest.mark.parametrize(("load", "reported"), [(1.5, 1.0), (0.0, 0.0), (None, None)])
def test_a_host_tells_its_load_where_it_is_known(load: float | None, reported: float | None) -> None:
    assert as_host(state(load)).load == reported


@pytest.mark.parametrize(
    ("models", "draining", "takes_none"), [(None, False, True), ("loaded", False, False), ("loaded", True, True)]
)
def test_a_host_takes_sessions_once_it_has_loaded_and_until_it_drains(
    models: str | None, draining: bool, takes_none: bool
) -> None:
    host = as_host(state(1.5, draining, models))
    assert (host.name, host.address, host.load, host.draining) == ("host-1/a", "http://h:1", 1.0, takes_none)
