"""The SHA-256 of each file of a prepared folder, recorded when it is prepared and compared before it is loaded.

A gigabyte takes about a second to hash, and a start should not take it. So a file is hashed again only where its size
or one of its times is not as recorded. Among these is the time of the inode's change (ctime), which no program can set:
whatever writes to a file, and sets its time of modification back, is found. Who can write to the folder can write to
the record too: it tells damage, not forgery.

    <folder>/digests    {file's name: [size, mtime_ns, ctime_ns, sha256], ...}
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

RECORD = "digests"
# Size in bytes, times of modification and of the inode's change in ns.
State = tuple[int, int, int]


def write_digests(folder: Path) -> None:
    """Hash every file of a folder, and record it in place of what was recorded. Raises OSError."""
    names = sorted(name for name in os.listdir(folder) if name != RECORD)
    _write(folder, {name: (*_state(folder / name), sha256_of(folder / name)) for name in names})


def changed_files(folder: Path) -> list[str]:
    """The names of the files that are not as they were recorded: changed, missing, or there without a record; all that
    the folder has where the record cannot be read. What was only moved or copied is recorded anew.
    """
    there = {name for name in os.listdir(folder) if name != RECORD}
    try:
        recorded = msgspec.json.decode((folder / RECORD).read_bytes(), type=dict[str, tuple[int, int, int, str]])
    except (OSError, msgspec.MsgspecError):
        return sorted(there | {RECORD})
    changed, states = there ^ set(recorded), dict(recorded)
    for name in there & set(recorded):
        *before, digest = recorded[name]
        try:
            state = _state(folder / name)
            if list(state) != before:
                if state[0] != before[0] or sha256_of(folder / name) != digest:
                    changed.add(name)
                states[name] = (*state, digest)
        except OSError:
            changed.add(name)
    if not changed and states != recorded:
        # A folder that cannot be written to is hashed at every start.
        with suppress(OSError):
            _write(folder, states)
    return sorted(changed)


def _state(path: Path) -> State:
    """Raises OSError for what is no plain file: opening a pipe would wait for ever, a link leads elsewhere."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no plain file")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, recorded: dict[str, tuple[int, int, int, str]]) -> None:
    part = folder / f"{RECORD}.{os.getpid()}"
    part.write_bytes(msgspec.json.encode(recorded))
    os.replace(part, folder / RECORD)
