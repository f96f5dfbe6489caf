"""The contract of every session backend: rows, owners and fences, tails, hosts, deletion.

The same tests run for all three backends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from antiphon.errors import RowError, SupersededError
from antiphon.store.sessions import (
    MAX_TAIL_BYTES,
    ClaimRefusal,
    Hold,
    Host,
    ReceivedCounts,
    StoredSession,
    TailChunk,
)
from antiphon.store.sessions.postgres import PostgresBackend
from antiphon.store.sessions.redis import RedisBackend
from antiphon.store.sessions.sqlite import SqliteBackend
from tests.store.sessions.backends import BackendKit, row
from tests.store.sessions.conftest import Open

WAIT_S = 20


def until(is_so: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def claimed(found: StoredSession | ClaimRefusal) -> StoredSession:
    assert isinstance(found, StoredSession)
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_when_a_session_was_stored_then_every_host_finds_all_of_its_latest_row(opened: Open) -> None:
    store, other = opened(), opened()
    full = StoredSession("row-1", "who", b"\0hash", b"{}", "a/1", 1, ReceivedCounts(7, 1234), 2)
    for n in range(20):
        store.put(replace(full, snapshot=b'{"n":%d}' % n))
    latest = replace(full, snapshot=b'{"n":19}')
    # The store that took the write returns it at once, even before the backend has it.
    assert store.get("row-1") == latest
    store.put(latest).result(WAIT_S)
    assert other.get("row-1") == latest
    assert other.get("row-2") is None
    store.close()
    assert other.get("row-1") == latest


@pytest.mark.parametrize("last", ["forget", "put"])
def test_what_waits_to_be_written_does_not_hide_another_owner(
    opened: Open, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The first owner was hanging, and does not know that it has lost the session."""
    store, other, name = opened(), opened(), f"hidden-{last}"
    before = row(name, owner="a/1")
    store.put(before).result(WAIT_S)
    taken = claimed(other.claim(name, "b/1", 1))
    may_write = threading.Event()
    for kind in (SqliteBackend, RedisBackend, PostgresBackend):

        def slowly(backend: Any, writes: Any, write: Callable[..., Any] = kind.write) -> Any:
            may_write.wait(WAIT_S)
            return write(backend, writes)

        monkeypatch.setattr(kind, "write", slowly)
    written = store.forget(before.hold) if last == "forget" else store.put(before)
    assert store.get(name) == taken
    may_write.set()
    with pytest.raises(SupersededError):
        written.result(WAIT_S)
    assert other.get(name) == taken


def test_when_a_store_is_closed_then_what_waits_is_written_first(opened: Open) -> None:
    store, other = opened(), opened()
    store.renew(Host("closing/1"))
    for n in range(50):
        store.put(row(f"closing-{n}", owner="closing/1"))
    store.release(row("closing-1", owner="closing/1").hold)
    store.close("closing/1")
    assert all(other.get(f"closing-{n}") for n in range(50))
    assert claimed(other.get("closing-1") or ClaimRefusal.UNKNOWN).owner == ""
    assert other.host("closing/1") is None


def test_when_a_row_is_too_old_then_it_is_not_found_and_cannot_be_claimed(opened: Open) -> None:
    store = opened(0.05)
    store.put(row("old-1")).result(WAIT_S)
    until(lambda: store.get("old-1") is None)
    assert store.claim("old-1", "b/1", 1) is ClaimRefusal.UNKNOWN


def test_when_the_clock_of_a_host_is_an_hour_off_then_nothing_changes(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time
    store = opened()
    store.renew(Host("clock/1"))
    store.put(row("clock-1", owner="clock/1")).result(WAIT_S)
    for skew_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now_s() + skew_s)
        other = opened(skew_s=skew_s)
        assert other.get("clock-1")
        assert other.host("clock/1")
        assert other.claim("clock-1", "b/1", 1) is ClaimRefusal.OWNER_ALIVE
    store.unregister("clock/1")
    assert claimed(other.claim("clock-1", "b/1", 1)).fence == 2


# --- owners and fences ------------------------------------------------------------------------------------------------


