"""The writer's rounds: large conversations do not delay small ones, and are written, too."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from antiphon.errors import StoreError
from antiphon.store.sessions.backend import Write
from antiphon.store.sessions.sqlite import SqliteBackend
from antiphon.store.sessions.writer import ROUND_BYTES, QueuedStore
from tests.store.sessions.backends import row
from tests.store.sessions.test_contract import until


class WatchedBackend(SqliteBackend):
    """A backend that delays its first write until `gate` is set, and records which sessions each write has."""

    rounds: list[list[str]]
    gate: threading.Event

    def write(self, writes: Sequence[Write]) -> Sequence[StoreError | None]:
        self.rounds.append([write.hold.session_id for write in writes])
        assert self.gate.wait(10)
        return super().write(writes)


def test_when_large_conversations_wait_then_small_ones_are_written_between_them(tmp_path: Path) -> None:
    backend = WatchedBackend(tmp_path, 3600, 1000.0)
    backend.rounds, backend.gate = [], threading.Event()
    store = QueuedStore(backend)
    written = [store.put(row("first"))]
    until(lambda: bool(backend.rounds))
    written += [store.put(row(f"large-{n}", "x" * ROUND_BYTES)) for n in range(3)]
    written += [store.put(row(f"small-{n}")) for n in range(2)]
    backend.gate.set()
    for future in written:
        future.result(10)
    store.close()
    assert backend.rounds == [["first"], ["large-0"], ["small-0", "small-1"], ["large-1"], ["large-2"]]
