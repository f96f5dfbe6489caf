"""Conversations in SQLite."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from antiphon.errors import StoreError
from antiphon.store.sessions import FILE, SessionStore, StoredSession


def kept(name: str, text: str = "{}") -> StoredSession:
    return StoredSession(name, "who", b"hash", text.encode())


def test_the_latest_state_is_found_by_the_next_server(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "new", 60)
    for n in range(20):
        store.put(kept("a", f'{{"n":{n}}}'))
    store.put(kept("b"))
    store.forget("b")
    # At once, written or not.
    assert store.get("a") == kept("a", '{"n":19}')
    assert store.get("b") is None
    store.close()
    again = SessionStore(tmp_path / "new", 60)
    assert again.get("a") == kept("a", '{"n":19}')
    assert again.get("b") is None
    assert again.get("c") is None
    again.close()


def test_what_is_old_is_forgotten(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)
    store.put(kept("a"))
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("update sessions set at = at - 100")
    db.close()
    store = SessionStore(tmp_path, 60)
    assert store.get("a") is None
    store.close()


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 60)

    def write(name: str) -> None:
        for n in range(50):
            store.put(kept(name, str(n)))

    threads = [threading.Thread(target=write, args=(f"s{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    store = SessionStore(tmp_path, 60)
    assert [store.get(f"s{k}") for k in range(8)] == [kept(f"s{k}", "49") for k in range(8)]
    store.close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        SessionStore(tmp_path / "file", 60)
    (tmp_path / FILE).write_text("this is no database, but it is long enough to look like something" * 9)
    with pytest.raises(StoreError):
        SessionStore(tmp_path, 60)