def test_when_the_owner_lives_then_nobody_else_can_claim_its_session(opened: Open) -> None:
    store = opened()
    store.renew(Host("alive/1"))
    store.put(row("alive-1", owner="alive/1")).result(WAIT_S)
    assert store.claim("alive-1", "b/1", 1) is ClaimRefusal.OWNER_ALIVE
    # A restarted process is another host, even under the same name.
    assert store.claim("alive-1", "alive/2", 1) is ClaimRefusal.OWNER_ALIVE
    assert store.put(row("alive-1", owner="alive/1")).exception(WAIT_S) is None
    # The owner may claim its own session again.
    assert claimed(store.claim("alive-1", "alive/1", 1)).fence == 2


def test_when_the_owner_is_dead_then_one_claims_and_no_write_of_the_old_owner_succeeds(opened: Open) -> None:
    store, other = opened(), opened()
    store.renew(Host("dead/1"))
    old = row("dead-1", "before", owner="dead/1")
    store.put(old).result(WAIT_S)
    store.append_tail(old.hold, TailChunk(0, b"sound")).result(WAIT_S)
    other.unregister("dead/1")
    now = claimed(other.claim("dead-1", "b/1", 1))
    assert (now.owner, now.fence, now.restores, now.snapshot) == ("b/1", 2, 1, b"before")
    assert other.tail("dead-1") == (TailChunk(0, b"sound"),)
    # The host returns, because it had only been cut off.
    store.renew(Host("dead/1"))
    late = (
        store.put(replace(old, snapshot=b"late"), turn_kept=True),
        store.append_tail(old.hold, TailChunk(1, b"late")),
        store.release(old.hold),
        store.forget(old.hold),
    )
    assert all(isinstance(write.exception(WAIT_S), SupersededError) for write in late)
    assert other.get("dead-1") == now
    assert other.tail("dead-1") == (TailChunk(0, b"sound"),)
    assert store.degraded is None
    other.put(replace(now, snapshot=b"after", restores=0)).result(WAIT_S)
    assert claimed(store.get("dead-1") or ClaimRefusal.UNKNOWN).restores == 0


def test_when_a_host_with_an_earlier_fence_shows_the_owners_name_then_it_is_refused(opened: Open) -> None:
    store = opened()
    store.put(row("forged-1", owner="a/1")).result(WAIT_S)
    store.release(row("forged-1").hold).result(WAIT_S)
    now = claimed(store.claim("forged-1", "a/1", 1))
    for hold in (Hold("forged-1", "a/1", 1), Hold("forged-1", "b/1", 2), Hold("forged-1", "", 2)):
        write = store.put(replace(now, owner=hold.owner, fence=hold.fence, snapshot=b"forged"))
        assert isinstance(write.exception(WAIT_S), SupersededError)
    assert store.get("forged-1") == now


def test_when_a_session_is_released_then_it_can_be_claimed_though_its_owner_lives(opened: Open) -> None:
    store, other = opened(), opened()
    store.renew(Host("giving/1"))
    given = row("given-1", owner="giving/1", restores=2)
    # The two hosts start at the same moment, or one after the other.
    store.put(given)
    store.release(given.hold).result(WAIT_S)
    assert other.get("given-1") == replace(given, owner="", restores=0)
    # The same request again, because the reply to the first may have been lost.
    store.release(given.hold).result(WAIT_S)
    assert isinstance(store.put(given).exception(WAIT_S), SupersededError)
    assert claimed(other.claim("given-1", "b/1", 1)).restores == 1
    assert other.claim("given-1", "c/1", 1) is ClaimRefusal.SUPERSEDED


def test_when_twenty_hosts_claim_a_session_then_one_of_them_gets_it(opened: Open) -> None:
    stores = [opened() for _ in range(20)]
    owner = Host("many/1")
    for turn in range(5):
        name = f"many-{turn}"
        stores[0].renew(owner)
        first = row(name, owner="many/1")
        stores[0].put(first).result(WAIT_S)
        barrier = threading.Barrier(len(stores) + 1)
        found: list[StoredSession | ClaimRefusal] = [ClaimRefusal.UNKNOWN] * len(stores)

        def claim(number: int, name: str, barrier: threading.Barrier, found: list[Any]) -> None:
            barrier.wait()
            found[number] = stores[number].claim(name, f"host-{number}/1", 1)

        threads = [threading.Thread(target=claim, args=(n, name, barrier, found)) for n in range(len(stores))]
        for thread in threads:
            thread.start()
        stores[0].unregister("many/1")
        barrier.wait()
        late = stores[0].put(replace(first, snapshot=b"late"))
        for thread in threads:
            thread.join()
        winners = [f for f in found if isinstance(f, StoredSession)]
        assert len(winners) == 1
        assert found.count(ClaimRefusal.SUPERSEDED) == len(stores) - 1
        late.exception(WAIT_S)
        assert isinstance(stores[0].put(first).exception(WAIT_S), SupersededError)
        assert claimed(stores[1].get(name) or ClaimRefusal.UNKNOWN).owner == winners[0].owner


