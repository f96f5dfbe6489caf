"""Rows as differences from an earlier row of the same session. Pure.

A session is stored after each of its events, and its rows resemble each other: a few numbers, ids and words change. So
a row can be sent to a backend as a *patch*: the compressed snapshot, for which an earlier snapshot, the *base*, is the
dictionary.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from antiphon.store.sessions.api import Hold, StoredSession

# Maximum size of a base and of a patched snapshot, in bytes. Deflate finds repetitions within 32 KiB.
MAX_PATCHED_BYTES = 15 << 10
# A snapshot is written whole if its patch is larger than this fraction of it. It is the next base then.
MAX_FRACTION = 0.5
# Bytes of the snapshot's CRC at the beginning of a patch.
CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Patch:
    """The difference of a row from its base. `base` identifies the base, and `data` is the patch."""

    base: int
    data: bytes


def base_id(snapshot: bytes) -> int:
    """Return the number that identifies a base: its CRC-32."""
    return zlib.crc32(snapshot)


@dataclass(slots=True)
class _Written:
    """The row of a session that was written whole most recently, and the newest row, which may be a patch of it."""

    base: StoredSession
    newest: StoredSession


class Bases:
    """The written rows of the sessions of this process, two for each session. Bound: MAX_PATCHED_BYTES for each row."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}

    def patch(self, row: StoredSession) -> Patch | None:
        """Return the patch that makes `row` of its base; None if the row has to be written whole."""
        written = self._written.get(row.id)
        if written is None or _fixed(written.base) != _fixed(row) or len(row.snapshot) > MAX_PATCHED_BYTES:
            return None
        base = written.base.snapshot
        packer = zlib.compressobj(wbits=-15, zdict=base)
        data = zlib.crc32(row.snapshot).to_bytes(CRC_BYTES, "big") + packer.compress(row.snapshot) + packer.flush()
        return Patch(base_id(base), data) if len(data) <= MAX_FRACTION * len(row.snapshot) else None

    def newest(self, session_id: str) -> StoredSession | None:
        """Return the newest row of a session if it was written as a patch, else None."""
        written = self._written.get(session_id)
        return written.newest if written and written.newest is not written.base else None

    def wrote(self, row: StoredSession, *, whole: bool) -> None:
        """Record a row that was written. `whole`: not as a patch."""
        if not whole:
            self._written[row.id].newest = row
        elif len(row.snapshot) <= MAX_PATCHED_BYTES:
            self._written[row.id] = _Written(row, row)
        else:
            self.drop(row.id)

    def drop(self, session_id: str) -> None:
        """Forget the rows of a session, so that its next row is written whole."""
        self._written.pop(session_id, None)


def patched(base: bytes, data: bytes) -> bytes:
    """Return the snapshot that the patch `data` makes of the snapshot `base`.

    Raises ValueError if the patch is damaged, or was made for another base.
    """
    unpacker = zlib.decompressobj(wbits=-15, zdict=base)
    try:
        snapshot = unpacker.decompress(data[CRC_BYTES:], MAX_PATCHED_BYTES)
    except zlib.error as error:
        raise ValueError(f"the patch is damaged: {error}") from None
    if not unpacker.eof or zlib.crc32(snapshot).to_bytes(CRC_BYTES, "big") != data[:CRC_BYTES]:
        raise ValueError("the patch is damaged, or was made for another row")
    return snapshot


def _fixed(row: StoredSession) -> tuple[Hold, str, bytes, int]:
    """Return the fields that a patched row has in common with its base."""
    return row.hold, row.key_hash, row.token, row.version
