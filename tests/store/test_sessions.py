"""Stored conversations: what one server writes, the next one reads."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from antiphon.errors import StoreError
from antiphon.store.sessions import FILE, SessionStore, StoredSession


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