def test_when_the_store_lost_what_was_written_then_the_newest_owner_makes_it_anew(
    backend: BackendKit, opened: Open
) -> None:
    store = opened()
    newest = row("lost-1", "newest", owner="b/1", fence=5)
    store.put(newest).result(WAIT_S)
    assert isinstance(store.put(row("lost-1", owner="a/1", fence=4)).exception(WAIT_S), SupersededError)
    assert store.get("lost-1") == newest


# --- tails ------------------------------------------------------------------------------------------------------------


def test_when_a_turn_is_kept_then_its_tail_is_gone(opened: Open) -> None:
    store = opened()
    kept = row("tail-1")
    store.put(kept)
    chunks = [TailChunk(at_ms, b"%d" % at_ms) for at_ms in (0, 1000, 2000)]
    # Chunks arrive in any order, and a repeated chunk is stored once.
    for chunk in (chunks[2], chunks[0], chunks[1], TailChunk(1000, b"again")):
        store.append_tail(kept.hold, chunk).result(WAIT_S)
    assert store.tail("tail-1") == tuple(chunks)
    store.put(kept).result(WAIT_S)
    assert store.tail("tail-1") == tuple(chunks)
    store.put(kept, turn_kept=True)
    store.append_tail(kept.hold, TailChunk(3000, b"next")).result(WAIT_S)
    assert store.tail("tail-1") == (TailChunk(3000, b"next"),)


