"""Invalid rows, tails and hosts in every backend, as an attacker with write access or broken hardware leaves them.

The error for a damaged row names the row, which stays as it is. All other rows work, and the store continues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from antiphon.errors import RowError, StoreError, SupersededError
from antiphon.server.watches import as_host
from antiphon.store.sessions import ClaimRefusal, Host, SessionStore, StoredSession, TailChunk, writer
from antiphon.store.sessions.api import MAX_SNAPSHOT_BYTES
from antiphon.store.sessions.postgres import PostgresBackend
from antiphon.store.sessions.redis import RedisBackend
from antiphon.store.sessions.sqlite import SqliteBackend
from antiphon.store.sessions.writer import ROUND_BYTES
from tests.server.clients import Wire, connect
from tests.server.live.test_ownership import Server, answer, conversation, last_seq, say, sharing
from tests.server.scripted import serving
from tests.store.sessions.backends import COUNTS, BackendKit, row
from tests.store.sessions.conftest import Open
from tests.store.sessions.test_contract import WAIT_S, until

NUMBERS = (-1, -(2**62), 2**53, 2**62, 2**63 - 1, 2**64, 10**400, 1.5, float("nan"), float("inf"))
TEXTS = ("?", "", " 1", "1e3", "0x10", "nan", "1.5", "-0", "9" * 400, b"\xff")
ODD: dict[str, tuple[Any, ...]] = {
    "version": (0, 2, *NUMBERS, *TEXTS),
    "fence": (*NUMBERS, *TEXTS),
    "restores": (*NUMBERS, *TEXTS, 2**31 - 1),
    "events": (*NUMBERS, *TEXTS),
    "audio_ms": (*NUMBERS, *TEXTS),
    "owner": ("/", "..", "nobody/1\n", "x" * 100_000, b"\xff"),
    "key_hash": ("", "x" * 100_000, b"\xff"),
    "token": (b"x", b"", "text"),
}


def reported(ask: Callable[[], Any]) -> Any:
    """Return what a store answers about a row, or the RowError that it raises."""
    try:
        return ask()
    except RowError as error:
        return error


@pytest.mark.parametrize("field", ODD)
def test_when_a_field_of_a_row_is_odd_then_that_row_alone_is_refused_by_name(
    backend: BackendKit, opened: Open, field: str
) -> None:
    store = opened()
    for number, value in enumerate(ODD[field]):
        name = f"odd-{field}-{number}"
        kept = row(name)
        store.put(kept).result(WAIT_S)
        store.append_tail(kept.hold, TailChunk(0, b"sound")).result(WAIT_S)
        if not backend.tamper(name, field, value):
            # The backend itself refuses the value.
            assert store.get(name) == kept
            continue
        found = reported(partial(store.get, name))
        fence = found.fence if isinstance(found, StoredSession) else 1
        claimed = reported(partial(store.claim, name, "b/1", fence))
        if isinstance(found, StoredSession):
            assert isinstance(claimed, StoredSession), (field, value)
            assert (claimed.owner, claimed.fence) == ("b/1", fence + 1)
        if isinstance(claimed, RowError):
            # The row is unchanged.
            assert backend.tamper(name, field, kept.received.events if field in COUNTS else getattr(kept, field))
            assert store.get(name) == kept
            assert backend.tamper(name, field, value)
        for write in (store.put(kept), store.release(kept.hold), store.forget(kept.hold)):
            assert isinstance(write.exception(WAIT_S), RowError | SupersededError | None), (field, value)
        assert store.degraded is None
    store.put(row("odd-free")).result(WAIT_S)
    assert store.get("odd-free") == row("odd-free")


@pytest.mark.parametrize(("at_ms", "data"), [("?", b"x"), (-5, b"x"), (2**62, b""), (7, "text"), (1.5, b"x")])
def test_when_a_chunk_of_a_tail_is_odd_then_it_is_refused_by_name_or_read(
    backend: BackendKit, opened: Open, at_ms: Any, data: Any
) -> None:
    store, kept = opened(), row(f"tail-of-{at_ms}")
    store.put(kept).result(WAIT_S)
    if backend.tamper_tail(kept.id, at_ms, data):
        found = reported(partial(store.tail, kept.id))
        assert isinstance(found, RowError) or all(
            isinstance(chunk.at_ms, int) and isinstance(chunk.data, bytes) for chunk in found
        )
    # The row's session continues, and so do all others.
    store.append_tail(kept.hold, TailChunk(3, b"sound"))
    store.put(row("beside-a-tail")).result(WAIT_S)
    store.put(kept, turn_kept=True).result(WAIT_S)
    assert store.tail(kept.id) == ()
    assert store.degraded is None


@pytest.mark.parametrize("backend", [pytest.param("redis", marks=pytest.mark.server)], indirect=True)
def test_when_keys_are_of_another_type_then_their_sessions_alone_are_refused(backend: Any, opened: Open) -> None:
    store = opened()
    with backend.server.client() as client:
        for name in ("typed-row", "typed-tail", "typed-size"):
            store.put(row(name)).result(WAIT_S)
        client.delete("antiphon:session:typed-row")
        client.rpush("antiphon:session:typed-row", "x")
        client.set("antiphon:tail:typed-tail", "x")
        client.hset("antiphon:tail:typed-size", "size", "?")
    for name in ("typed-row", "typed-tail", "typed-size"):
        written = store.append_tail(row(name).hold, TailChunk(0, b"sound"))
        store.put(row("beside-a-type")).result(WAIT_S)
        assert isinstance(written.exception(WAIT_S), RowError), name
    with pytest.raises(StoreError):
        store.get("typed-row")
    with pytest.raises(StoreError):
        store.tail("typed-tail")
    assert store.degraded is None
    with backend.server.client() as client:
        client.delete("antiphon:session:typed-row")


HOST_FIELDS = [
    *(("load", value) for value in ("?", "nan", float("inf"), -(10**400), b"\xff")),
    *(("draining", value) for value in ("?", 7, b"\xff")),
    *(("address", value) for value in (b"\xff", 7, "x" * 100_000)),
]


@pytest.mark.parametrize(("field", "value"), HOST_FIELDS, ids=[f"{f}-{n}" for n, (f, _) in enumerate(HOST_FIELDS)])
def test_when_what_is_known_of_a_host_is_odd_then_it_lives_and_all_hosts_are_listed(
    backend: BackendKit, opened: Open, field: str, value: Any
) -> None:
    store = opened()
    for name in ("odd/1", "other/1"):
        store.renew(Host(name, "http://10.0.0.1:8000", 0.5))
    backend.tamper_host("odd/1", field, value)
    listed = {host.name: host for host in store.hosts()}
    assert listed["other/1"] == Host("other/1", "http://10.0.0.1:8000", 0.5)
    odd = listed["odd/1"]
    assert odd.load is None or 0 <= odd.load <= 1
    assert isinstance(odd.address, str)
    json.dumps([odd.address, odd.load, odd.draining], allow_nan=False)
    assert store.host("odd/1") == odd
    store.put(row("of-the-odd", owner="odd/1")).result(WAIT_S)
    assert store.claim("of-the-odd", "b/1", 1) is ClaimRefusal.OWNER_ALIVE
    for name in ("odd/1", "other/1"):
        store.unregister(name)


# --- large amounts ----------------------------------------------------------------------------------------------------


def test_when_a_session_is_larger_than_a_home_takes_in_its_time_then_it_alone_is_not_stored(opened: Open) -> None:
    store, kept = opened(), row("large-row")
    store.put(kept).result(WAIT_S)
    large = replace(kept, snapshot=bytes(MAX_SNAPSHOT_BYTES + 1))
    with pytest.raises(RowError, match="large-row cannot be stored: it has 16 MiB"):
        store.put(large).result(WAIT_S)
    store.put(row("beside-a-large-one")).result(WAIT_S)
    assert store.get("large-row") == kept
    store.put(replace(kept, snapshot=b"small again")).result(WAIT_S)
    assert store.degraded is None


def test_when_a_conversation_grows_too_large_then_its_client_alone_is_told_until_it_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_SNAPSHOT_BYTES", 20_000)

    async def add(wire: Wire, text: str) -> str:
        await say(wire, text)
        return str((await wire.until("conversation.item.done"))["item"]["id"])

    async def main(host: Server) -> None:
        async with conversation(host) as (wire, session_id, _), conversation(host) as (other, *_):
            kept = host.row(session_id)
            large = await add(wire, "x" * 30_000)
            assert [f["degraded"] for f in wire.seen if f["type"] == "session.state_degraded"] == [True]
            assert host.row(session_id) == kept
            assert await answer(other, "three") == "three"
            assert not [f for f in other.seen if f["type"] == "session.state_degraded"]
            assert host.store.degraded is None
            # The frames that the client may have missed are stored, too.
            await wire.say("session.event_ack", server_event_seq=last_seq(wire))
            await wire.say("conversation.item.delete", item_id=large)
            assert (await wire.until("session.state_degraded"))["degraded"] is False
            await add(wire, "small")
            assert b"small" in host.row(session_id).snapshot

    with sharing(tmp_path, 1) as (host,):
        asyncio.run(main(host))


def test_when_much_waits_after_an_outage_then_it_is_written_a_part_at_a_time(
    backend: BackendKit, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    sizes: list[int] = []
    for kind in (SqliteBackend, RedisBackend, PostgresBackend):

        def write(backend: Any, writes: Any, write: Callable[..., Any] = kind.write) -> Any:
            sizes.append(sum(len(each.row.snapshot) for each in writes))
            return write(backend, writes)

        monkeypatch.setattr(kind, "write", write)
    backend.stop()
    store.put(row("waits-0")).exception(WAIT_S)
    for number in range(12):
        store.put(row(f"waits-{number}", "x" * (1 << 20)))
    backend.start()
    until(lambda: store.put(row("waits-0")).exception(WAIT_S) is None)
    other = opened()
    until(lambda: all(other.get(f"waits-{number}") for number in range(12)))
    assert max(sizes) <= ROUND_BYTES
    assert store.degraded is None


# --- at a server ------------------------------------------------------------------------------------------------------


@contextmanager
def hosting(store: SessionStore) -> Iterator[Server]:
    """Run a server over this store."""
    with serving() as (ws, state, _):
        state.sessions.store = store
        store.renew(as_host(state))
        yield Server(ws, state, store, None)  # type: ignore[arg-type]


def with_items(snapshot: bytes, count: int, chars: int) -> bytes:
    """Return the snapshot with `count` copies of its first item, whose texts have the given length."""
    document = json.loads(snapshot)
    first = document["items"][0]
    part = first["parts"][0] | {"text": "x" * chars}
    document["items"] = [first | {"id": f"item_{n}", "parts": [part]} for n in range(count)]
    return json.dumps(document).encode()


# Tampered snapshots, each with the reply to a client that resumes it: `unknown_session` if it is not a conversation.
SNAPSHOTS: dict[str, tuple[Any, str]] = {
    "cut": (lambda kept: kept[: len(kept) // 2], "unknown_session"),
    "empty list": (lambda _: b"[]", "unknown_session"),
    "200,000 deep": (lambda _: b"[" * 200_000 + b"]" * 200_000, "unknown_session"),
    "no JSON": (lambda _: b"\xff\xfe no JSON", "unknown_session"),
    "unknown dialect": (lambda kept: kept.replace(b'"dialect":"', b'"dialect":"no-'), "unknown_session"),
    "text for numbers": (lambda kept: kept.replace(b'"received":', b'"received":"?",":":'), "unknown_session"),
    "negative counts": (lambda kept: kept.replace(b'"received":', b'"received":-'), "unknown_session"),
    "huge counts": (lambda kept: kept.replace(b'"received":', b'"received":' + b"9" * 40), "unknown_session"),
    "20,000 items": (lambda kept: with_items(kept, 20_000, 10), "session.resumed"),
    "60 MB": (lambda kept: with_items(kept, 60, 1_000_000), "session.resumed"),
}


@pytest.mark.slow
def test_when_a_stored_snapshot_is_odd_then_it_is_refused_by_name_or_restored_and_the_server_goes_on(
    backend: BackendKit, opened: Open
) -> None:
    store = opened()
    found: dict[str, str] = {}

    async def main() -> None:
        async with conversation(host) as (_, session_id, token):
            kept = store.get(session_id)
        assert kept
        for number, (name, (change, _)) in enumerate(SNAPSHOTS.items()):
            changed = f"sess-odd-{number}"
            snapshot = change(kept.snapshot.replace(session_id.encode(), changed.encode()))
            copy = replace(kept, id=changed, snapshot=b"{}", owner="killed-long-ago/1", fence=3, restores=0)
            store.put(copy).result(WAIT_S)
            assert backend.tamper(changed, "snapshot", snapshot)
            async with connect(host.ws, f"?resume={changed}") as wire:
                about = {"session_id": changed, "resume_token": token, "last_received_server_event_seq": 0}
                await wire.say("session.resume", **about)
                frame = await wire.read()
                found[name] = frame["error"]["code"] if frame["type"] == "error" else frame["type"]
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{host.ws.replace('ws', 'http', 1)}/health")).status_code == 200

    with hosting(store) as host:
        asyncio.run(main())
        until(lambda: not host.state.sessions.live or all(s.attachment.token for s in host.state.sessions.live))
    # No host writes a row of this size. A backend may need longer to return it than its timeout, which is then the
    # error.
    assert found.pop("60 MB") in ("session.resumed", "resource_exhausted")
    assert found == {name: reported for name, (_, reported) in SNAPSHOTS.items() if name != "60 MB"}
    assert store.degraded is None


@pytest.mark.parametrize(
    ("field", "value"), [("version", 7), ("fence", 2**62), ("fence", -3), ("token", b"x"), ("restores", -1)]
)
def test_when_a_field_of_a_stored_row_is_odd_then_its_client_is_told_and_the_server_goes_on(
    backend: BackendKit, opened: Open, field: str, value: Any
) -> None:
    store = opened()

    async def main() -> None:
        async with conversation(host) as (_, session_id, token):
            kept = store.get(session_id)
        assert kept
        changed = f"sess-{field}-{value}".replace("'", "")
        store.put(replace(kept, id=changed, owner="killed-long-ago/1", fence=3)).result(WAIT_S)
        assert backend.tamper(changed, field, value)
        async with connect(host.ws, f"?resume={changed}") as wire:
            about = {"session_id": changed, "resume_token": token, "last_received_server_event_seq": 0}
            await wire.say("session.resume", **about)
            frame = await wire.read()
        code = "invalid_resume_token" if field == "token" else "unknown_session"
        assert frame["error"]["code"] == code, frame
        async with conversation(host):
            pass

    with hosting(store) as host:
        asyncio.run(main())
    assert store.degraded is None
