"""Rows that are written to Redis as patches of an earlier row: small, and never of another row than their base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import RowError
from antiphon.store.sessions import ReceivedCounts, StoredSession
from antiphon.store.sessions.patches import MAX_PATCHED_BYTES, Bases, patched
from tests.store.servers import RedisServer
from tests.store.sessions.backends import RedisKit, row
from tests.store.sessions.conftest import Open

WAIT_S = 20


def captions(number: int, **changes: object) -> StoredSession:
    """Return a row as a session of captions stores it: a configuration that stays, and a few words that change."""
    config = {f"field {n}": n * 7919 for n in range(80)}
    snapshot = json.dumps({"config": config, "received": number, "words": [f"w{number}", f"w{number + 1}"]})
    return replace(row("captions", snapshot), received=ReceivedCounts(number, 100 * number), **changes)  # type: ignore[arg-type]


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_a_patch_makes_its_row_of_its_base_and_of_no_other_row(base: bytes, snapshot: bytes, other: bytes) -> None:
    bases = Bases()
    bases.wrote(replace(row("s"), snapshot=base), whole=True)
    made = bases.patch(replace(row("s"), snapshot=snapshot))
    if made is None:
        return
    assert len(made.data) <= len(snapshot) / 2
    assert patched(base, made.data) == snapshot
    for damaged in (made.data[:-1], made.data[:4], b"", b"x" + made.data):
        with pytest.raises(ValueError):
            patched(base, damaged)
    with suppress(ValueError):
        assert patched(other, made.data) == snapshot


@pytest.mark.parametrize(
    "changed",
    [
        {"owner": "b/1"},
        {"fence": 2},
        {"token": b"another"},
        {"key_hash": "another"},
        {"snapshot": b"x" * (MAX_PATCHED_BYTES + 1)},
        {"snapshot": b"something else"},
        {"id": "another"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_row_that_differs_in_more_than_its_text_is_whole(changed: dict[str, object]) -> None:
    bases = Bases()
    bases.wrote(captions(1), whole=True)
    assert bases.patch(captions(2))
    assert bases.patch(captions(2, **changed)) is None


def test_a_row_that_is_too_large_is_no_base() -> None:
    bases, large = Bases(), captions(1, snapshot=b"x" * (MAX_PATCHED_BYTES + 1))
    bases.wrote(captions(1), whole=True)
    bases.wrote(large, whole=True)
    assert bases.patch(captions(2)) is None
    assert bases.newest("captions") is None


# --- with a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> Iterator[RedisKit]:
    if missing := RedisServer.missing():
        pytest.skip(missing)
    kit = RedisKit()
    yield kit
    kit.close()


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> None:
    if "backend" in request.fixturenames:
        with request.getfixturevalue("backend").server.client() as client:
            client.flushall()


def field_of(backend: RedisKit, name: str) -> bytes | None:
    with backend.server.client() as client:
        return client.hget("antiphon:session:captions", name)  # type: ignore[no-any-return]


def num_received(backend: RedisKit) -> int:
    with backend.server.client() as client:
        return int(client.info("stats")["total_net_input_bytes"])


@pytest.mark.server
def test_a_row_that_changes_a_little_takes_few_bytes(backend: RedisKit, opened: Open) -> None:
    store, other = opened(), opened()
    store.put(captions(0)).result(WAIT_S)
    before = num_received(backend)
    for number in range(1, 51):
        store.put(captions(number)).result(WAIT_S)
        assert other.get("captions") == captions(number)
    # Includes the queries of the other store.
    assert (num_received(backend) - before) / 50 < 600 < len(captions(1).snapshot)


@pytest.mark.server
def test_a_host_that_claims_a_patched_row_gets_it_whole_and_goes_on(backend: RedisKit, opened: Open) -> None:
    store, other = opened(), opened()
    for number in range(3):
        store.put(captions(number)).result(WAIT_S)
    claimed = other.claim("captions", "b/1", 1)
    assert claimed == captions(2, owner="b/1", fence=2, restores=1)
    assert isinstance(claimed, StoredSession)
    for number in range(3, 6):
        other.put(captions(number, owner="b/1", fence=2)).result(WAIT_S)
    assert store.get("captions") == captions(5, owner="b/1", fence=2)


@pytest.mark.server
def test_when_the_server_has_lost_the_base_then_the_row_is_written_whole(backend: RedisKit, opened: Open) -> None:
    store, other = opened(), opened()
    for number in range(3):
        store.put(captions(number)).result(WAIT_S)
    with backend.server.client() as client:
        # As after a restart without the last second: an older base, and scripts that are no longer known.
        client.hset("antiphon:session:captions", mapping={"base": 1, "snapshot": b"older", "version": 1})
        client.script_flush()
    store.put(captions(3)).result(WAIT_S)
    assert other.get("captions") == captions(3)
    with backend.server.client() as client:
        client.flushall()
    store.put(captions(4)).result(WAIT_S)
    assert other.get("captions") == captions(4)
    assert store.degraded is None


@pytest.mark.server
def test_an_earlier_version_refuses_a_patched_row_and_gets_a_released_row_whole(
    backend: RedisKit, opened: Open
) -> None:
    store = opened()
    for number in range(3):
        store.put(captions(number)).result(WAIT_S)
    # Earlier versions refuse all rows but those of version 1, and know no patch.
    assert field_of(backend, "version") == b"101"
    assert field_of(backend, "snapshot") == captions(0).snapshot
    store.release(captions(2).hold).result(WAIT_S)
    assert field_of(backend, "version") == b"1"
    assert field_of(backend, "snapshot") == captions(2).snapshot
    # A row that an earlier version has written beside an old patch counts.
    with backend.server.client() as client:
        client.hset("antiphon:session:captions", mapping={"snapshot": b"newer", "version": 1, "patch": b"old"})
    found = store.get("captions")
    assert found
    assert found.snapshot == b"newer"


@pytest.mark.server
@pytest.mark.parametrize("damage", [b"", b"\0\0\0\0abc", b"garbage"])
def test_a_damaged_patch_is_a_damaged_row(backend: RedisKit, opened: Open, damage: bytes) -> None:
    store, other = opened(), opened()
    for number in range(2):
        store.put(captions(number)).result(WAIT_S)
    backend.tamper("captions", "patch", damage)
    for ask in (lambda: other.get("captions"), lambda: other.claim("captions", "b/1", 1)):
        with pytest.raises(RowError, match="captions is damaged"):
            ask()
    # The next write mends it.
    store.put(captions(2)).result(WAIT_S)
    assert other.get("captions") == captions(2)
