"""Sessions in SQLite: files, locks and formats. The tests for all backends are in test_contract.py."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import StoreError
from antiphon.store.sessions import ClaimRefusal, Host, SessionStore, StoredSession
from antiphon.store.sessions.sqlite import FILE, FORMAT, SCHEMA, SqliteBackend
from antiphon.store.sessions.writer import PURGE_EVERY_S, QueuedStore


def stored(name: str, text: str = "{}") -> StoredSession:
    return StoredSession(name, "who", b"hash", text.encode(), "a/1", 1)


def open_folder(folder: Path, max_age_s: float = 60) -> SessionStore:
    return QueuedStore(SqliteBackend(folder, max_age_s))


def test_when_a_session_was_stored_then_the_next_server_finds_its_latest_state(tmp_path: Path) -> None:
    store = open_folder(tmp_path / "new")
    for n in range(20):
        store.put(stored("a", f'{{"n":{n}}}'))
    store.put(stored("b"))
    store.forget(stored("b").hold)
    # It can be read at once, even before it is stored.
    assert store.get("a") == stored("a", '{"n":19}')
    assert store.get("b") is None
    store.close()
    again = open_folder(tmp_path / "new")
    assert again.get("a") == stored("a", '{"n":19}')
    assert again.get("b") is None
    assert again.get("c") is None
    again.close()


def test_when_a_session_is_old_then_it_is_not_found(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    store.put(stored("a"))
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("update sessions set at = at - 100")
    db.close()
    store = open_folder(tmp_path)
    assert store.get("a") is None
    store.close()


def test_when_many_threads_write_then_each_latest_state_is_stored(tmp_path: Path) -> None:
    store = open_folder(tmp_path)

    def write(name: str) -> None:
        for n in range(50):
            store.put(stored(name, str(n)))

    threads = [threading.Thread(target=write, args=(f"s{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    store = open_folder(tmp_path)
    assert [store.get(f"s{k}") for k in range(8)] == [stored(f"s{k}", "49") for k in range(8)]
    store.close()


def test_when_a_folder_or_database_cannot_be_used_then_an_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        open_folder(tmp_path / "file")
    (tmp_path / FILE).write_text("this is no database, but it is long enough to look like something" * 9)
    with pytest.raises(StoreError):
        open_folder(tmp_path)


def text_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_when_a_session_is_forgotten_then_its_text_is_in_no_file(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    store.put(stored("a", "the code is 7391 " * 400)).result(10)
    store.put(stored("a", "the code was 7391")).result(10)
    store.put(stored("b", "something else")).result(10)
    assert b"7391" in text_of(tmp_path)
    store.forget(stored("a").hold)
    # Writes that are made later are stored after it.
    store.put(stored("b", "something else")).result(10)
    assert b"7391" not in text_of(tmp_path)
    store.close()
    assert b"7391" not in text_of(tmp_path)
    assert b"something else" in text_of(tmp_path)


def test_when_a_session_becomes_too_old_while_the_server_runs_then_its_text_is_in_no_file(tmp_path: Path) -> None:
    hours = [0.0]
    clock = lambda: hours[0] * PURGE_EVERY_S  # noqa: E731
    store = QueuedStore(SqliteBackend(tmp_path, 60, clock=clock), clock)
    store.put(stored("a", "the code is 7391")).result(10)
    hours[0] = 1.5
    for _ in range(2):
        # When the second write is stored, the thread has done the deletion that the first one caused.
        store.put(stored("b", "something else")).result(10)
    assert b"7391" not in text_of(tmp_path)
    assert store.get("b")
    store.close()


def test_when_the_database_is_locked_then_nobody_waits_long_and_all_is_written_in_the_end(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("begin immediate")
        with pytest.raises(StoreError, match="locked"):
            store.put(stored("a", "1")).result(10)
        assert store.degraded
        # The write fails at once, because the store already knows that it is degraded.
        assert isinstance(store.put(stored("a", "2")).exception(0), StoreError)
        assert store.get("a") == stored("a", "2")
        other.execute("rollback")
    while store.degraded:
        store.put(stored("b")).exception(10)
    store.put(stored("c")).result(10)
    store.close()
    again = open_folder(tmp_path)
    assert again.get("a") == stored("a", "2")
    again.close()


def test_when_one_session_cannot_be_written_then_the_others_are(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    unwritable: Any = object()
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        # Both threads start at the same moment.
        other.execute("begin immediate")
        bad = store.put(StoredSession("bad", "who", b"hash", unwritable, "a/1", 1))
        good = store.put(stored("good"))
        other.execute("rollback")
    with pytest.raises(StoreError):
        bad.result(10)
    good.result(10)
    assert store.degraded is None
    store.close()


def test_when_the_disk_is_full_then_it_is_said_and_what_was_written_stays(tmp_path: Path) -> None:
    """The process may write only 200 kB to a file. Writes beyond that fail as on a full disk."""
    script = f"""
