"""Stored conversations: what one server writes, the next one reads."""

from __future__ import annotations

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
from antiphon.store.sessions import FILE, PURGE_EVERY_S, SCHEMA, SessionStore, StoredSession


def stored(name: str, text: str = "{}") -> StoredSession:
    return StoredSession(name, "who", b"hash", text.encode())


def test_when_a_session_was_stored_then_the_next_server_finds_its_latest_state(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "new", 60)
    for n in range(20):
        store.put(stored("a", f'{{"n":{n}}}'))
    store.put(stored("b"))
    store.forget("b")
    # At once, written or not.
    assert store.get("a") == stored("a", '{"n":19}')
    assert store.get("b") is None
    store.close()
    again = SessionStore(tmp_path / "new", 60)
    assert again.get("a") == stored("a", '{"n":19}')
    assert again.get("b") is None
    assert again.get("c") is None
    again.close()


def test_when_a_session_is_old_then_it_is_not_found(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)
    store.put(stored("a"))
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("update sessions set at = at - 100")
    db.close()
    store = SessionStore(tmp_path, 60)
    assert store.get("a") is None
    store.close()


def test_when_many_threads_write_then_each_latest_state_is_stored(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)

    def write(name: str) -> None:
        for n in range(50):
            store.put(stored(name, str(n)))

    threads = [threading.Thread(target=write, args=(f"s{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    store = SessionStore(tmp_path, 60)
    assert [store.get(f"s{k}") for k in range(8)] == [stored(f"s{k}", "49") for k in range(8)]
    store.close()


def test_when_a_folder_or_database_cannot_be_used_then_an_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        SessionStore(tmp_path / "file", 60)
    (tmp_path / FILE).write_text("this is no database, but it is long enough to look like something" * 9)
    with pytest.raises(StoreError):
        SessionStore(tmp_path, 60)


def text_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_when_a_session_is_forgotten_then_its_text_is_in_no_file(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)
    store.put(stored("a", "the code is 7391 " * 400)).result(10)
    store.put(stored("a", "the code was 7391")).result(10)
    store.put(stored("b", "something else")).result(10)
    assert b"7391" in text_of(tmp_path)
    store.forget("a")
    # What is put after it is written after it.
    store.put(stored("b", "something else")).result(10)
    assert b"7391" not in text_of(tmp_path)
    store.close()
    assert b"7391" not in text_of(tmp_path)
    assert b"something else" in text_of(tmp_path)


def test_when_a_session_becomes_too_old_while_the_server_runs_then_its_text_is_in_no_file(tmp_path: Path) -> None:
    hours = [0.0]
    store = SessionStore(tmp_path, 60, lambda: hours[0] * PURGE_EVERY_S)
    store.put(stored("a", "the code is 7391")).result(10)
    hours[0] = 1.5
    for _ in range(2):
        # The second is written after what the first had the thread delete.
        store.put(stored("b", "something else")).result(10)
    assert b"7391" not in text_of(tmp_path)
    assert store.get("b")
    store.close()


def test_when_the_database_is_locked_then_nobody_waits_long_and_all_is_written_in_the_end(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("begin immediate")
        with pytest.raises(StoreError, match="locked"):
            store.put(stored("a", "1")).result(10)
        assert store.degraded
        # At once, since the store is known to be degraded.
        assert isinstance(store.put(stored("a", "2")).exception(0), StoreError)
        assert store.get("a") == stored("a", "2")
        other.execute("rollback")
    while store.degraded:
        store.put(stored("b")).exception(10)
    store.put(stored("c")).result(10)
    store.close()
    again = SessionStore(tmp_path, 60)
    assert again.get("a") == stored("a", "2")
    again.close()


def test_when_one_session_cannot_be_written_then_the_others_are(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)
    unwritable: Any = object()
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        # Both wait for the same moment.
        other.execute("begin immediate")
        bad = store.put(StoredSession("bad", "who", b"hash", unwritable))
        good = store.put(stored("good"))
        other.execute("rollback")
    with pytest.raises(StoreError):
        bad.result(10)
    good.result(10)
    assert store.degraded is None
    store.close()


def test_when_the_disk_is_full_then_it_is_said_and_what_was_written_stays(tmp_path: Path) -> None:
    """A process that may write 200 kB to a file: what comes after fails as it does on a full disk."""
    script = f"""
import resource
from pathlib import Path
from antiphon.errors import StoreError
from antiphon.store.sessions import SessionStore, StoredSession

store = SessionStore(Path({str(tmp_path)!r}), 60)
store.put(StoredSession("a", "who", b"hash", b"small")).result(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    store.put(StoredSession("b", "who", b"hash", b"x" * 1_000_000)).result(10)
except StoreError as error:
    print("refused:", bool(store.degraded))
store.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused: True\n", done.stderr
    store = SessionStore(tmp_path, 60)
    assert store.get("a") == stored("a", "small")
    assert store.get("b") is None
    store.close()


def test_when_the_file_is_of_a_newer_format_then_it_is_refused_by_name(tmp_path: Path) -> None:
    SessionStore(tmp_path, 60).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("pragma user_version=99")
    with pytest.raises(StoreError, match=r"format 99.*newer"):
        SessionStore(tmp_path, 60)


def test_when_the_file_is_of_the_first_format_then_it_is_migrated(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("pragma secure_delete=off")
        db.execute(SCHEMA)
        db.execute("insert into sessions values ('a', 'who', ?, ?, ?)", (b"hash", b"{}", time.time()))
        db.execute("insert into sessions values ('b', 'who', ?, ?, ?)", (b"hash", b"the code is 7391", time.time()))
        db.commit()
        db.execute("delete from sessions where id = 'b'")
        db.commit()
    assert b"7391" in text_of(tmp_path)
    store = SessionStore(tmp_path, 60)
    assert store.get("a") == stored("a")
    store.close()
    assert b"7391" not in text_of(tmp_path)
