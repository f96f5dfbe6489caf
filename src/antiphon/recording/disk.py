"""The disk side of recordings: a writer thread for each session, and the limits of all recordings together."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# The maximum number of bytes of one recording that wait for a slow disk. Entries beyond it are dropped.
MAX_WAITING_BYTES = 16 << 20
_FOLDER_NAME = re.compile(r"\d{8}-\d{6}-.+")


class DiskWriter:
    """Runs writes in order in its own thread, so that a slow disk blocks no other work.

    `name`: the name of the recording, for the log. The process waits for the thread before it exits.
    """

    def __init__(self, name: str, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._name = name
        self._max_waiting_bytes = max_waiting_bytes
        # Bounded by the bytes that its entries represent; None marks the end.
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._failed = False
        # The number of writes that were dropped because the queue was full.
        self.num_dropped = 0
        self._last: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name=f"record {name}")
        self._thread.start()

    def put(self, num_bytes: int, write: Callable[[], object]) -> bool:
        """Queue a call of `write`, which represents `num_bytes` of memory. Does not wait.

        Returns False, and counts the write as dropped, if the queue is full. The first time is logged.
        """
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
                self.num_dropped += 1
                if self.num_dropped == 1:
                    log.warning("%s: the disk is too slow; entries are dropped", self._name)
                return False
            self._waiting_bytes += num_bytes
        self._queue.put((num_bytes, write))
        return True

    def close(self, last: Callable[[], object]) -> None:
        """Queue a call of `last` after all writes, even if writing has failed, and end the thread. Does not wait."""
        self._last = last
        self._queue.put(None)

    def join(self) -> None:
        """Wait until everything is written. Call it after `close`."""
        self._thread.join()

    def _run(self) -> None:
        while entry := self._queue.get():
            num_bytes, write = entry
            try:
                if not self._failed:
                    write()
            except OSError as error:
                self._failed = True
                log.error("the recording %s stops here: %s", self._name, error)
            except Exception:
                self._failed = True
                log.exception("the recording %s stops here", self._name)
            with self._lock:
                self._waiting_bytes -= num_bytes
        if self.num_dropped:
            log.warning("%s: %d entries were not recorded", self._name, self.num_dropped)
        with contextlib.suppress(OSError):
            self._last()


@dataclass(frozen=True, slots=True)
class Keep:
    """The limits of a folder's recordings: the bytes of all, and the age of each since its last event; 0: no limit."""

    max_bytes: int = 0
    max_hours: float = 0.0


KEEP_ALL = Keep()


def prune(folder: Path, keep: Keep) -> None:
    """Delete the recordings in `folder` that are too old, then the oldest ones until the rest fits the limit.

    A recording that a process is still writing is kept, and so is everything that is not a recording. Recordings that
    are unreadable, or that another process deletes at the same time, are skipped.
    """
    if keep == KEEP_ALL:
        return
    found = sorted(p for p in folder.iterdir() if _FOLDER_NAME.fullmatch(p.name))
    seen = {path: about for path in found if (about := _size_and_last_event_s(path))}
    total = sum(size for size, _ in seen.values())
    oldest_s = time.time() - keep.max_hours * 3600 if keep.max_hours else 0.0
    for path, (size, last_event_s) in seen.items():
        is_over = keep.max_bytes and total > keep.max_bytes
        if (is_over or last_event_s < oldest_s) and not _is_written(path):
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _size_and_last_event_s(folder: Path) -> tuple[int, float] | None:
    """Return the bytes of a recording, and when its last event was written, in Unix seconds; None if it is gone."""
    try:
        stats = {file.name: file.stat() for file in folder.iterdir()}
    except OSError:
        return None
    if "session.json" not in stats:
        return None
    return sum(s.st_size for s in stats.values()), max(s.st_mtime for s in stats.values())


def _is_written(folder: Path) -> bool:
    """Return whether a process is recording into the folder: it holds a lock on the events."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