import resource
from pathlib import Path
from antiphon.errors import StoreError
from antiphon.store.sessions import StoredSession, open_store

store = open_store({str(tmp_path)!r}, 60)
store.put(StoredSession("a", "who", b"hash", b"small", "a/1", 1)).result(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    store.put(StoredSession("b", "who", b"hash", b"x" * 1_000_000, "a/1", 1)).result(10)
except StoreError as error:
    print("refused:", bool(store.degraded))
store.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused: True\n", done.stderr
    store = open_folder(tmp_path)
    assert store.get("a") == stored("a", "small")
    assert store.get("b") is None
    store.close()


def test_when_the_file_is_of_a_newer_format_then_it_is_refused_by_name(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("pragma user_version=99")
    with pytest.raises(StoreError, match=r"format 99.*newer"):
        open_folder(tmp_path)


@pytest.mark.parametrize("number", [0, 1])
def test_when_the_file_is_of_an_earlier_format_then_it_is_migrated(tmp_path: Path, number: int) -> None:
    """Files of format 0 still contain deleted data. Files of format 1 do not."""
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("pragma journal_mode=wal")
        db.execute(f"pragma secure_delete={'on' if number else 'off'}")
        db.execute(SCHEMA)
        db.execute("insert into sessions values ('a', 'who', ?, ?, ?)", (b"hash", b"{}", time.time()))
        db.execute("insert into sessions values ('b', 'who', ?, ?, ?)", (b"hash", b"the code is 7391", time.time()))
        db.execute(f"pragma user_version={number}")
        db.commit()
        db.execute("delete from sessions where id = 'b'")
        db.commit()
    assert number or b"7391" in text_of(tmp_path)
    store = open_folder(tmp_path)
    # The row has no owner, so the first host that claims it becomes its owner.
    found = store.get("a")
    assert found == StoredSession("a", "who", b"hash", b"{}")
    claimed = store.claim("a", "a/1", 0)
    assert isinstance(claimed, StoredSession)
    store.put(stored("a", "later")).result(10)
    assert store.get("a") == stored("a", "later")
    store.close()
    assert b"7391" not in text_of(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("pragma user_version").fetchone() == (FORMAT,)
    # Opening it again changes nothing.
    store = open_folder(tmp_path)
    assert store.get("a") == stored("a", "later")
    store.close()


def test_when_two_processes_migrate_a_file_at_once_then_both_can_use_it(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute(SCHEMA)
        db.execute("pragma user_version=1")
        db.commit()
    stores: list[SessionStore] = []
    threads = [threading.Thread(target=lambda: stores.append(open_folder(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 4
    stores[0].put(stored("a")).result(10)
    assert stores[3].get("a") == stored("a")
    for store in stores:
        store.close()


HOLDER = """
import sys, time
from antiphon.store.sessions import Host, StoredSession, open_store

store = open_store({folder!r}, 60, 1000.0)
store.renew(Host("a/1"))
store.put(StoredSession("a", "who", b"hash", b"{{}}", "a/1", 1)).result(10)
print("ready", flush=True)
sys.stdin.read()
"""


def test_when_a_host_is_killed_then_it_is_dead_at_once_and_while_it_hangs_it_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER.format(folder=str(tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"ready\n"
        store = open_folder(tmp_path)
        holder.send_signal(signal.SIGSTOP)
        assert store.host("a/1") == Host("a/1")
        assert store.claim("a", "b/1", 1) is ClaimRefusal.OWNER_ALIVE
        holder.kill()
        holder.wait(10)
    assert store.hosts() == ()
    assert isinstance(store.claim("a", "b/1", 1), StoredSession)
    # Its leftovers are deleted at the next start.
    store.close()
    open_folder(tmp_path).close()
    assert list(tmp_path.glob("*.lock")) == []


def test_when_a_host_hangs_for_longer_than_its_time_then_it_is_dead_until_it_goes_on(tmp_path: Path) -> None:
    now_s = [100.0]
    store, other = (QueuedStore(SqliteBackend(tmp_path, 60, 5.0, uptime=lambda: now_s[0])) for _ in range(2))
    store.renew(Host("a/1"))
    now_s[0] += 4.9
    assert other.host("a/1")
    now_s[0] += 0.2
    assert other.host("a/1") is None
    # A host that was deleted from the table still holds its lock.
    SqliteBackend(tmp_path, 60, uptime=lambda: now_s[0]).close()
    store.renew(Host("a/1"))
    assert other.host("a/1")
    store.close()
    assert other.host("a/1") is None
    other.close()


def test_when_the_name_of_a_host_is_taken_then_a_second_process_cannot_have_it(tmp_path: Path) -> None:
    store, other = open_folder(tmp_path), open_folder(tmp_path)
    store.renew(Host("a/1"))
    with pytest.raises(StoreError, match="another process holds the lock of the host a/1"):
        other.renew(Host("a/1"))
    store.close()
    other.renew(Host("a/1"))
    other.close()
