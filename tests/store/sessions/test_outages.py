"""A backend that is unavailable for a while: sessions continue, and in the end everything is stored.

Only writes that are stored are reported as stored.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace

import pytest

from antiphon.errors import RowError, SettingsError, StoreError, SupersededError
from antiphon.store.sessions import Host, StoredSession, TailChunk, open_store
from tests.store.servers import PASSWORD
from tests.store.sessions.backends import BackendKit, PostgresKit, RedisKit, row
from tests.store.sessions.conftest import Open
from tests.store.sessions.test_contract import WAIT_S, claimed, until


def test_when_the_home_is_away_then_the_store_is_degraded_and_writes_all_when_it_is_back(
    backend: BackendKit, opened: Open
) -> None:
    store = opened()
    first = row("away-1", "before")
    store.put(first).result(WAIT_S)
    backend.stop()
    began_s = time.monotonic()
    with pytest.raises(StoreError):
        store.put(replace(first, snapshot=b"during")).result(WAIT_S)
    assert time.monotonic() - began_s < WAIT_S / 2
    assert store.degraded
    # The write fails at once, because the store already knows that it is degraded.
    later = replace(first, snapshot=b"later")
    assert isinstance(store.put(later).exception(0), StoreError)
    store.append_tail(later.hold, TailChunk(0, b"sound"))
    store.put(row("away-2"))
    assert store.get("away-1") == later
    backend.start()
    until(lambda: store.put(row("away-3")).exception(WAIT_S) is None)
    assert store.degraded is None
    other = opened()
    assert other.get("away-1") == later
    assert other.tail("away-1") == (TailChunk(0, b"sound"),)
    assert other.get("away-2")


def test_when_writes_are_acknowledged_while_the_home_goes_away_then_all_of_them_are_there(
    backend: BackendKit, opened: Open
) -> None:
    """The backend is killed between any two writes, three times."""
    store = opened()
    kept = 0
    for cycle in range(3):
        for n in range(cycle * 100, cycle * 100 + 40):
            if n % 100 == 20:
                backend.stop()
            if store.put(row("ack-1", str(n))).exception(WAIT_S) is None:
                kept = n
        backend.start()
        found = opened().get("ack-1")
        assert found
        assert int(found.snapshot) >= kept
        until(lambda latest=kept: store.put(row("ack-1", str(latest))).exception(WAIT_S) is None)


def test_when_a_session_was_claimed_during_an_outage_of_its_owner_then_the_owner_is_told_when_it_is_over(
    backend: BackendKit, opened: Open
) -> None:
    store, other = opened(), opened()
    mine = row("cut-1", "mine", owner="cut/1")
    store.put(mine).result(WAIT_S)
    backend.stop()
    store.put(replace(mine, snapshot=b"while cut off")).exception(WAIT_S)
    assert store.degraded
    backend.start()
    try:
        other.claim("cut-1", "b/1", 1)
    except StoreError:
        # The connection is older than the outage, so its first use may fail.
        other.claim("cut-1", "b/1", 1)
    found = other.get("cut-1")
    until(lambda: store.put(row("cut-2")).exception(WAIT_S) is None)
    assert isinstance(store.put(mine).exception(WAIT_S), SupersededError | None)
    # The write came first, or the claim did. If the write was too late, it changed nothing.
    assert other.get("cut-1") == found
    assert isinstance(found, StoredSession)
    assert found.owner in ("b/1", "cut/1")


@pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True)
@pytest.mark.server
def test_when_the_home_hangs_then_nobody_waits_long(backend: RedisKit | PostgresKit, opened: Open) -> None:
    """The server keeps the connection, but does not answer.

    With Postgres, it is the connection's process that hangs.
    """
    store = opened()
    store.put(row("hang-1")).result(WAIT_S)
    store.renew(Host("hang/1"))
    pids = [backend.server.popen.pid] if backend.server.popen else []
    if isinstance(backend, PostgresKit):
        with backend.server.client() as client:
            query = "select pid from pg_stat_activity where backend_type = 'client backend'"
            pids = [pid for (pid,) in client.execute(query) if pid != client.info.backend_pid]
    import os

    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(StoreError):
            store.put(row("hang-1", "later")).result(WAIT_S)
        for ask in (lambda: store.renew(Host("hang/1")), lambda: store.hosts()):
            with pytest.raises(StoreError):
                ask()
                ask()
                raise StoreError("a new connection answers")
        assert time.monotonic() - began_s < WAIT_S / 2
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    until(lambda: store.put(row("hang-1", "later")).exception(WAIT_S) is None)
    until(lambda: claimed(opened().get("hang-1") or row("")).snapshot == b"later")


@pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True)
@pytest.mark.server
def test_when_a_server_cannot_be_had_then_the_error_does_not_show_its_password(
    backend: RedisKit | PostgresKit, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    url = backend.server.url
    wrong = url.replace(PASSWORD, "wr0ng-password")
    absent = url.replace(str(backend.server.port), "1")
    failures = []
    for bad in (wrong, absent, absent + "?sslpassword=hidden-too"):
        with pytest.raises((StoreError, SettingsError)) as caught:
            open_store(bad, 60)
        assert not isinstance(caught.value, RowError)
        assert "127.0.0.1" in str(caught.value)
        failures.append(str(caught.value))
    store = opened()
    backend.stop()
    caplog.set_level(logging.DEBUG, "antiphon")
    failures.append(str(store.put(row("secret-1")).exception(WAIT_S)))
    with pytest.raises(StoreError) as caught:
        store.get("secret-2")
    text = "\n".join([*failures, str(caught.value), str(store.degraded), caplog.text])
    for secret in (PASSWORD, "wr0ng-password", "hidden-too"):
        assert secret not in text


@pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True)
@pytest.mark.server
def test_when_the_home_is_of_a_newer_format_then_it_is_refused_by_name(backend: RedisKit | PostgresKit) -> None:
    backend.open().close()

    def write_format(number: int) -> None:
        with backend.server.client() as client:
            if isinstance(backend, RedisKit):
                client.set("antiphon:format", number)
            else:
                client.execute("update antiphon_format set format = %s", (number,))

    write_format(99)
    try:
        with pytest.raises(StoreError, match=r"format .*99"):
            backend.open()
    finally:
        write_format(1)
