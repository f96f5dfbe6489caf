"""The SHA-256 of each file of a prepared folder: recorded after preparing the folder, compared before loading it.

Hashing a gigabyte takes about a second, which would slow down each start. So a file is hashed again only if its size or
one of its timestamps differs from the record. Programs cannot set one of these timestamps, the inode's change time
(ctime). So a changed file is found even if its modification time was reset. The record detects damage, not forgery,
because a program that can write to the folder can also write to the record.

    <folder>/digests    {file name: [size, mtime_ns, ctime_ns, sha256], ...}
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

RECORD = "digests"
# Size in bytes, modification time (mtime) and inode change time (ctime) in ns.
State = tuple[int, int, int]


def write_digests(folder: Path) -> None:
    """Hash every file of a folder, and replace the folder's record. Raises OSError."""
    names = sorted(name for name in os.listdir(folder) if name != RECORD)
    write_record(folder, {name: (*_state(folder / name), sha256_of(folder / name)) for name in names})


def changed_files(folder: Path) -> list[str]:
    """Return the names of the files that differ from the record: changed, missing or unrecorded ones.

    If the record cannot be read, returns all files of the folder. If only timestamps have changed, as after a copy, the
    record is updated.
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
        # If the folder is not writable, its files are hashed at every start.
        with suppress(OSError):
            write_record(folder, states)
    return sorted(changed)


def _state(path: Path) -> State:
    """Return a file's state.

    Raises OSError if it is not a regular file: a pipe would block, a link may leave the folder.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_record(folder: Path, recorded: dict[str, tuple[int, int, int, str]]) -> None:
    """Write the states and digests of a folder's files. Raises OSError."""
    part = folder / f"{RECORD}.{os.getpid()}"
    part.write_bytes(msgspec.json.encode(recorded))
    os.replace(part, folder / RECORD)