def test_when_a_tail_is_as_large_as_it_may_be_then_what_follows_is_not_kept(opened: Open) -> None:
    store = opened()
    kept = row("large-1")
    store.put(kept)
    half = b"\0" * (MAX_TAIL_BYTES // 2)
    for at_ms in range(4):
        store.append_tail(kept.hold, TailChunk(at_ms, half)).result(WAIT_S)
    assert [chunk.at_ms for chunk in store.tail("large-1")] == [0, 1]


def test_when_there_is_no_such_session_then_it_has_no_tail_and_nothing_happens(opened: Open) -> None:
    store = opened()
    hold = Hold("none-1", "a/1", 1)
    for write in (store.append_tail(hold, TailChunk(0, b"x")), store.release(hold), store.forget(hold)):
        write.result(WAIT_S)
    assert store.tail("none-1") == ()
    assert store.get("none-1") is None
    assert store.claim("none-1", "b/1", 0) is ClaimRefusal.UNKNOWN


# --- deletion ---------------------------------------------------------------------------------------------------------


def test_when_a_session_is_forgotten_then_its_text_is_nowhere_and_no_owner_makes_it_anew(
    backend: BackendKit, opened: Open
) -> None:
    store, other = opened(), opened()
    secret = row("gone-1", "the code is blackbird " * 400, key_hash="who-blackbird")
    store.put(secret).result(WAIT_S)
    store.append_tail(secret.hold, TailChunk(0, b"the sound of blackbird")).result(WAIT_S)
    store.put(replace(secret, snapshot=b"the code was blackbird")).result(WAIT_S)
    other.put(row("gone-2", "something else")).result(WAIT_S)
    assert b"blackbird" in backend.text()
    store.forget(secret.hold).result(WAIT_S)
    assert b"blackbird" not in backend.text()
    assert b"something else" in backend.text()
    assert other.get("gone-1") is None
    assert other.tail("gone-1") == ()
    assert other.claim("gone-1", "b/1", 1) is ClaimRefusal.UNKNOWN
    assert isinstance(other.put(secret).exception(WAIT_S), SupersededError)
    assert isinstance(other.append_tail(secret.hold, TailChunk(0, b"blackbird")).exception(WAIT_S), SupersededError)
    # The two may be merged into one write, or not.
    other.put(secret)
    assert isinstance(other.release(secret.hold).exception(WAIT_S), SupersededError)
    # The same request again, because the reply to the first may have been lost.
    other.forget(secret.hold).result(WAIT_S)
    assert b"blackbird" not in backend.text()


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_when_a_host_renews_its_key_then_all_know_it_until_its_time_is_over(opened: Open) -> None:
    store, other = opened(host_ttl_s=0.2), opened()
    host = Host("ttl/1", "http://10.0.0.1:8000", 0.25, True)
    store.renew(replace(host, draining=False))
    store.renew(host)
    assert other.host("ttl/1") in (host, None)
    store.put(row("ttl-1", owner="ttl/1")).result(WAIT_S)
    # The host hangs.
    until(lambda: other.host("ttl/1") is None)
    assert "ttl/1" not in [h.name for h in other.hosts()]
    assert claimed(other.claim("ttl-1", "b/1", 1)).owner == "b/1"


def test_when_a_supervisor_unregisters_a_name_then_all_its_incarnations_are_dead(opened: Open) -> None:
    store, other = opened(), opened()
    for name in ("sup/2", "sup/1", "sup-2/1"):
        store.renew(Host(name))
    assert [h.name for h in other.hosts() if h.name.startswith("sup")] == ["sup-2/1", "sup/1", "sup/2"]
    other.unregister("sup")
    assert [h.name for h in store.hosts() if h.name.startswith("sup")] == ["sup-2/1"]
    # The host is alive after all, and renews its key.
    store.renew(Host("sup/1"))
    assert other.host("sup/1") == Host("sup/1")


# --- bad rows ---------------------------------------------------------------------------------------------------------


def test_when_a_row_is_of_another_version_then_it_is_refused_by_name_and_not_touched(
    backend: BackendKit, opened: Open
) -> None:
    store = opened()
    store.put(row("version-1")).result(WAIT_S)
    backend.tamper("version-1", "version", 7)
    with pytest.raises(RowError, match="version-1 has version 7"):
        store.get("version-1")
    with pytest.raises(RowError, match="version-1 has version 7"):
        store.claim("version-1", "b/1", 1)
    backend.tamper("version-1", "version", 1)
    assert store.get("version-1") == row("version-1")


def test_when_there_is_garbage_in_a_row_then_it_is_refused_by_name_and_the_others_are_served(
    backend: BackendKit, opened: Open
) -> None:
    store = opened()
    store.put(row("garbage-free")).result(WAIT_S)
    # The columns of Postgres accept only numbers.
    for field in ("version", "fence", "restores") if backend.name != "postgres" else ():
        name = f"garbage-{field}"
        store.put(row(name)).result(WAIT_S)
        backend.tamper(name, field, "?")
        for ask in (partial(store.get, name), partial(store.claim, name, "b/1", 1)):
            with pytest.raises(RowError, match=name):
                ask()
        assert isinstance(store.put(row(name)).exception(WAIT_S), RowError | None)
    # The store does not check what is in a snapshot. The reader of the snapshot does.
    store.put(row("garbage-text")).result(WAIT_S)
    backend.tamper("garbage-text", "snapshot", b"\xff")
    assert claimed(store.get("garbage-text") or ClaimRefusal.UNKNOWN).snapshot == b"\xff"
    assert store.get("garbage-free")
    assert store.degraded is None


def test_when_one_session_cannot_be_written_then_the_others_are(backend: BackendKit, opened: Open) -> None:
    store = opened()
    unwritable: Any = object()
    backend.stop()
    # All threads start at the same moment.
    store.put(row("first-1")).exception(WAIT_S)
    store.put(replace(row("bad-1"), snapshot=unwritable))
    for n in range(3):
        store.put(row(f"good-{n}"))
    backend.start()
    until(lambda: store.put(row("first-1")).exception(WAIT_S) is None)
    assert isinstance(store.put(replace(row("bad-1"), snapshot=unwritable)).exception(WAIT_S), RowError)
    other = opened()
    assert all(other.get(f"good-{n}") for n in range(3))
    assert other.get("bad-1") is None
    assert store.degraded is None
