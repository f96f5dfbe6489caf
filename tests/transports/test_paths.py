"""Which paths are for clients, and which spellings of a path are refused."""

from __future__ import annotations

import pytest
from starlette.routing import Route, WebSocketRoute

from antiphon.server.routes.table import ROUTES
from antiphon.transports.paths import FOR_CLIENTS, MAX_PATH_BYTES, flaw, is_for_clients
from tests.cluster.spellings import HIDDEN, SERVED, is_hidden, spelled

# Paths for operators. A new route is hidden unless its path is in FOR_CLIENTS.
OPERATORS = {
    *("/health", "/ready", "/metrics", "/start_profile", "/stop_profile"),
    *("/internal/drain", "/internal/hosts", "/internal/hosts/{name:path}"),
}


def test_the_routes_of_a_host_are_for_clients_or_for_those_who_run_it() -> None:
    paths = [route.path for route in ROUTES if isinstance(route, Route | WebSocketRoute)]
    assert {path for path in paths if not is_for_clients(path)} == OPERATORS
    assert all(any(path.startswith(given) for path in paths) for given in FOR_CLIENTS)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_hidden_path_is_refused_in_every_spelling(hidden: str) -> None:
    for name, target in spelled(hidden).items():
        path = target.split("?")[0]
        # If a spelling is accepted, every server takes it for another path, such as one with wide letters below /v1/.
        assert flaw(path) or not is_for_clients(path) or not is_hidden(target), name


@pytest.mark.parametrize("path", [target.split("?")[0] for target in SERVED.values()])
def test_what_clients_ask_for_has_no_flaw(path: str) -> None:
    assert flaw(path) == ""
    assert is_for_clients(path)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "begins with a slash"),
        ("*", "begins with a slash"),
        ("/v1/" + "x" * MAX_PATH_BYTES, "at most 4096 bytes"),
        ("/v1/%41", "Letters and digits"),
        ("/v1/%7a", "Letters and digits"),
        ("/v1/%", "a percent sign"),
        ("/v1/a#b", "percent-encoded"),
        ("/v1/a%25252525252e", "encoded once"),
        ("/v1/a%c3", "UTF-8"),
        ("/v1/a%7f", "control"),
        ("/v1/a//b", "without a name"),
        ("/v1/a/.", "segments"),
        ("/%2fv1/a", "one slash"),
        ("/v1/a\\b", "percent-encoded"),
    ],
)
def test_a_flaw_is_named(path: str, says: str) -> None:
    assert says in flaw(path)


@pytest.mark.parametrize("path", ["/v1", "/v1x", "/realtime/", "/realtimex", "/web", "/ws", "/x/v1/", "/V1/models"])
def test_what_begins_like_a_path_of_clients_is_not_one(path: str) -> None:
    assert not is_for_clients(path)
